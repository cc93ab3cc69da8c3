"""The history of a server's queues: samples that all API workers share, current rates, and the times of deaths."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, parse_record
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.contract import letter_audit_subject
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueWatch
from airflow_provider_jetstream.jetstream.inspection.samples import SAMPLE_SECONDS, SampleStream
from airflow_provider_jetstream.plugins.monitor.letter_history import first_since
from airflow_provider_jetstream.plugins.monitor.models.queues import Deaths, Point

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth
    from airflow_provider_jetstream.jetstream.inspection.queue_state import Known
    from airflow_provider_jetstream.jetstream.inspection.samples import QueueSample, ServerSample


SPARKLINE_POINTS = 60
# Two polls that are far apart, as after a time without viewers, don't make a current rate.
_LONGEST_INTERVAL = 120.0


@dataclass(slots=True)
class Rates:
    """Rates per second between the last two polls; ``None`` where they aren't known.

    :param stored: messages stored
    :param gone: messages gone
    :param deliveries: deliveries by consumer
    """

    stored: float | None = None
    gone: float | None = None
    deliveries: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class QueueHistory:
    """The history of one queue.

    :param rates: between the last two polls
    :param watch: the states of its parts
    """

    watch: QueueWatch = field(default_factory=QueueWatch)
    rates: Rates = field(default_factory=Rates)
    _last: QueueHealth | None = None

    def add(self, health: QueueHealth) -> None:
        """Add the numbers of a poll."""
        self.rates, self._last = _rates(self._last, health), health


def _rates(before: QueueHealth | None, now: QueueHealth) -> Rates:
    if before is None or before.created != now.created:
        return Rates()
    seconds = (now.taken_at - before.taken_at).total_seconds()
    if not 0 < seconds <= _LONGEST_INTERVAL:
        return Rates()
    stored = now.last_sequence - before.last_sequence
    gone = max(0, stored - (now.stored - before.stored))
    deliveries = {
        name: max(0, consumer.deliveries - before.consumers[name].deliveries) / seconds
        for name, consumer in now.consumers.items()
        if name in before.consumers
    }
    return Rates(stored / seconds, gone / seconds, deliveries)


HOUR = timedelta(hours=1)
# A longer time between two samples is a gap.
GAP = timedelta(seconds=2.5 * SAMPLE_SECONDS)
MAX_POINTS = 360
_PER_HOUR = int(HOUR.total_seconds() / SAMPLE_SECONDS)


@dataclass(frozen=True, slots=True)
class _Numbers:
    at: datetime
    created: str
    pending: int
    in_flight: int
    stored: int
    last_sequence: int
    dead: int | None

    @classmethod
    def of(cls, at: datetime, sample: QueueSample) -> _Numbers:
        numbers = (sample.pending, sample.in_flight, sample.stored, sample.last_sequence, sample.dead)
        return cls(at, sample.created, *numbers)


class SharedHistory:
    """The samples of the last hour of one server; further ones are read when somebody wants to see them.

    :ivar holder: the program that took the last sample
    :ivar last_at: when that was
    :ivar problem: why there are none, or no more, where that is known
    """

    def __init__(self) -> None:
        self.holder: str | None = None
        self.last_at: datetime | None = None
        self.problem: str | None = None
        self._read_to = 0
        self._numbers: dict[str, deque[_Numbers]] = {}
        self._known: Mapping[str, QueueSample] = {}
        self._sparklines: dict[tuple[str, int], list[int | None]] = {}

    @property
    def is_stored(self) -> bool:
        """Whether there are stored samples."""
        return self._read_to > 0

    def note(self, at: datetime, queue: str, sample: QueueSample) -> None:
        """Add the numbers of a poll, every 20 seconds, of a queue that no stored sample has."""
        numbers = self._numbers.setdefault(queue, deque(maxlen=_PER_HOUR + 1))
        if queue not in self._known and not (numbers and at - numbers[-1].at < timedelta(seconds=SAMPLE_SECONDS)):
            numbers.append(_Numbers.of(at, sample))
            self._sparklines.clear()
            self.last_at = max(at, self.last_at or at)

    async def update(self, connection: Connection) -> None:
        """Read the samples that are new."""
        stream = SampleStream(connection)
        last = await stream.last()
        if last is None:
            if self._read_to:
                self._numbers, self._known, self._read_to, self.holder = {}, {}, 0, None
            return
        if last.sequence < self._read_to:
            # Another stream of that name.
            self._numbers, self._read_to = {}, 0
        if last.sequence == self._read_to:
            return
        start = max(self._read_to + 1, last.sequence - _PER_HOUR)
        async for sample in stream.read(start):
            self.add(sample)

    def add(self, sample: ServerSample) -> None:
        """Add a sample that is newer than all before."""
        for name, queue in sample.queues.items():
            if name not in self._known:
                self._numbers.pop(name, None)
            numbers = self._numbers.setdefault(name, deque(maxlen=_PER_HOUR + 1))
            numbers.append(_Numbers.of(sample.at, queue))
        for name in self._numbers.keys() - sample.queues.keys():
            if self._numbers[name][-1].at < sample.at - HOUR:
                del self._numbers[name]
        self._read_to, self._known = sample.sequence, sample.queues
        self._sparklines.clear()
        self.holder, self.last_at = sample.holder, sample.at

    def known(self, queue: str) -> Mapping[str, Known]:
        """Return what the last sample remembers of a queue's parts."""
        found = self._known.get(queue)
        return found.known if found else {}

    def points(self, queue: str, since: datetime, until: datetime) -> list[Point]:
        """Return a queue's points of a time within the last hour, gaps included."""
        return points_of([numbers for numbers in self._numbers.get(queue, ()) if numbers.at >= since], until)

    def sparkline(self, queue: str, count: int) -> list[int | None]:
        """Return the pending jobs of the last hour, oldest first: the highest of each interval; ``None`` for a gap.

        :param count: the number of intervals
        """
        found = self._sparklines.get((queue, count))
        if found is None:
            found = self._sparklines[queue, count] = self._highest(queue, count)
        return found

    def _highest(self, queue: str, count: int) -> list[int | None]:
        numbers = self._numbers.get(queue)
        if not numbers or self.last_at is None:
            return []
        highest: list[int | None] = [None] * count
        begin, width = self.last_at - HOUR, HOUR / count
        for sample in numbers:
            position = min(count - 1, int((sample.at - begin) / width))
            if position >= 0:
                highest[position] = max(sample.pending, highest[position] or 0)
        first = next((position for position, value in enumerate(highest) if value is not None), count)
        return highest[first:]

    async def read_points(self, connection: Connection, queue: str, since: datetime, until: datetime) -> list[Point]:
        """Read a queue's points of any time."""
        if not self._read_to:
            return []
        hours = (until - since) / HOUR
        start = max(1, self._read_to - int(hours * _PER_HOUR) - 1)
        found = [
            _Numbers.of(sample.at, sample.queues[queue])
            async for sample in SampleStream(connection).read(start)
            if queue in sample.queues and sample.at >= since
        ]
        return points_of(found, until)


def points_of(samples: list[_Numbers], until: datetime) -> list[Point]:
    """Return samples as points: at most :data:`MAX_POINTS`, each the highest of its time, and one for each gap.

    :param until: the time now, by the server's clock
    """
    points: list[Point] = []
    width = -(-len(samples) // (MAX_POINTS // 2)) or 1
    for run in _runs(samples):
        if len(run) == 1:
            points.append(_joined(run))
        points += [_joined(run[start - 1 : start + width]) for start in range(1, len(run), width)]
        points.append(_gap(run[-1].at + timedelta(seconds=SAMPLE_SECONDS)))
    if samples and until - samples[-1].at <= GAP:
        points.pop()
    return points[-MAX_POINTS:]


def _runs(samples: list[_Numbers]) -> Iterator[list[_Numbers]]:
    """Return the samples between gaps."""
    start = 0
    for position in range(1, len(samples) + 1):
        if position == len(samples) or samples[position].at - samples[position - 1].at > GAP:
            yield samples[start:position]
            start = position


def _joined(group: list[_Numbers]) -> Point:
    first, last = group[0], group[-1]
    seconds = (last.at - first.at).total_seconds()
    stored = gone = None
    if seconds > 0 and first.created == last.created:
        stored = max(0, last.last_sequence - first.last_sequence)
        gone = max(0, stored - (last.stored - first.stored))
    peak = group[1:] or group
    return Point(
        at=last.at,
        pending=max(sample.pending for sample in peak),
        in_flight=max(sample.in_flight for sample in peak),
        dead=last.dead,
        in_per_second=None if stored is None else round(stored / seconds, 3),
        out_per_second=None if gone is None else round(gone / seconds, 3),
    )


def _gap(at: datetime) -> Point:
    return Point(at=at, pending=None, in_flight=None, dead=None, in_per_second=None, out_per_second=None)


_DEATH_STEPS = 180
_MAX_RECORDS = 20_000
_SAME_TIME = timedelta(milliseconds=1)


async def read_deaths(
    table: LetterTable | None, scan: Scan | None, since: datetime, until: datetime
) -> tuple[list[Deaths], datetime | None]:
    """Count the deaths of a time.

    :param table: the queue's letters
    :param scan: the scan that read them; letters that were redriven since are found in the audit
    :return: the counts, and since when they are complete; ``None`` where all are
    """
    if table is None:
        return [], until
    seconds = max(1.0, (until - since).total_seconds() / _DEATH_STEPS)
    start = since.timestamp()
    # With one step more, for letters that died since that time was read.
    counts = Counter(await table.deaths(since, seconds, _DEATH_STEPS + 1))
    known_since = None if table.complete else until
    if scan is not None and scan.audit is not None:
        # Concurrent redrives may record a letter twice.
        read: set[tuple[int, datetime]] = set()
        async for record in _redriven(scan.connection, scan.audit, since):
            read.add(record)
            if len(read) > _MAX_RECORDS:
                known_since = until
                break
        present = await table.died_at({sequence for sequence, _ in read})
        for sequence, died_at in read:
            is_present = abs(present.get(sequence, datetime.min.replace(tzinfo=UTC)) - died_at) < _SAME_TIME
            if since <= died_at < until and not is_present:
                counts[int((died_at.timestamp() - start) // seconds)] += 1
    return [
        Deaths(at=datetime.fromtimestamp(start + step * seconds, UTC), seconds=seconds, count=count)
        for step, count in sorted(counts.items())
    ], known_since


async def _redriven(
    connection: Connection, audit: AuditLog, since: datetime
) -> AsyncGenerator[tuple[int, datetime], None]:
    """Read which letters the audit has records about that are younger than a time, and when these letters died."""
    start = await first_since(connection, audit.stream, since)
    one = letter_audit_subject(audit.queue, 0).removesuffix("0") + "*"
    async for message in read_range(connection, audit.stream, one, start):
        record = parse_record(LetterRecord, message)
        if record and record.created == audit.created and record.died_at:
            yield record.sequence, record.died_at
