"""example_workers/worker.mjs keeps docs/worker-contract.md, from which it was written; each mistake breaks one line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID
from airflow_provider_jetstream.worker import Worker
from testbed.processes import Process
from testbed.queues import eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from testbed.nats_server import NatsServer

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.mjs"
PACKAGE = "nats@2.29.3"
ODD_ID = "50%25/größer than.>"
LONG = 60.0
JOBS = {
    "plain": None,
    "odd": ODD_ID,
    "cancelled": "c",
    "give up": None,
    "sleep 5": None,
    # The events stream refuses its end.
    "refused end": "x" * 3_000,
}
# The mistakes of workers that were written from version 1, and what takes the place of what.
MISTAKES = {
    "id-in-nanoseconds": ("${place.stored}`);\n  for", "${Number(place.stored) / 1e9}`);\n  for"),
    "result-left-out": ("return { length: job.length };", "return null;"),
    "percent-encoding": ('header("Job-Id", 10000)', '(encodeURIComponent(header("Job-Id", 10000) ?? "") || undefined)'),
    "progress-in-time": ("message.working()", "undefined"),
    "cancelled-not-run": ("if (cancelled)", "if (false)"),
    "record-before-termination": ("await storeRecord(", "void ("),
    "completion-before-acknowledgement": (
        "  await repeated(() => jetstream.publish",
        "  repeated(() => jetstream.publish",
    ),
}


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (npm := shutil.which("npm")):
        pytest.skip("npm isn't installed")
    folder = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        pytest.skip(f"no registry gives {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return folder


async def broken_lines(connection: NatsPyConnection, name: str, url: str, script: Path) -> set[str]:
    """Let a worker do one job of each kind, and return which lines of the contract it breaks."""
    queue = await make_queue(
        connection,
        name,
        consumer={"ack_wait": "2s", "max_deliver": 5},
        events={"name": f"{name}-events", "max_msg_size": 2_500},
    )
    progress = await connection.client.subscribe(f"$JS.ACK.{name}.>")
    sequences: dict[str, int] = {}
    for body, job_id in JOBS.items():
        headers = {JOB_ID: job_id} if job_id else None
        (sequences[body],) = await publish_jobs(connection, queue, [body], headers=headers)
    await cancel(connection, queue, "c", "wrong price", "ann")
    stored = {body: await get_message(connection, name, sequence) for body, sequence in sequences.items()}
    env = {**os.environ, "NATS_URL": url, "JOB_STREAM": name, "JOB_CONSUMER": "worker"}
    process = Process.start(["node", str(script)], env=env, log_file=script.with_suffix(".log"))

    async def last_begun() -> bool:
        assert process.alive, process.output()
        return "job refused end" in process.output()

    try:
        await eventually(last_begun, within=LONG)
        # A worker that waits for the end to be stored never acknowledges this job; another one does soon.
        for _ in range(20):
            await asyncio.sleep(0.1)
            if await get_message(connection, name, sequences["refused end"]) is None:
                break
        last = await get_message(connection, name, sequences["refused end"])
        ends = {
            body: await last_message(connection, f"{name}-events", f"completed.{name}.worker.{sequence}")
            for body, sequence in sequences.items()
        }
        assert queue.dead_letters is not None
        record = await last_message(connection, queue.dead_letters.name, f"dead.{name}.worker.{sequences['give up']}")
        found = _broken(name, sequences, stored, ends, record, last, process.output())
    finally:
        process.kill()
    signals = [message async for message in _received(progress) if message.data == b"+WPI"]
    slow = str(sequences["sleep 5"])
    if sum(message.subject.split(".")[-4] == slow for message in signals) < 2:
        found.add("progress-in-time")
    await progress.unsubscribe()
    return found


async def _received(subscription: Subscription) -> AsyncIterator[Msg]:
    while subscription.pending_msgs:
        yield await subscription.next_msg(timeout=5)


def _broken(
    name: str,
    sequences: dict[str, int],
    stored: dict[str, StoredMessage | None],
    ends: dict[str, StoredMessage | None],
    record: StoredMessage | None,
    last: StoredMessage | None,
    output: str,
) -> set[str]:
    bodies: dict[str, dict[str, Any]] = {job: json.loads(end.data) if end else {} for job, end in ends.items()}
    found = set()
    for job, end in ends.items():
        job_stored = stored[job]
        assert job_stored is not None
        seconds, _, decimals = job_stored.time.removesuffix("Z").partition(".")
        expected = f"done:{name}:{sequences[job]}:{_nanoseconds(seconds, decimals)}"
        if end and end.header(MSG_ID) != expected:
            found.add("id-in-nanoseconds")
        if end and bodies[job].get("result", 0) is None:
            found.add("result-left-out")
    if bodies["odd"].get("job_id") != ODD_ID:
        found.add("percent-encoding")
    if "job cancelled" in output or not bodies["cancelled"].get("type", "").endswith(".cancelled"):
        found.add("cancelled-not-run")
    if record is None or record.data != b"give up" or ends["give up"] is not None:
        found.add("record-before-termination")
    if last is None:
        found.add("completion-before-acknowledgement")
    if not bodies["plain"]:
        found.add("plain job")
    return found


def _nanoseconds(seconds: str, decimals: str) -> int:
    return int(datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp()) * 10**9 + int(decimals.ljust(9, "0"))


async def test_the_worker_keeps_each_line_of_the_contract_and_one_with_a_mistake_breaks_that_line(
    connection: NatsPyConnection, nats: NatsServer, name: str, node_folder: Path
) -> None:
    source = WORKER.read_text(encoding="utf-8")
    scripts = {"none": source}
    for line, (right, wrong) in MISTAKES.items():
        assert source.count(right) == 1, line
        scripts[line] = source.replace(right, wrong)
    for line, script in scripts.items():
        (node_folder / f"{line}.mjs").write_text(script, encoding="utf-8")
    runs = [
        broken_lines(connection, f"{name}-{number}", nats.url, node_folder / f"{line}.mjs")
        for number, line in enumerate(scripts)
    ]
    found = dict(zip(scripts, await asyncio.gather(*runs), strict=True))
    assert found == {"none": set()} | {line: {line} for line in MISTAKES}


async def test_a_job_that_workers_in_two_languages_have_done_has_one_end(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str, node_folder: Path
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 5})
    await publish_jobs(connection, queue, ["both"])
    acknowledge = "await repeated(() => message.ackAck());"
    source = WORKER.read_text(encoding="utf-8")
    assert source.count(acknowledge) == 1
    script = node_folder / "killed.mjs"
    # Between the completion and the acknowledgement.
    script.write_text(source.replace(acknowledge, 'process.kill(process.pid, "SIGKILL");'), encoding="utf-8")
    env = {**os.environ, "NATS_URL": nats.url, "JOB_STREAM": name, "JOB_CONSUMER": "worker"}
    process = Process.start(["node", str(script)], env=env, log_file=script.with_suffix(".log"))
    try:
        await eventually(lambda: not process.alive, within=LONG)
    finally:
        process.kill()
    first = await last_message(connection, f"{name}-events", f"completed.{name}.worker.1")
    assert first is not None
    async with running_worker(Worker(queue, "worker", lambda job: job.attempt, settings)):
        await eventually(lambda: _is_done(connection, name), within=LONG)
    assert await stored_count(connection, f"{name}-events") == 1
    assert await last_message(connection, f"{name}-events", f"completed.{name}.worker.1") == first


async def _is_done(connection: NatsPyConnection, name: str) -> bool:
    return await stored_count(connection, name) == 0
