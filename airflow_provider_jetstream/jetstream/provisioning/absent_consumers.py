"""The dead letters that a consumer would run again once it is created, and how they are parked before that.

Every consumer of a work queue begins with the first stored job: the server refuses one that would start past anything.
So what died while the queue had another consumer, or one of the same name, is delivered once more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter, Selection
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    NotFoundError,
    ProvisioningError,
    TransientError,
    UnsuitableQueueError,
)
from airflow_provider_jetstream.jetstream.provisioning.consumer_order import consumer_of
from airflow_provider_jetstream.jetstream.provisioning.plan import Parking
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Step
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_NAMED = 5


async def with_dead_letters(
    connection: Connection, queue: WorkQueue, steps: Sequence[Step], *, park_dead: bool
) -> list[Step]:
    """Return the steps of a plan, those blocked that create consumers which would run dead letters again.

    :param queue: the work queue, whose stream exists
    :param park_dead: whether these letters are to be parked first instead
    """
    created = {
        step.name: filter_subjects(step.config)
        for step in steps
        if step.action == "create" and step.name == f"{queue.name}/{consumer_of(step)}"
    }
    letters = await _dead_letters(connection, queue, created) if created and queue.dead_letters else {}
    return [_with_parking(queue, step, letters.get(step.name, []), park_dead=park_dead) for step in steps]


def _with_parking(queue: WorkQueue, step: Step, letters: Sequence[int], *, park_dead: bool) -> Step:
    if not letters:
        return step
    if park_dead:
        return replace(step, parking=Parking(queue, consumer_of(step), tuple(letters)))
    count = "1 dead letter" if len(letters) == 1 else f"{len(letters)} dead letters"
    more = " and more" if len(letters) > _NAMED else ""
    reason = (
        f"it would run {count} again ({', '.join(map(str, letters[:_NAMED]))}{more}), whose consumer is gone: provision"
        " with park_dead=True (apply --park-dead) to park them first; or redrive them first, so that they run as they"
        " are redriven"
    )
    return replace(step, blocked=(*step.blocked, reason))


async def _dead_letters(
    connection: Connection, queue: WorkQueue, created: dict[str, tuple[str, ...]]
) -> dict[str, list[int]]:
    """Return by step the sequences of the dead letters that its consumer's filters match."""
    filters = [subject for own in created.values() for subject in own]
    stored = [subject for own in filters async for subject, _ in subject_counts(connection, queue.name, own)]
    if not stored:
        return {}
    try:
        scan = await Scan.begin(connection, queue)
    except (NotFoundError, UnsuitableQueueError):
        # There is no dead letter queue yet, or the stream isn't a work queue, which blocks its own step.
        return {}
    found: dict[str, list[int]] = defaultdict(list)
    async for letter in scan.letters(EveryLetter()):
        if letter.consumer_absent:
            for name, own in created.items():
                if covered_by_any(own, letter.subject):
                    found[name].append(letter.sequence)
    return found


async def park_first(connection: Connection, parking: Parking) -> None:
    """Park the dead letters that a consumer would run again.

    :raises ProvisioningError: some of them couldn't be parked
    :raises TransientError: somebody else has changed them since the plan was made
    """
    request = RedriveRequest(
        Selection(sequences=frozenset(parking.sequences)),
        max_redrives=0,
        why=f"its consumer was gone, and {parking.consumer} would have run it again",
    )
    try:
        report = await redrive_dead_letters(connection, parking.queue, request)
    except DeadLetterGoneError as error:
        raise TransientError(f"the dead letters were changed after the plan was made: {error}") from error
    if failed := report.failed:
        first = min(failed)
        raise ProvisioningError(
            f"expected to park {len(parking.sequences)} dead letters before consumer {parking.consumer} is created,"
            f" found {len(failed)} that couldn't be ({first}: {failed[first]}): see to that, and provision again"
        )
