"""Looking once, and holding all that is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, get_args

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField, Selection, group_of
from airflow_provider_jetstream.jetstream.errors import SelectionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.classifier import NotDead
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at a queue found, all of it at once; see :class:`Scan` for many letters.

    :param letters: dead letters, in the order of the jobs
    :param dismissed: what the dead letter queue holds about other jobs
    :param uncertain: how many more dead letters there are that can't be told yet
    :param undeliverable: how many jobs no consumer takes
    :param risks: what could be lost as things are, a sentence each
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[NotDead, ...]
    uncertain: int
    undeliverable: int
    risks: tuple[str, ...]


async def find_dead_letters(connection: Connection, queue: WorkQueue, selection: Selection | None = None) -> Findings:
    """Look once, and hold everything that is found.

    :param connection: the server
    :param queue: the work queue
    :param selection: which dead letters; all in circulation where absent
    :return: dead letters, and what else the dead letter queue holds
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    chosen = selection or Selection()
    scan = await Scan.begin(connection, queue, vanished=chosen.vanished)
    letters: list[DeadLetter] = []
    dismissed: list[NotDead] = []
    async for page in scan.pages(chosen):
        letters += page.letters
        dismissed += page.dismissed
    return Findings(tuple(letters), tuple(dismissed), scan.reconciliation.uncertain, scan.undeliverable, scan.risks)


_REPORTED_RANGES = 1_000
_REPORTED_GROUPS = 1_000


@dataclass(slots=True)
class Group:
    """Dead letters that have something in common.

    :param oldest: when the first of them died
    :param count: how many there are
    """

    oldest: datetime
    count: int = 0


@dataclass(slots=True)
class Summary:
    """What a look at a queue's dead letters adds up to.

    :param at: when the look ended, which ages refer to
    :param group_by: what letters of a group share
    :param dead: how many dead letters were selected
    :param ranges: their stream sequences as ranges of first and last; the first thousand
    :param ranges_left_out: how many ranges there are beyond those
    :param groups: the groups by what their letters share; one of all letters where nothing is named
    :param uncertain: how many more dead letters there are that can't be told yet; not among the counted
    :param undeliverable: how many jobs no consumer takes
    :param dismissed: how many jobs the dead letter queue holds something about though they are no dead letters, by
        verdict
    :param risks: what could be lost as things are, a sentence each
    :param kept: how many bodies were copied into the dead letter queue
    """

    at: datetime
    group_by: tuple[GroupField, ...]
    dead: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    ranges_left_out: int = 0
    groups: dict[tuple[str | None, ...], Group] = field(default_factory=dict)
    uncertain: int = 0
    undeliverable: int = 0
    dismissed: dict[str, int] = field(default_factory=dict)
    risks: tuple[str, ...] = ()
    preserved: int = 0
    _last: int = -1

    def add(self, letter: DeadLetter) -> None:
        """Count a letter.

        :param letter: the letter, of a higher sequence than all before
        """
        self.dead += 1
        died_at = letter.death.died_at
        group = self.groups.setdefault(group_of(letter, self.group_by), Group(died_at))
        group.count += 1
        group.oldest = min(group.oldest, died_at)
        follows, self._last = letter.sequence == self._last + 1, letter.sequence
        if not follows and len(self.ranges) == _REPORTED_RANGES:
            self.ranges_left_out += 1
        elif not follows:
            self.ranges.append((letter.sequence, letter.sequence))
        elif not self.ranges_left_out:
            self.ranges[-1] = (self.ranges[-1][0], letter.sequence)

    def reached(self, count: int, age: timedelta = timedelta()) -> bool:
        """Tell whether a group is large and old enough.

        :param count: letters that it needs
        :param age: how long the first of them needs to be dead
        :return: whether one is
        """
        seconds = age.total_seconds()
        return any(group.count >= count and self._age(group.oldest) >= seconds for group in self.groups.values())

    def __str__(self) -> str:
        more = (f"{self.uncertain} more that can't be told yet", f"{self.undeliverable} jobs that no consumer takes")
        counted = [f"{self.dead} dead letters", *(each for each in more if not each.startswith("0 "))]
        if dismissed := sum(self.dismissed.values()):
            named = ", ".join(f"{count} {verdict}" for verdict, count in self.dismissed.items())
            counted.append(f"{dismissed} entries about other jobs ({named})")
        return ", ".join(counted)

    def as_json(self) -> dict[str, Any]:
        """Give the summary in a form that fits an event or an XCom.

        :return: counts, sequences as ranges, and the largest groups
        """
        largest = sorted(self.groups.items(), key=lambda pair: -pair[1].count) if self.group_by else []
        return {
            "dead": self.dead,
            "sequences": [list(span) for span in self.ranges],
            "ranges_left_out": self.ranges_left_out,
            "oldest_age_seconds": self._age(min(group.oldest for group in self.groups.values())) if self.dead else None,
            "groups": [
                {
                    "group": dict(zip(self.group_by, shared, strict=True)),
                    "count": group.count,
                    "oldest_age_seconds": self._age(group.oldest),
                }
                for shared, group in largest[:_REPORTED_GROUPS]
            ],
            "groups_left_out": len(largest[_REPORTED_GROUPS:]),
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "dismissed": dict(self.dismissed),
            "kept": self.preserved,
            "risks": list(self.risks),
        }

    def _age(self, since: datetime) -> float:
        # The server's clock may be ahead of ours.
        return round(max(0.0, (self.at - since).total_seconds()), 3)


async def summarise_dead_letters(
    connection: Connection, queue: WorkQueue, selection: Selection | None = None, group_by: Iterable[str] = ()
) -> Summary:
    """Look once, count what is selected, and keep the bodies of all that is seen for the first time.

    :param connection: the server
    :param queue: the work queue
    :param selection: which dead letters are counted; all in circulation where absent
    :param group_by: what letters of a group share
    :return: the summary
    :raises SelectionError: letters can't be grouped by that
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    chosen, fields = selection or Selection(), group_fields(group_by)
    scan = await Scan.begin(connection, queue, vanished=chosen.vanished)
    keeper = BodyPreserver(connection, scan)
    summary = Summary(datetime.now(UTC), fields)
    # The archive may let go of a body only if every letter was seen, so those that aren't counted are read as well.
    all_seen = not chosen.parked and Reason.UNDELIVERABLE not in (chosen.reasons or ())
    async for page in scan.pages(Selection(vanished=chosen.vanished) if all_seen else chosen):
        await keeper.preserve(page.letters)
        now = datetime.now(UTC)
        for letter in page.letters:
            if chosen.matches(letter, now):
                summary.add(letter)
    if all_seen:
        await keeper.release()
    summary.at = datetime.now(UTC)
    summary.uncertain, summary.undeliverable = scan.reconciliation.uncertain, scan.undeliverable
    summary.dismissed = {verdict.value: count for verdict, count in sorted(scan.dismissed.items())}
    summary.risks, summary.preserved = scan.risks, keeper.preserved
    return summary


def group_fields(names: Iterable[str]) -> tuple[GroupField, ...]:
    """Check what letters shall be grouped by.

    :param names: the fields, or one of them
    :return: the fields
    :raises SelectionError: letters can't be grouped by one of them
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    known: tuple[GroupField, ...] = get_args(GroupField)
    if unknown := [name for name in wanted if name not in known]:
        raise SelectionError(f"expected fields to group by among {', '.join(known)}; found {unknown[0]!r}")
    found: dict[str, GroupField] = {name: name for name in known}
    return tuple(found[name] for name in wanted)
