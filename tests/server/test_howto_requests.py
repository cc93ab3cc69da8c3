"""The requests, backups and trials that pages have their readers type run as they stand, and do what the pages say."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Reason,
    account_for_jobs,
    cancel,
    connect,
    find_dead_letters,
    redrive_dead_letters,
)
from testbed.dead_letters import acknowledge_jobs, stream_messages
from testbed.ports import LOOPBACK, free_port
from testbed.queues import make_dead_letters, make_queue, process_all, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.console import Terminal
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.mjs"
# The job that the page's requests name.
NAMED = 17
# The trial's own id, and times.
_ID = r"(?<=conform-)[0-9a-f]+|\b\d{10,}(\.\d+)?"
# The server writes the state of a consumer a moment after it has changed.
PERSISTED = 0.4


@pytest.fixture
async def admin(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to the server that the terminal's commands use."""
    async with connect(ConnectionSettings(servers=(own_nats.url,), timeout=5)) as connection:
        yield connection


async def answer_of(terminal: Terminal) -> dict[str, Any]:
    """Send the next request, and return the server's answer."""
    answer: dict[str, Any] = json.loads(await asyncio.to_thread(terminal.run))
    return answer


@pytest.mark.slow
async def test_a_report_accounts_for_a_job_that_is_gone_and_ends_a_letter(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queue = await make_queue(admin, "orders_stream", consumer={"sample_freq": "100%"}, deny_delete=False)
    await publish_jobs(admin, queue, map(str, range(NAMED)))
    await acknowledge_jobs(admin, queue, NAMED - 1)
    # Gone, and nothing says how.
    await admin.api("STREAM.MSG.DELETE.orders_stream", {"seq": NAMED})
    assert (await account_for_jobs(admin, queue)).unaccounted == ((NAMED, NAMED),)
    assert (await answer_of(terminal))["stream"] == "orders_stream-audit"
    assert (await account_for_jobs(admin, queue)).unaccounted == ()

    for suffix in ("", "-audit", "-events", "-dead", "-archive"):
        await admin.api(f"STREAM.DELETE.orders_stream{suffix}")
    queue = await make_queue(admin, "orders_stream", consumer={"sample_freq": "100%"})
    await publish_jobs(admin, queue, map(str, range(NAMED - 1)))
    await acknowledge_jobs(admin, queue, NAMED - 1)
    assert await make_dead_letters(admin, queue, ["dead"]) == [NAMED]
    assert [letter.sequence for letter in (await find_dead_letters(admin, queue)).letters] == [NAMED]
    assert (await answer_of(terminal))["stream"] == "orders_stream-audit"
    assert (await find_dead_letters(admin, queue)).letters == ()
    assert await stored_count(admin, "orders_stream") == 1
    assert (await redrive_dead_letters(admin, queue)).redriven == {}
    assert await stored_count(admin, "orders_stream") == 0


@pytest.mark.slow
async def test_a_record_by_hand_makes_the_letter_what_it_says(terminal: Terminal, admin: NatsPyConnection) -> None:
    consumer = {"name": "printer", "filter_subject": "orders.new", "ack_wait": "30s"}
    queue = await make_queue(admin, "orders", subjects=["orders.new"], consumer=consumer, dead_letters="orders-dead")
    for number in range(NAMED):
        await admin.client.jetstream().publish("orders.new", f"page {number}".encode())
    *done, named = await pull_jobs(admin, queue, NAMED, consumer="printer")
    for message in done:
        await message.ack_sync()
    (terminal.folder / "body").write_bytes(named.data)
    assert (await answer_of(terminal))["stream"] == "orders-dead"
    await named.respond(b"+TERM no paper")
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert (letter.sequence, letter.subject, letter.body) == (NAMED, "orders.new", named.data)
    assert (letter.death.reason, letter.death.explanation) == (Reason.TERMINATED, "no paper")


@pytest.mark.slow
async def test_a_cancellation_is_looked_up_by_the_digest_of_the_id(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    token = hashlib.sha256(b"order-16").hexdigest()
    for named, actual in (("<events stream>", "orders-events"), ("<queue>", "orders"), ("<token>", token)):
        terminal.replace(named, actual)
    # As the page finds the events stream.
    assert (await admin.api("STREAM.NAMES", {"subject": "completed.orders.>"}))["streams"] == ["orders-events"]
    assert (await answer_of(terminal))["error"]["err_code"] == 10037
    await publish_jobs(admin, queue, ["a"], headers={"Job-Id": "order-16"})
    await cancel(admin, queue, "order-16", "wrong price")
    terminal.put_back()
    stored = (await answer_of(terminal))["message"]
    (message,) = await stream_messages(admin, "orders-events", f"cancelled.orders.{token}")
    assert (stored["subject"], stored["seq"]) == (message.subject, message.sequence)
    assert stored["time"]


@pytest.mark.slow
def test_conform_prints_which_lines_a_worker_keeps(terminal: Terminal, node_folder: Path, tmp_path: Path) -> None:
    right = "${place.stored}`);\n  for"
    source = WORKER.read_text(encoding="utf-8")
    assert source.count(right) == 1
    # The worker of the page writes seconds where nanoseconds belong.
    (node_folder / "worker.mjs").write_text(source.replace(right, "${Number(place.stored) / 1e9}`);\n  for"))
    terminal.folder = node_folder
    port = free_port()
    terminal.env["NATS_URL"] = f"nats://{LOOPBACK}:{port}"
    options = f"--addr {LOOPBACK} --port {port} --store_dir '{tmp_path}/store' --log '{tmp_path}/log'"
    terminal.add_program("nats-server", f'exec "{find_nats_server()}" "$@" {options}')
    *_, conform = terminal.left
    printed = terminal.run(code=1, count=2, after="code=$?; kill $!; exit $code").splitlines()
    shown = [line for line in conform.shown.splitlines() if line != "…"]
    assert printed[-1] == shown[-1]
    without_ids = {re.sub(_ID, "#", line) for line in printed}
    assert [line for line in shown if re.sub(_ID, "#", line) not in without_ids] == []


@pytest.mark.slow
async def test_a_queue_is_backed_up_and_restored_stream_by_stream(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders", consumer={"sample_freq": "100%", "max_deliver": 2})
    await make_dead_letters(admin, queue, ["a", "b"])
    await publish_jobs(admin, queue, ["c"])
    await asyncio.sleep(PERSISTED)
    streams = ("orders-audit", "orders", "orders-events", "orders-dead", "orders-archive")
    for _ in streams:
        await asyncio.to_thread(terminal.run)
    counts = {stream: await stored_count(admin, stream) for stream in streams}
    for stream in streams:
        await admin.api(f"STREAM.DELETE.{stream}")
    for _ in streams:
        await asyncio.to_thread(terminal.run)
    assert {stream: await stored_count(admin, stream) for stream in streams} == counts
    findings = await find_dead_letters(admin, queue)
    assert [letter.body for letter in findings.letters] == [b"a", b"b"]
    await redrive_dead_letters(admin, queue)
    assert await process_all(admin, queue) == {"a": 1, "b": 1, "c": 1}
