"""The dead letters of a queue in one call: all of them, or counted in groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, LetterGroups, group_fields
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Findings(TaskReport):
    """All that a scan of a queue found; use :class:`~.scan.Scan` where there are too many letters to hold in memory.

    :param letters: dead letters, in the order of the jobs
    :param dismissed: jobs that have entries in the dead letter queue and are no dead letters
    :param uncertain: how many more jobs may be dead: letters that can't be identified yet
    :param undeliverable: how many jobs match no consumer
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[NotDead, ...]
    uncertain: int
    undeliverable: int
    risks: tuple[Finding, ...]


async def find_dead_letters(
    connection: Connection, queue: WorkQueue, selection: Selection | None = None, *, count_under_pause: bool = False
) -> Findings:
    """Find a queue's dead letters, each with its body.

    :param selection: which dead letters; all in circulation where absent
    :param count_under_pause: pause consumers until nothing is in flight, for their ack wait and half a minute
        at most, so that numbers prove which jobs are dead
    :raises ServerTooOldError: a count under a pause needs nats-server 2.11
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises UnsuitableQueueError: its dead letters can't be told from other jobs
    """
    selection = selection or Selection()
    scan = await Scan.begin(connection, queue, unaccounted=selection.unaccounted, count_under_pause=count_under_pause)
    letters: list[DeadLetter] = []
    dismissed: list[NotDead] = []
    async for page in scan.pages(selection):
        letters += page.letters
        dismissed += page.dismissed
    return Findings(tuple(letters), tuple(dismissed), scan.uncertain, scan.undeliverable, scan.risks)


REPORTED_RANGES = 1_000
_REPORTED_GROUPS = 1_000


@dataclass(slots=True)
class Summary(TaskReport):
    """The dead letters of a queue, counted.

    :param at: when the scan ended, by the server's clock; ages refer to it
    :param group_by: the fields whose values the letters of a group share
    :param dead: how many dead letters were selected
    :param ranges: their stream sequences as ranges of first and last; the first thousand
    :param ranges_left_out: how many ranges there are beyond those
    :param groups: the groups; one of all letters where ``group_by`` is empty
    :param uncertain: how many more jobs may be dead: letters that can't be identified yet; not counted in ``dead``
    :param undeliverable: how many jobs match no consumer
    :param dismissed: how many jobs with entries are no dead letters, by status
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    :param preserved: how many bodies were copied into the dead letter queue
    """

    at: datetime
    group_by: tuple[GroupField, ...]
    dead: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    ranges_left_out: int = 0
    groups: LetterGroups = field(default_factory=LetterGroups)
    uncertain: int = 0
    undeliverable: int = 0
    dismissed: dict[str, int] = field(default_factory=dict)
    risks: tuple[Finding, ...] = ()
    preserved: int = 0
    _last: int = -1

    def add(self, letter: DeadLetter) -> None:
        """Count a letter.

        :param letter: the letter, of a higher sequence than all before
        """
        self.dead += 1
        self.groups.add(letter, self.group_by)
        is_next, self._last = letter.sequence == self._last + 1, letter.sequence
        if not is_next and len(self.ranges) == REPORTED_RANGES:
            self.ranges_left_out += 1
        elif not is_next:
            self.ranges.append((letter.sequence, letter.sequence))
        elif not self.ranges_left_out:
            self.ranges[-1] = (self.ranges[-1][0], letter.sequence)

    def reached(self, count: int, age: timedelta = timedelta()) -> bool:
        """Return whether a group is large and old enough.

        :param count: the least number of letters
        :param age: how long the first letter has been dead, at least
        """
        seconds = age.total_seconds()
        return any(group.count >= count and self._age(group.first) >= seconds for group in self.groups.values())

    def __str__(self) -> str:
        others = (
            f"{self.uncertain} more jobs that may be dead",
            f"{self.undeliverable} jobs that no consumer takes",
        )
        counts = [f"{self.dead} dead letters", *(text for text in others if not text.startswith("0 "))]
        if dismissed := sum(self.dismissed.values()):
            by_status = ", ".join(f"{count} {status}" for status, count in self.dismissed.items())
            counts.append(f"{dismissed} entries about other jobs ({by_status})")
        return ", ".join(counts)

    def as_json(self) -> dict[str, Any]:
        """Return the summary for an event or an XCom: counts, sequence ranges and the largest groups."""
        largest = self.groups.largest() if self.group_by else []
        return {
            "dead": self.dead,
            "sequences": [list(span) for span in self.ranges],
            "ranges_left_out": self.ranges_left_out,
            "oldest_age_seconds": self._age(min(group.first for group in self.groups.values())) if self.dead else None,
            "groups": [
                {
                    "group": dict(zip(self.group_by, key, strict=True)),
                    "count": group.count,
                    "oldest_age_seconds": self._age(group.first),
                }
                for key, group in largest[:_REPORTED_GROUPS]
            ],
            "groups_left_out": len(largest[_REPORTED_GROUPS:]),
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "dismissed": dict(self.dismissed),
            "kept": self.preserved,
            "risks": [str(risk) for risk in self.risks],
        }

    def _age(self, since: datetime) -> float:
        # The server's clock may be ahead of this machine's.
        return round(max(0.0, (self.at - since).total_seconds()), 3)


async def summarise_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    selection: Selection | None = None,
    group_by: Iterable[str] = (),
    *,
    count_under_pause: bool = False,
) -> Summary:
    """Count a queue's dead letters, and copy the bodies of letters that have no copy yet.

    :param selection: which dead letters are counted; all in circulation where absent
    :param group_by: the fields whose values the letters of a group share
    :param count_under_pause: as of :func:`find_dead_letters`
    :raises SelectionError: ``group_by`` names an unknown field
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises UnsuitableQueueError: its dead letters can't be told from other jobs
    """
    selection, fields = selection or Selection(), group_fields(group_by)
    scan = await Scan.begin(connection, queue, unaccounted=selection.unaccounted, count_under_pause=count_under_pause)
    preserver = BodyPreserver(connection, scan)
    summary = Summary(scan.now, fields)
    # The bodies of letters that aren't counted are copied, too.
    read_all = not selection.parked and Reason.UNDELIVERABLE not in (selection.reasons or ())
    async for page in scan.pages(Selection(unaccounted=selection.unaccounted) if read_all else selection):
        await scan.record_handled()
        await preserver.preserve(page.letters)
        now = scan.now
        for letter in page.letters:
            if selection.matches(letter, now):
                summary.add(letter)
    summary.at = scan.now
    summary.uncertain, summary.undeliverable = scan.uncertain, scan.undeliverable
    summary.dismissed = {status.value: count for status, count in sorted(scan.dismissed.items())}
    summary.risks, summary.preserved = scan.risks, preserver.preserved
    return summary


async def count_entries(connection: Connection, queue: WorkQueue) -> int:
    """Return how many entries a queue's dead letter queue has, those about other queues included.

    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the dead letter queue doesn't exist
    """
    return int((await stream_info(connection, require_dead_letters(queue).name))["state"]["messages"])
