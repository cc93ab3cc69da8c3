"""The dead letters that a consumer would run again once it is created, and how they are parked before that.

Every consumer of a work queue begins with the first stored job: the server refuses one that would start past anything.
So what died while the queue had another consumer, or one of the same name, is delivered once more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter, Selection
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    NotFoundError,
    ProvisioningError,
    TransientError,
    UnsuitableQueueError,
)
from airflow_provider_jetstream.jetstream.provisioning.plan import Parking, letter_count
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Step
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_NAMED = 5
_NAMED_RANGES = 20


class StoredLetter(NamedTuple):
    """A dead letter whose job is still stored in the queue; ``absent`` where no consumer takes its subject any more."""

    subject: str
    absent: bool


async def stored_letters(connection: Connection, queue: WorkQueue, filters: Sequence[str]) -> dict[int, StoredLetter]:
    """Return by sequence the dead letters that are stored on subjects which filters match."""
    stored = [subject for one in filters async for subject, _ in subject_counts(connection, queue.name, one)]
    if not queue.dead_letters or not stored:
        return {}
    try:
        scan = await Scan.begin(connection, queue)
    except (NotFoundError, UnsuitableQueueError):
        # There is no dead letter queue yet, or the stream isn't a work queue, which blocks its own step.
        return {}
    return {
        letter.sequence: StoredLetter(letter.subject, letter.consumer_absent)
        async for letter in scan.letters(EveryLetter())
        if letter.source is BodySource.QUEUE and covered_by_any(filters, letter.subject)
    }


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
        if step.action == "create" and step.name == f"{queue.name}/{step.consumer}"
    }
    found: dict[str, list[int]] = defaultdict(list)
    filters = [subject for own in created.values() for subject in own]
    letters = await stored_letters(connection, queue, filters) if created else {}
    for sequence, letter in letters.items():
        for name, own in created.items():
            if letter.absent and covered_by_any(own, letter.subject):
                found[name].append(sequence)
    return [_with_parking(queue, step, found.get(step.name, []), park_dead=park_dead) for step in steps]


def _with_parking(queue: WorkQueue, step: Step, letters: Sequence[int], *, park_dead: bool) -> Step:
    if not letters:
        return step
    if park_dead:
        return replace(step, parking=Parking(queue, tuple(letters)))
    more = " and more" if len(letters) > _NAMED else ""
    reason = (
        f"it would run {letter_count(len(letters))} again ({', '.join(map(str, letters[:_NAMED]))}{more}), whose"
        " consumer is gone: provision with park_dead=True (apply --park-dead) to park them first; or redrive them"
        " first, so that they run as they are redriven"
    )
    return replace(step, blocked=(*step.blocked, reason))


async def park(connection: Connection, queue: WorkQueue, sequences: Sequence[int], why: str, consumer: str) -> str:
    """Park dead letters that a consumer would run again; return a sentence with the command that brings them back.

    :param why: the reason, for the audit and the letters
    :param consumer: the consumer, or several
    :raises ProvisioningError: some of them couldn't be parked
    :raises TransientError: somebody else has changed them since they were found
    """
    request = RedriveRequest(Selection(sequences=frozenset(sequences)), max_redrives=0, why=why)
    try:
        report = await redrive_dead_letters(connection, queue, request)
    except DeadLetterGoneError as error:
        raise TransientError(f"the dead letters were changed after they were found: {error}") from error
    if failed := report.failed:
        first = min(failed)
        raise ProvisioningError(
            f"expected to park {letter_count(len(sequences))} before consumer {consumer} is created,"
            f" found {len(failed)} that couldn't be ({first}: {failed[first]}): see to that, and provision again"
        )
    spans = _spans(sorted(sequences))
    options = " ".join(f"--sequence {span}" for span in spans[:_NAMED_RANGES])
    more = f" (and more: jetstream-queue letters list {queue.name} --parked)" if len(spans) > _NAMED_RANGES else ""
    return (
        f"parked {letter_count(len(sequences))}, redriven by: jetstream-queue redrive start {queue.name} --parked"
        f" {options}{more}"
    )


def _spans(sequences: Sequence[int]) -> list[str]:
    """Return sorted sequences as ranges."""
    firsts = [now for before, now in pairwise([-1, *sequences]) if now > before + 1]
    lasts = [now for now, after in pairwise([*sequences, sequences[-1] + 2]) if after > now + 1]
    return [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
