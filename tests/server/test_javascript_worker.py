"""example_workers/worker.mjs keeps docs/worker-contract.md, from which it was written; each mistake breaks one line."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import read_attempts
from airflow_provider_jetstream.worker import Worker
from airflow_provider_jetstream.worker.conformance.lines import JOBS, contract_lines
from airflow_provider_jetstream.worker.conformance.trial import TrialSettings, run_trial
from testbed.face import last_message
from testbed.ports import LOOPBACK
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    running_worker,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import AttemptReport, ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.mjs"
LONG = 150.0
# The mistakes of workers that were written from version 1, and what takes the place of what.
MISTAKES = {
    "id-in-nanoseconds": ("${place.stored}`);\n  for", "${Number(place.stored) / 1e9}`);\n  for"),
    "taken-id": ("!ack.duplicate ||", "true ||"),
    "result-left-out": ("return { length: job.length };", "return null;"),
    "percent-encoding": ('header("Job-Id", 10000)', '(encodeURIComponent(header("Job-Id", 10000) ?? "") || undefined)'),
    "progress-in-time": ("message.working()", "undefined"),
    "cancelled-not-run": ("if (cancelled)", "if (false)"),
    "record-before-termination": (
        'await storeRecord(message, place, "terminated"',
        'void (message, place, "terminated"',
    ),
    "required-fields": ("timestamp: new Date().toISOString(), ", ""),
    "earlier-cancellation": ("nanosecondsOf(found.timestamp) >= BigInt(stored)", "true"),
    "failure-comes-back": ("return message.nak(1000);", "return message.ack();"),
    # A parser that knows bare numbers only.
    "deadline": ("if (!duration || duration.length > 64)", "if (!/^[0-9.]+$/.test(duration))"),
    "attempt-form": ("stream_seq: sequence, deliveries, ...fields", "stream_seq: sequence, ...fields"),
    "expired-not-run": ("return expires < Date.now()", "return expires < 0"),
    "completion-before-acknowledgement": (
        "  await repeated(async () => {",
        "  repeated(async () => {",
    ),
}


async def broken_lines(
    connection: NatsPyConnection, name: str, server: tuple[str, int], script: Path, folder: Path
) -> set[str]:
    """Return which lines of the contract a worker breaks."""
    settings = TrialSettings(server, ["node", str(script)], folder, LONG)
    trial = await run_trial(connection, settings, name, JOBS)
    return {line.name for line in contract_lines(trial) if line.problem}


@pytest.mark.slow
async def test_the_worker_keeps_each_line_of_the_contract_and_one_with_a_mistake_breaks_that_line(
    connection: NatsPyConnection, nats: NatsServer, name: str, node_folder: Path, tmp_path: Path
) -> None:
    source = WORKER.read_text(encoding="utf-8")
    scripts = {"none": source}
    for line, (right, wrong) in MISTAKES.items():
        assert source.count(right) == 1, line
        scripts[line] = source.replace(right, wrong)
    for line, script in scripts.items():
        (node_folder / f"{line}.mjs").write_text(script, encoding="utf-8")
    runs = [
        broken_lines(connection, f"{name}-{number}", (LOOPBACK, nats.port), node_folder / f"{line}.mjs", tmp_path)
        for number, line in enumerate(scripts)
    ]
    found = dict(zip(scripts, await asyncio.gather(*runs), strict=True))
    # An attempt that takes too long is a failure too.
    also = {"failure-comes-back": {"deadline"}}
    assert found == {"none": set()} | {line: {line} | also.get(line, set()) for line in MISTAKES}


@pytest.mark.slow
async def test_the_worker_stores_how_far_it_is_and_how_each_attempt_failed(
    connection: NatsPyConnection, nats: NatsServer, name: str, node_folder: Path
) -> None:
    consumer = {"ack_wait": "5s", "max_deliver": 2}
    queue = await make_queue(connection, name, consumer=consumer, jobs=["fail", "sleep 30"], attempts=True)
    script = node_folder / "attempts.mjs"
    script.write_text(WORKER.read_text(encoding="utf-8"), encoding="utf-8")
    env = {**os.environ, "NATS_URL": nats.url, "JOB_STREAM": name, "JOB_CONSUMER": "worker"}
    process = Process.start(["node", str(script)], env=env, log_file=script.with_suffix(".log"))

    async def progress() -> AttemptReport | None:
        attempts = await read_attempts(connection, queue, 2)
        return attempts[0] if attempts and (attempts[0].fraction or 0) > 0 else None

    try:
        running = await eventually(progress, within=LONG)
    finally:
        process.kill()
    assert (running.number, running.state) == (1, "running")
    assert (running.text or "").endswith(" of 30 s")
    first = (await read_attempts(connection, queue, 1))[0]
    assert (first.state, first.error_class, first.error_message) == ("failed", "Error", "the job says so")
    assert re.fullmatch(r"attempts:run:\d+", first.error_place or "")
    assert first.seconds is not None
    assert first.worker == running.worker
    assert (first.worker or "").endswith(f":{process.pid}")


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_job_that_workers_in_two_languages_have_done_has_one_end(
    connection: NatsPyConnection, settings: ConnectionSettings, nats: NatsServer, name: str, node_folder: Path
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 5}, jobs=["both"])
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
        await until_stored(connection, name, 0, within=LONG)
    assert await completion_count(connection, name) == 1
    assert await last_message(connection, f"{name}-events", f"completed.{name}.worker.1") == first
