"""A queue's policy says how long dead letters are kept, by reason and age; applying it discards the others."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    QueueDeclarationError,
    Reason,
    RedriveRequest,
    RedriveRequestError,
    Selection,
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    list_redrives,
    plan,
    preview,
    provision,
    publish,
    redrive_dead_letters,
)
from testbed.code_blocks import code_blocks
from testbed.dead_letters import letter_records, make_terminated_letters, stream_messages
from testbed.queues import CONSUMER, exhaust_deliveries, make_dead_letters, make_queue, stored_count

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import RedriveReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SHORT = {"ack_wait": "50ms"}
APPLY = RedriveRequest(discard="by_policy")


async def queue_with(connection: NatsPyConnection, name: str, keep: dict[str, Any], **fields: Any) -> WorkQueue:
    letters = {"name": f"{name}-dead", "keep": keep}
    return await make_queue(connection, name, dead_letters=letters, consumer=SHORT, **fields)


def keeping(queue: WorkQueue, keep: dict[str, Any]) -> WorkQueue:
    """Declare the same queue with another policy."""
    return WorkQueue(**queue.as_values() | {"dead_letters": {"name": f"{queue.name}-dead", "keep": keep}})


async def apply(connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest = APPLY) -> RedriveReport:
    report = await redrive_dead_letters(connection, queue, request)
    report.raise_for_failures()
    assert (len(report.redriven), len(report.parked), report.state) == (0, 0, "finished")
    return report


async def test_letters_of_each_reason_go_at_their_age_with_the_reason_in_the_audit_and_come_back(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"max_deliveries": "1ms", "terminated": "30d"})
    old = await make_dead_letters(connection, queue, ["a", "b"])
    await make_terminated_letters(connection, queue, ["terminated"])
    found = await preview(connection, queue, APPLY)
    assert (found.discarded, found.redriven, found.failures) == (2, 0, 0)
    assert len((await find_dead_letters(connection, queue)).letters) == 3

    report = await apply(connection, queue, RedriveRequest(discard="by_policy", why="every night"))
    assert list(report.discarded) == old
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [3]
    policy = "by policy: max_deliveries 1ms, terminated 30d; every night"
    for record in await letter_records(connection, queue):
        assert (record.action, record.reason, record.why) == ("discarded", "max_deliveries", f"kept 1ms; {policy}")
    (redrive,) = await list_redrives(connection, queue)
    assert (redrive.why, redrive.selection) == (policy, {"keep": "max_deliveries 1ms, terminated 30d"})
    undone = await redrive_dead_letters(connection, queue, RedriveRequest(undo=report.redrive))
    assert list(undone.parked) == old


async def test_other_reasons_have_the_default_age_and_minus_one_keeps_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"default": "1ms", "max_deliveries": -1})
    kept = await make_dead_letters(connection, queue, ["kept"])
    await make_terminated_letters(connection, queue, ["terminated"])
    assert list((await apply(connection, queue)).discarded) == [kept[0] + 1]
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == kept


async def test_a_parked_letter_has_an_age_of_its_own_from_when_it_was_parked(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"default": "1ms"})
    await make_dead_letters(connection, queue, ["parked"])
    (before,) = (await find_dead_letters(connection, queue)).letters
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0, why="look at it"))
    (after,) = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    (record,) = await stream_messages(connection, f"{name}-dead")
    assert before.kept_since == before.death.died_at == after.death.died_at
    assert after.kept_since == record.stored_at
    for keep, discarded in (({"default": "1ms"}, []), ({"parked": "7d"}, []), ({"parked": "1ms"}, [1])):
        report = await apply(connection, keeping(queue, keep))
        assert list(report.discarded) == discarded
    assert (await find_dead_letters(connection, queue, Selection(parked=True))).letters == ()


async def test_a_worker_whose_clock_is_behind_makes_no_letter_older(connection: NatsPyConnection, name: str) -> None:
    queue = await queue_with(connection, name, {"default": "1h"})
    await make_dead_letters(connection, queue, ["a"])
    # Nothing but the worker's record says when it died.
    await connection.api(f"STREAM.PURGE.{name}-dead")
    record = {
        "Dead-Letter-Sequence": "1",
        "Dead-Letter-Subject": f"{name}.jobs.plain",
        "Dead-Letter-Reason": "max_deliveries",
        "Dead-Letter-Last-Failure": "2001-01-01T00:00:00Z",
    }
    await connection.client.jetstream().publish(f"dead.{name}.{CONSUMER}.1", b"a", headers=record)
    assert (await find_dead_letters(connection, queue)).letters[0].death.died_at.year == 2001
    assert (await apply(connection, queue)).done == 0


async def test_a_letter_without_an_entry_is_kept_from_when_a_scan_has_found_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"orphan": "1h"})
    await make_dead_letters(connection, queue, ["a"])
    await connection.api(f"STREAM.PURGE.{name}-dead")
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.death.reason == Reason.ORPHAN
    assert (await apply(connection, queue)).done == 0
    report = await apply(connection, keeping(queue, {"orphan": "1ms"}))
    assert list(report.discarded) == [1]


async def test_two_that_apply_it_at_once_beside_a_redrive_leave_each_letter_one_end(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"default": "7d", "max_deliveries": "1ms"})
    await make_dead_letters(connection, queue, [str(number) for number in range(10)])
    await make_terminated_letters(connection, queue, [str(number) for number in range(10, 20)])
    redrive = RedriveRequest(Selection(reasons=frozenset({Reason.MAX_DELIVERIES})), rate=100)
    requests = [redrive, APPLY, APPLY]
    done = await asyncio.gather(*(redrive_dead_letters(connection, queue, each) for each in requests))
    discarded = [sequence for report in done for sequence in report.discarded]
    redriven = [sequence for report in done for sequence in report.redriven]
    assert sorted(discarded + redriven) == list(range(1, 11))
    left = {letter.sequence for letter in (await find_dead_letters(connection, queue)).letters}
    assert left == set(range(11, 21))


async def test_jobs_that_no_consumer_takes_stay_whatever_the_policy(connection: NatsPyConnection, name: str) -> None:
    keep = {"name": f"{name}-dead", "keep": {"default": "1ms", "parked": "1ms"}}
    consumer = SHORT | {"filter_subject": f"{name}.jobs.>"}
    queue = await make_queue(
        connection, name, subjects=[f"{name}.jobs.>", f"{name}.other"], consumer=consumer, dead_letters=keep
    )
    await connection.client.jetstream().publish(f"{name}.other", b"x")
    assert (await apply(connection, queue)).done == 0
    assert await stored_count(connection, name) == 1


async def test_no_server_stores_the_policy_and_a_queue_without_one_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await queue_with(connection, name, {"default": "1ms"}, dead=["a"])
    assert not (await plan(connection, queue)).changes
    known = await discover_queue(connection, name)
    for request in (APPLY, RedriveRequest(discard="by_policy", run="again")):
        with pytest.raises(QueueDeclarationError, match=r"expected dead_letters\.keep, found none: declare it"):
            await redrive_dead_letters(connection, known, request)
    with pytest.raises(QueueDeclarationError, match="name the queue's file; no server has it"):
        await preview(connection, known, APPLY)
    assert await stored_count(connection, name) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"discard": "by policy"}, 'expected True, False or "by_policy" as discard'),
        ({"discard": "by_policy", "selection": Selection(consumer="a")}, "the policy selects"),
        ({"discard": "by_policy", "selection": Selection(sequences=[1])}, "the policy selects"),
        ({"discard": "by_policy", "max_redrives": 0}, "beside discard, found max_redrives"),
        ({"discard": "by_policy", "undo": "x"}, "found discard"),
    ],
)
def test_what_can_not_be_beside_a_policy_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RedriveRequestError, match=problem):
        RedriveRequest(**fields)


async def test_a_policy_that_is_not_known_yet_selects_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await queue_with(connection, name, {"default": "1ms"}, dead=["a"])
    assert (await find_dead_letters(connection, queue, APPLY.selection)).letters == ()


async def test_one_that_is_cut_off_goes_on_with_its_key(connection: NatsPyConnection, name: str) -> None:
    queue = await queue_with(connection, name, {"default": "1ms"}, dead=map(str, range(10)))
    request = RedriveRequest(discard="by_policy", rate=20, run="nightly")
    stops = iter([False, False, True])
    first = await redrive_dead_letters(connection, queue, request, stopped=lambda: next(stops, True))
    assert 0 < len(first.discarded) < 10
    second = await redrive_dead_letters(connection, queue, RedriveRequest(discard="by_policy", run="nightly"))
    assert (second.redrive, len(second.discarded), second.resumed) == (first.redrive, 10, len(first.discarded))


@pytest.mark.slow
async def test_the_commands_of_the_page_apply_the_policy_of_its_declaration(
    own_nats: NatsServer, tmp_path: Path
) -> None:
    blocks = [block for block in code_blocks() if block.page == "docs/redrive.md"]
    (declared,) = [block.code for block in blocks if block.language == "yaml" and "keep:" in block.code]
    (commands,) = [block.code for block in blocks if block.language == "console" and "--by-policy" in block.code]
    file = tmp_path / "payments.yaml"
    declared = f"name: payments\nsubjects: ['payments.*']\nconsumers: [{{name: worker, max_deliver: 1}}]\n{declared}"
    file.write_text(declared)

    async def run_commands() -> list[str]:
        printed = []
        for line in commands.splitlines():
            program = [sys.executable, "-m", "airflow_provider_jetstream.command.program", *shlex.split(line)[1:]]
            env = os.environ | {"NATS_URL": own_nats.url}
            run = partial(subprocess.run, program, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
            printed.append((await asyncio.to_thread(run)).stdout)
        return printed

    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = WorkQueue.load(file)
        await provision(connection, queue)
        await publish(connection, queue, ["a"], subject="payments.new")
        await exhaust_deliveries(connection, queue, 1)
        would, did = await run_commands()
        assert "0 would be redriven, 0 parked, 0 would stay" in would
        assert "0 redriven, 0 parked, 0 still dead, 0 gone" in did
        file.write_text(declared.replace("max_deliveries: 30d", "max_deliveries: 1ms"))
        would, did = await run_commands()
        assert "0 would be redriven, 0 parked, 1 discarded, 0 would stay" in would
        assert "0 redriven, 0 parked, 1 discarded, 0 still dead, 0 gone" in did
        (record,) = await letter_records(connection, queue)
        assert record.why == (
            "kept 1ms; by policy: max_deliveries 1ms, terminated 7d, default 90d, parked 180d; every night"
        )
