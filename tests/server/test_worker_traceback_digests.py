"""The same fault has the same digest, whatever the message and wherever the handler ran."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from process_handlers import raise_from_body, raise_from_body_async

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.worker import Worker
from testbed.dead_letters import dead_letter_records, stored_message
from testbed.face import summarise_dead_letters
from testbed.queues import eventually, make_queue, publish_jobs, running_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Death, WorkQueue
    from testbed.face import NatsPyConnection

ONCE = {"ack_wait": "1s", "max_deliver": 1}
FAULTS = ["feed one", "feed two words", "fold one", "give-up one", "give-up two words"]


async def deaths(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    queue: WorkQueue,
    runner: str,
    faults: Sequence[str] = tuple(FAULTS),
) -> dict[str, Death]:
    await publish_jobs(connection, queue, faults)
    handler = raise_from_body_async if runner == "task" else raise_from_body

    async def all_recorded() -> bool:
        return len(await dead_letter_records(connection, queue)) == len(faults)

    async with running_worker(Worker(queue, "worker", handler, settings, processes=runner == "process")):
        await eventually(all_recorded, within=20)
    return {job.data.decode(): death for death, job in await dead_letter_records(connection, queue)}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["task", "thread", "process"])
async def test_the_same_fault_has_the_same_digest_and_another_place_has_another(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, runner: str
) -> None:
    queue = await make_queue(connection, name, consumer=ONCE)
    records = await deaths(connection, settings, queue, runner)
    digests = {fault: death.traceback_digest or "" for fault, death in records.items()}
    assert all(re.fullmatch(r"[0-9a-f]{12}", digest) for digest in digests.values())
    assert digests["feed one"] == digests["feed two words"]
    assert digests["give-up one"] == digests["give-up two words"]
    assert len({digests["feed one"], digests["fold one"], digests["give-up one"]}) == 3
    places = {fault: (death.error_place or "").rpartition(":")[0] for fault, death in records.items()}
    assert places == {fault: f"process_handlers:{'_fold' if fault.startswith('fold') else '_feed'}" for fault in FAULTS}
    # Explanation and fingerprint still distinguish the messages.
    assert records["give-up one"].explanation == "never one"
    assert records["feed one"].fingerprint != records["feed two words"].fingerprint


@pytest.mark.slow
async def test_a_process_records_the_same_digest_as_a_thread(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    records = {}
    for runner in ("thread", "process"):
        queue = await make_queue(connection, f"{name}-{runner}", consumer=ONCE)
        records_of_runner = await deaths(connection, settings, queue, runner)
        records[runner] = {
            fault: (death.traceback_digest, death.error_place) for fault, death in records_of_runner.items()
        }
    assert records["thread"] == records["process"]


@pytest.mark.slow
async def test_letters_are_grouped_selected_and_parked_by_where_their_handler_failed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=ONCE)
    records = await deaths(connection, settings, queue, "thread", ["feed one", "feed two words", "fold one"])
    feed, fold = records["feed one"], records["fold one"]
    summary = await summarise_dead_letters(connection, queue, group_by=["traceback_digest", "error_place"])
    assert {key: group.count for key, group in summary.groups.items()} == {
        (feed.traceback_digest, feed.error_place): 2,
        (fold.traceback_digest, fold.error_place): 1,
    }
    same_fault = Selection(traceback_digest=feed.traceback_digest)
    shown = await preview(connection, queue, RedriveRequest(same_fault))
    assert [letter["error_place"] for letter in shown.sample] == [feed.error_place] * 2
    parked = await redrive_dead_letters(
        connection, queue, RedriveRequest(same_fault, max_redrives=0, why="to be repaired")
    )
    assert list(parked.parked) == [1, 2]
    letters = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    assert {letter.death.error_place for letter in letters} == {feed.error_place}
    back = await redrive_dead_letters(connection, queue, RedriveRequest(same_fault.model_copy(update={"parked": True})))
    assert list(back.redriven) == [1, 2]
    for sequence in back.redriven.values():
        job = await stored_message(connection, name, sequence)
        assert [header for header, _ in job.headers if header.startswith("Dead-Letter-")] == []
