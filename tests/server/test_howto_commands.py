"""The commands of the pages about workers and the command line run as they stand, and do what the pages say."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from test_exporter import scrape

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    WorkQueue,
    connect,
    find_dead_letters,
    permissions,
    provision,
    publish,
)
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.code_blocks import ROOT, code_blocks
from testbed.dead_letters import acknowledge_jobs, stream_messages
from testbed.face import Completion, ExitCode, parse_advisory
from testbed.ports import free_port
from testbed.queues import eventually, make_dead_letters, make_queue, publish_jobs, running_worker, stored_count
from testbed.terminal import terminal_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from testbed.console import Terminal
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# What the page's handler calls is its reader's own.
_READERS_OWN = """
from pathlib import Path


def bank_is_open():
    return not Path("bank.closed").exists()


def fetch(item, amount):
    return f"{item}-{amount}"
"""


@pytest.fixture
async def admin(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to the server that the terminal's commands use."""
    async with connect(ConnectionSettings(servers=(own_nats.url,), timeout=5)) as connection:
        yield connection


def write_queue(folder: Path, file: str, name: str, consumer: str, **fields: Any) -> WorkQueue:
    """Write the file of a queue that a page names by its file alone."""
    declared = {
        "name": name,
        "subjects": [f"{name}.>"],
        "dead_letters": f"{name}-dead",
        "events": f"{name}-events",
        "consumers": [{"name": consumer, "max_deliver": 5, "backoff": ["30s"]}],
    }
    (folder / file).write_text(yaml.safe_dump(declared | fields))
    return WorkQueue.load(folder / file)


def write_handler(folder: Path, file: str) -> None:
    """Write the handler of docs/worker.md into a module, with the functions that its reader has."""
    (handler,) = [block for block in code_blocks("python") if block.file == "shop/orders.py"]
    (folder / file).parent.mkdir()
    (folder / file).write_text(handler.code + _READERS_OWN)


async def ended(process: Process) -> None:
    process.signal(signal.SIGTERM)
    await eventually(lambda: not process.alive)
    assert process.returncode == 0, process.output()


async def completions(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, Completion]:
    """Read the completions of a queue's jobs, by the jobs' sequences."""
    assert queue.events
    found = [parse_advisory(each.data) for each in await stream_messages(connection, queue.events.name, "completed.>")]
    return {each.stream_seq: each for each in found if isinstance(each, Completion)}


@pytest.mark.slow
async def test_an_account_names_the_jobs_that_are_gone_without_evidence(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queue = await make_queue(admin, "orders", consumer={"sample_freq": "100%"})
    await publish_jobs(admin, queue, ["done", "deleted", "waiting"])
    await acknowledge_jobs(admin, queue, 1)
    await admin.api("STREAM.MSG.DELETE.orders", {"seq": 2})
    shown = await asyncio.to_thread(terminal.run, code=ExitCode.FINDINGS)
    assert "3 jobs of orders: 1 stored, 1 ended, 1 unaccounted (2)" in shown


@pytest.mark.slow
async def test_the_handler_of_the_page_does_gives_up_and_delays_jobs(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = write_queue(terminal.folder, "queue.yaml", "orders", "high")
    write_handler(terminal.folder, "shop/orders.py")
    await provision(admin, queue)
    terminal.replace("nats://nats:4222", own_nats.url)
    closed = terminal.folder / "bank.closed"
    closed.touch()
    await publish(admin, queue, [Job({"item": "salt", "amount": 1})], subject="orders.new")
    worker = terminal.start()
    await eventually(lambda: worker.output().count("job ended") == 1)
    closed.unlink()
    bodies = [{"item": "tea", "amount": 3}, {"item": "tea", "amount": 1_001}, {"item": "tea"}]
    await publish(admin, queue, [Job(body) for body in bodies], subject="orders.new")
    await eventually(lambda: worker.output().count("job ended") == 1 + len(bodies))
    await ended(worker)
    # The first one is delivered again in two minutes.
    assert await stored_count(admin, "orders") == 1
    done = await completions(admin, queue)
    assert {sequence: (each.result, each.worker) for sequence, each in done.items()} == {2: ({"shelf": "tea-3"}, "3")}
    letters = {letter.sequence: letter.death for letter in (await find_dead_letters(admin, queue)).letters}
    assert set(letters) == {3, 4}
    assert letters[3].explanation == "no store has so many"
    assert letters[4].error_class == "airflow_provider_jetstream.worker.errors.InvalidBodyError"


@pytest.mark.slow
async def test_a_delivery_ends_with_the_log_line_that_the_page_shows(
    own_nats: NatsServer, admin: NatsPyConnection, tmp_path: Path
) -> None:
    queue = write_queue(tmp_path, "queue.yaml", "orders", "high")
    (tmp_path / "slow.py").write_text("import asyncio\n\n\nasync def process(job):\n    await asyncio.sleep(60)\n")
    await provision(admin, queue)
    await admin.client.jetstream().publish("orders.new", b"", headers={"Job-Id": "order-16"})
    words = "run --queue queue.yaml --consumer high --handler slow:process --deadline 0.1 --id 3 --log-format json"
    command = [sys.executable, "-m", "airflow_provider_jetstream.worker.cli", *words.split()]
    worker = Process.start(command, env=terminal_env(own_nats.url), log_file=tmp_path / "worker.log", cwd=tmp_path)
    try:
        await eventually(lambda: "job ended" in worker.output())
    finally:
        worker.terminate()
    ended = [line for line in map(json.loads, worker.output().splitlines()) if line["message"].startswith("job ended")]
    (shown,) = [json.loads(block.code) for block in code_blocks("json") if block.page == "docs/worker.md"]
    assert list(ended[0]) == list(shown)
    of_the_delivery = {"time", "message", "sequence", "job_id", "attempt", "outcome", "seconds"}
    assert {name: ended[0][name] for name in shown.keys() - of_the_delivery} == {
        name: shown[name] for name in shown.keys() - of_the_delivery
    }


@pytest.mark.slow
async def test_a_worker_with_a_fallback_does_the_jobs_of_both_queues(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queues = {}
    for kind in ("high", "normal"):
        queue = write_queue(terminal.folder, f"tasks_{kind}.yaml", f"tasks_{kind}", "worker")
        await provision(admin, queue)
        await publish(admin, queue, [Job({"item": kind, "amount": 1})] * 15, subject=f"tasks_{kind}.new")
        queues[kind] = queue
    write_handler(terminal.folder, "shop/tasks.py")
    worker = terminal.start()

    async def all_done() -> bool:
        return not sum([await stored_count(admin, queue.name) for queue in queues.values()])

    await eventually(all_done)
    await ended(worker)
    for kind, queue in queues.items():
        done = await completions(admin, queue)
        assert [each.result for each in done.values()] == [{"shelf": f"{kind}-1"}] * 15


def handle(job: Delivery) -> None:
    """Do a redriven job."""


@pytest.mark.slow
async def test_the_first_look_finds_queues_and_says_what_to_do(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = await make_queue(admin, "orders")
    terminal.replace("nats://nats-1:4222", own_nats.url)
    listed = await asyncio.to_thread(terminal.run)
    assert "orders" in listed
    await make_dead_letters(admin, queue, ["a", "b"])
    # Dead letters are what the exit code 1 says of this command.
    assert "2 dead letters" in await asyncio.to_thread(terminal.run, code=ExitCode.FINDINGS)


@pytest.mark.slow
async def test_letters_older_than_an_hour_are_listed_one_a_line(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    (old,) = await make_dead_letters(admin, queue, ["old"])
    # A worker's record says when; the server's advisory would say that it was a moment ago.
    await admin.api("STREAM.PURGE.orders-dead")
    record = {
        "Dead-Letter-Sequence": str(old),
        "Dead-Letter-Subject": "orders.jobs.plain",
        "Dead-Letter-Reason": "max_deliveries",
        "Dead-Letter-Last-Failure": (datetime.now(UTC) - timedelta(hours=2)).isoformat(),
    }
    await admin.client.jetstream().publish("dead.orders.worker", b"old", headers=record)
    await make_dead_letters(admin, queue, ["new"])
    (line,) = (await asyncio.to_thread(terminal.run)).splitlines()
    assert (json.loads(line)["sequence"], line.isascii()) == (old, True)


@pytest.mark.slow
async def test_letters_are_counted_redriven_a_few_first_in_waves_and_patched(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = await make_queue(admin, "orders", consumer={"ack_wait": "30s", "max_ack_pending": 1_000})
    await make_dead_letters(admin, queue, [json.dumps({"total": f"1,{number}"}) for number in range(125)])
    assert "125 would be redriven" in await asyncio.to_thread(terminal.run)
    assert await stored_count(admin, "orders") == 125
    settings = ConnectionSettings(servers=(own_nats.url,))
    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=20)):
        assert re.search(r"\b10 completed", await asyncio.to_thread(terminal.run))
        assert await stored_count(admin, "orders") == 115
        assert re.search(r"\b115 completed", await asyncio.to_thread(terminal.run))
        assert await stored_count(admin, "orders") == 0
    (first, second) = json.loads(await _status(terminal))
    assert (first["redriven"], second["redriven"], second["why"]) == (115, 10, "provider is back")
    await make_dead_letters(admin, queue, [json.dumps({"total": "1,5"}), json.dumps({"sum": "1,5"})])
    patch = [{"op": "replace", "path": "/total", "value": "1.5"}]
    (terminal.folder / "fix.json").write_text(json.dumps(patch))
    # One of the two letters has no total, so it would stay, which is what the exit code 1 says.
    printed = await asyncio.to_thread(terminal.run, code=ExitCode.FINDINGS)
    assert [line for line in printed.splitlines() if line.startswith(("-  ", "+  "))] == [
        '-  "total": "1,5"',
        '+  "total": "1.5"',
    ]
    assert "1 of them would be changed" in printed
    assert "252: operation 1 of the patch, replace /total: the body has no such place" in printed
    assert await stored_count(admin, "orders") == 2


async def _status(terminal: Terminal) -> str:
    """Ask for the redrives, as the page's table of commands names it."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        "jetstream-queue redrive status orders --json",
        env=terminal.env,
        stdout=asyncio.subprocess.PIPE,
    )
    return (await process.communicate())[0].decode()


@pytest.mark.slow
def test_the_shell_completes_what_is_typed(terminal: Terminal) -> None:
    typed = "jetstream-queue letters di"
    function = "$(complete -p jetstream-queue | grep -oP '(?<=-F )\\S+')"
    press_tab = (
        f"COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_TYPE=9 COMP_WORDS=({typed}) COMP_CWORD=2"
        f"\n{function} jetstream-queue di letters\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    assert terminal.run(after=press_tab).split() == ["diagnose"]


@pytest.mark.slow
async def test_the_exporter_serves_metrics_until_it_is_interrupted(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    await publish_jobs(admin, queue, ["a"])
    port = free_port()
    terminal.replace("9808", str(port))
    exporter = terminal.start()
    found = await eventually(lambda: scrape(port).get("jetstream_queue_messages"), 60)
    assert found == {("orders",): 1}
    exporter.signal(signal.SIGINT)
    await eventually(lambda: not exporter.alive)
    assert exporter.returncode == 0


@pytest.mark.slow
async def test_an_example_runs_without_docker(terminal: Terminal, admin: NatsPyConnection, tmp_path: Path) -> None:
    terminal.folder = ROOT
    ledger = tmp_path / "surveys"
    terminal.env["SURVEYS_LEDGER"] = str(ledger)
    await asyncio.to_thread(terminal.run)
    queue = WorkQueue.load(ROOT / "example_dags/queues/surveys.yaml")
    await publish(admin, queue, [Job({"to": "ada@example.org"})], subject="surveys.new")
    worker = terminal.start()
    await eventually(ledger.exists)
    await ended(worker)
    assert json.loads(ledger.read_text())["to"] == "ada@example.org"


@pytest.mark.slow
async def test_a_queue_is_prepared_before_the_first_job(terminal: Terminal, admin: NatsPyConnection) -> None:
    # What the page wants at least.
    limits = {"max_bytes": "256MB", "discard": "new", "archive": {"max_bytes": "256MB"}}
    queue = write_queue(terminal.folder, "orders.yaml", "orders", "processor", **limits)
    assert await asyncio.to_thread(terminal.run) == "nothing found\n"
    # A change to make is what the exit code 1 says of this command.
    assert "create" in await asyncio.to_thread(terminal.run, code=ExitCode.FINDINGS)
    await asyncio.to_thread(terminal.run)
    assert await stored_count(admin, "orders") == 0
    policy = permissions(queue, "worker", consumer="processor")
    printed = await asyncio.to_thread(terminal.run)
    assert all(f'"{line.subject}"' in printed for line in policy.permissions)
