"""The account of a queue: the jobs that are gone, and the ones among them whose end nothing states.

A work queue removes a job whatever happened to it. A job that is gone is accounted for by its completion, its ack
metric, an entry that says that it was terminated or parked, a record of the audit, or the report of a handler;
otherwise it is *unaccounted*: somebody deleted it, it expired, or it was terminated while nothing captured that. Where
its evidence may have been stored once and be gone, or where a worker ended it whose consumer may not have had it, what
became of it is *not known*. No redrive takes such a job unless a person names it.

An account reads the queue first and then each companion up to its last message *after* that. What the companions state
about jobs that the queue's snapshot doesn't have yet is stored in the checkpoint, with the positions.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import compress, islice
from operator import or_
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.advisories import AckMetric, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, republished_message, republishing_stream
from airflow_provider_jetstream.jetstream.audit.account_checkpoint import (
    AccountCheckpoint,
    ReadPosition,
    read_checkpoint,
    write_checkpoint,
)
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, pause_if_due, sleep
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges, ranges_text
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, next_message, read_bulk, read_range
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    completion_filter,
    entry_copies_filter,
    handled_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import read_handlers
from airflow_provider_jetstream.jetstream.dead_letters.entry import BY_WORKERS, ENDS, HIGHEST_JOB, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import read_index
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser
from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


# The consumer whose workers brought an end about, none where the server or a redriver states it; and the jobs.
_Ends: TypeAlias = "tuple[str | None, Iterable[int]]"
ReadJobs: TypeAlias = "Callable[[Sequence[int]], Awaitable[list[StoredMessage | None]]]"
_NOTHING: Final[_Ends] = (None, ())
_DIGITS = 19
_AT_ONCE = 512
# Sequences in memory before they become ranges.
_MOST_SEQUENCES = 50_000
# The clocks of two servers of a cluster differ by less.
CLOCK_DIFFERENCE = timedelta(minutes=5)


class EndEvidence:
    """Which jobs of a queue ended, as far as its companions were read.

    Everything counts from the time on at which the queue's stream was created: the sequences of an earlier stream of
    its name are other jobs.

    :param snapshot: the queue
    :param checkpoint: the last account: evidence about later jobs counts only if it was stored later
    :param dead_letter_queue: the dead letter queue's stream, if the queue declares one
    :ivar read_to: how far each companion was read, by its name
    :ivar completing: the consumers whose workers have stored a completion
    :ivar has_lost_entries: whether the dead letter queue has lost entries that the last account had read
    """

    def __init__(
        self,
        connection: Connection,
        snapshot: QueueSnapshot,
        checkpoint: AccountCheckpoint,
        dead_letter_queue: str | None,
    ) -> None:
        self._connection, self._snapshot, self._checkpoint = connection, snapshot, checkpoint
        self._dead_letter_queue = dead_letter_queue
        self._parser = EntryParser(snapshot.queue, snapshot.created, connection.domain)
        self.read_to: dict[str, ReadPosition] = dict(checkpoint.read)
        self.completing = set(checkpoint.completing)
        self.has_lost_entries = False
        self._ended, self._deleted = _Growing(), _Growing()
        self._entered, self._stated, self._parked = _Growing(), _Growing(), _Growing()
        # By consumer, the ends that its workers brought about.
        self._claims: dict[str, _Growing] = {}
        queue = snapshot.queue
        self._kinds: dict[str, Callable[[StoredMessage], _Ends]] = {
            completion_filter(queue).removesuffix(">"): self._ends_by_completion,
            ack_metric_filter(queue).removesuffix("*"): self._ends_by_metric,
            letter_audit_subject(queue, 0).removesuffix("0"): self._ends_by_record,
            handled_filter(queue).removesuffix("*"): self._ends_by_report,
            entry_copies_filter(queue).removesuffix(">"): lambda copy: self._ends_by_entry(self._read_copy(copy)),
        }
        self._skew = timedelta()
        # Jobs that were requeued in place, and so have yet to end.
        self._requeued_at: dict[int, datetime] = {}
        # What the audit says last of jobs that were discarded, or brought back after that.
        self._discarded: dict[int, bool] = {}
        self._reopened: set[int] = set()

    @property
    def reopened(self) -> SequenceRanges:
        """The jobs that were requeued in place and haven't ended since."""
        return SequenceRanges.of(self._reopened)

    @property
    def ended(self) -> SequenceRanges:
        """The jobs that ended."""
        return self._ended.ranges() - self.reopened

    @property
    def deleted(self) -> SequenceRanges:
        """The jobs that the server reported as deleted in flight; it reports some done jobs as well."""
        return self._deleted.ranges()

    @property
    def entered(self) -> SequenceRanges:
        """The jobs that the dead letter queue has, if anything: it alone states their end, or they are parked there."""
        return (self._entered.ranges() | self._parked.ranges()) - self.stated

    @property
    def stated(self) -> SequenceRanges:
        """The jobs whose end is stated by the events or the audit, without the parked jobs."""
        return self._stated.ranges() - self._parked.ranges()

    def still_discarded(self, before: SequenceRanges) -> SequenceRanges:
        """Return the jobs that are discarded and weren't brought back, with those that were so before."""
        brought_back = SequenceRanges.of(job for job, is_discarded in self._discarded.items() if not is_discarded)
        return (before - brought_back) | SequenceRanges.of(job for job, so in self._discarded.items() if so)

    async def read(self, info: Mapping[str, Any], skew: timedelta) -> int:
        """Read what a companion has stored since the last call; the audit before the others.

        A job that was requeued in place ends after the audit's record of that.

        :param info: the server's STREAM.INFO of the companion, later than the snapshot
        :param skew: how much the clock of the companion's server may differ from that of the queue's
        :returns: the first sequence that was to be read and wasn't stored any more; 0 where all were
        """
        name, state, self._skew = info["config"]["name"], info["state"], skew
        position, read = await self._position(info), self.read_to.get(name)
        noted = self._entered if name == self._dead_letter_queue else self._stated
        if name == self._dead_letter_queue and read and position < read.to:
            self.has_lost_entries = True
        due = max(position + 1, int(state["first_seq"]))
        async for message in read_bulk(self._connection, info, position + 1):
            due += message.sequence == due
            if message.stored_at < self._snapshot.created_at or proves_nothing(message):
                continue
            consumer, sequences = self._ends(name, message)
            for sequence in sequences:
                if 0 < sequence < HIGHEST_JOB:
                    noted.add(sequence)
                self._end(sequence, consumer, message.stored_at, skew)
        last = max(position, int(state["last_seq"]))
        self.read_to[name] = ReadPosition(created=info["created"], to=last, time=state["last_ts"])
        return due if due <= last else 0

    async def _position(self, info: Mapping[str, Any]) -> int:
        """Return how far a companion was read; 0 where it is another stream, or lost messages that were read."""
        read = self.read_to.get(name := info["config"]["name"])
        if read is None or read.created != info["created"] or int(info["state"]["last_seq"]) < read.to:
            return 0
        if not read.to:
            return 0
        message = await get_message(self._connection, name, read.to)
        return 0 if message and message.stored_at != datetime.fromisoformat(read.time) else read.to

    async def judge_claims(self, read_jobs: ReadJobs) -> SequenceRanges:
        """Have those ends count that consumers brought about which may have had the jobs; drop the others.

        :param read_jobs: returns jobs as the archive or the queue stores them; ``None`` where neither does
        :returns: the jobs that neither stores
        """
        ended = self.ended
        claims = {consumer: claimed.ranges() - ended for consumer, claimed in self._claims.items()}
        self._claims = {}
        believed, open_to_doubt = await self._judge(claims, read_jobs)
        for sequence in believed:
            self._count(sequence)
        return open_to_doubt

    async def _judge(
        self, claims: Mapping[str, SequenceRanges], read_jobs: ReadJobs
    ) -> tuple[SequenceRanges, SequenceRanges]:
        """Return the jobs that a consumer stating their end may have had, and the jobs for which that isn't known."""
        believed, unknown = _Growing(), _Growing()
        for some in batches(reduce(or_, claims.values(), SequenceRanges())):
            for sequence, job in zip(some, await read_jobs(some), strict=True):
                if job is None:
                    unknown.add(sequence)
                elif any(
                    sequence in claimed and self._snapshot.may_have_had(consumer, sequence, job.subject, job.stored_at)
                    for consumer, claimed in claims.items()
                ):
                    believed.add(sequence)
            await pause_if_due()
        return believed.ranges(), unknown.ranges()

    def _ends(self, stream: str, message: StoredMessage) -> _Ends:
        """Return the jobs whose end a message states, and note what else the message states."""
        for prefix, read in self._kinds.items():
            if message.subject.startswith(prefix):
                return read(message)
        is_entry = stream == self._dead_letter_queue and self._parser.is_entry(message.subject)
        return self._ends_by_entry(self._parser.parse(message)) if is_entry else _NOTHING

    def _ends_by_completion(self, message: StoredMessage) -> _Ends:
        *_, consumer, sequence = message.subject.split(".")
        self.completing.add(consumer)
        return consumer, (_number(sequence),)

    def _ends_by_metric(self, message: StoredMessage) -> _Ends:
        metric = parse_advisory(message.data)
        is_own = isinstance(metric, AckMetric) and metric.is_of_server(self._snapshot.queue, self._connection.domain)
        return (None, (metric.stream_seq,)) if isinstance(metric, AckMetric) and is_own else _NOTHING

    def _ends_by_report(self, message: StoredMessage) -> _Ends:
        return None, (_number(message.subject.rpartition(".")[2]),)

    async def jobs_with_removed_entries(
        self, audit: str, stored: frozenset[int], read_jobs: ReadJobs
    ) -> SequenceRanges:
        """Return the jobs that had entries and have none: a handler of the dead letter queue removed the entries.

        :param audit: the audit's stream, which has copies of all entries
        :param stored: the jobs that have entries
        :param read_jobs: returns jobs as the archive or the queue stores them
        """
        jobs, claims = set[int](), dict[str, set[int]]()
        async for message in read_range(self._connection, audit, entry_copies_filter(self._snapshot.queue)):
            job = self._read_copy(message)
            if job and job[1].kind != EntryKind.DELETION and job[1].recorded_at >= self._snapshot.created_at:
                claimant = self._claimant(job[1].consumer) if job[1].kind in BY_WORKERS else None
                (claims.setdefault(claimant, set()) if claimant else jobs).add(job[0])
        believed, _ = await self._judge(
            {consumer: SequenceRanges.of(claimed - jobs - stored) for consumer, claimed in claims.items()}, read_jobs
        )
        return believed | SequenceRanges.of(jobs - stored)

    def _ends_by_record(self, message: StoredMessage) -> _Ends:
        try:
            record = LetterRecord.model_validate_json(message.data)
        except ValidationError:
            return _NOTHING
        if record.created != self._snapshot.created:
            return _NOTHING
        if record.action == "parked":
            self._parked.add(record.sequence)
        if record.action in ("parked", "discarded"):
            # A discarded letter that is brought back is parked.
            self._discarded[record.sequence] = record.action == "discarded"
        if not record.in_place:
            return None, (record.sequence,)
        self._reopened.add(record.sequence)
        self._requeued_at[record.sequence] = message.stored_at - self._skew
        return _NOTHING

    def _ends_by_entry(self, job: tuple[int, Entry] | None) -> _Ends:
        # A job that used up its deliveries stays stored: only when it is gone does its entry say how it ended. Nor does
        # a worker's copy: the worker may have been stopped before it terminated the job.
        if job is None or job[1].recorded_at < self._snapshot.created_at:
            return _NOTHING
        sequence, entry = job
        if entry.kind == EntryKind.DELETION and sequence < HIGHEST_JOB:
            self._deleted.add(sequence)
        return (entry.consumer if entry.kind in BY_WORKERS else None, (sequence,)) if entry.kind in ENDS else _NOTHING

    def _read_copy(self, copy: StoredMessage) -> tuple[int, Entry] | None:
        message = republished_message(copy)
        if republishing_stream(copy) != self._dead_letter_queue or not self._parser.is_entry(message.subject):
            return None
        try:
            return self._parser.parse(message) if message.stored_at.tzinfo else None
        except ValueError:
            # The time of a copy that the server didn't make.
            return None

    def _end(self, sequence: int, consumer: str | None, at: datetime, skew: timedelta) -> None:
        """Have an end count, or, of what workers of one of several consumers brought about, note the claim."""
        requeued_at = self._requeued_at.get(sequence)
        is_earlier_job = sequence > self._checkpoint.last and at + skew < self._checkpoint.taken_at
        if not 0 < sequence < HIGHEST_JOB or is_earlier_job or (requeued_at and at + skew <= requeued_at):
            return
        if claimant := self._claimant(consumer):
            self._claims.setdefault(claimant, _Growing()).add(sequence)
        else:
            self._count(sequence)

    def _claimant(self, consumer: str | None) -> str | None:
        """Return the consumer whose workers state something, where the job may be that of another consumer."""
        return consumer if consumer and not self._snapshot.consumers.keys() <= {consumer} else None

    def _count(self, sequence: int) -> None:
        self._ended.add(sequence)
        self._reopened.discard(sequence)


class _Growing:
    """A set of sequences in ranges of about one size, so that none is joined often."""

    def __init__(self) -> None:
        self._parts: list[SequenceRanges] = []
        self._new: array[int] = array("Q")

    def add(self, sequence: int) -> None:
        self._new.append(sequence)
        if len(self._new) >= _MOST_SEQUENCES:
            self._join()

    def ranges(self) -> SequenceRanges:
        self._join()
        return reduce(or_, self._parts, SequenceRanges())

    def _join(self) -> None:
        if self._new:
            self._parts.append(SequenceRanges.of(self._new))
            self._new = array("Q")
        while len(self._parts) > 1 and len(self._parts[-1].bounds) * 2 >= len(self._parts[-2].bounds):
            last = self._parts.pop()
            self._parts[-1] |= last


def batches(sequences: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Return sequences some at a time, as many as are asked for together."""
    remaining = iter(sequences)
    return iter(lambda: tuple(islice(remaining, _AT_ONCE)), ())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0


# The server stores what it reports about a job a moment after the job is gone; a loaded one takes longer.
_PAUSES = (0.05, 0.2, 0.75, 2.0)
_REPORTED_RANGES = 1_000
# Longer than a server takes to sync what it has stored (``sync_interval``, 2 minutes unless somebody has set another).
_SYNCED_WITHIN = timedelta(minutes=15)
_ALWAYS = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class JobAccount(TaskReport):
    """What became of the jobs that a queue has ever stored.

    :param queue: the work queue
    :param at: as of when, by the server's clock
    :param jobs: how many jobs it has ever stored
    :param stored: how many of them are stored
    :param unaccounted: those that are gone without evidence of their end, as ranges of first and last sequence
    :param unknown: those that are gone and of whose end there may have been evidence, as ranges
    :param why_unknown: why that isn't known, a clause each
    :param discarded: how many ended because somebody discarded them as dead letters
    """

    queue: str
    at: datetime
    jobs: int
    stored: int
    unaccounted: tuple[tuple[int, int], ...] = ()
    unknown: tuple[tuple[int, int], ...] = ()
    why_unknown: tuple[str, ...] = ()
    discarded: int = 0

    @property
    def gone_count(self) -> int:
        """How many jobs are gone."""
        return self.jobs - self.stored

    @property
    def unaccounted_count(self) -> int:
        """How many jobs are gone without evidence of their end."""
        return _count(self.unaccounted)

    @property
    def unaccounted_jobs(self) -> SequenceRanges:
        """The jobs that are gone without evidence of their end, as a set of sequences."""
        return SequenceRanges(array("Q", (bound for first, last in self.unaccounted for bound in (first, last + 1))))

    @property
    def unknown_count(self) -> int:
        """Of how many jobs that are gone the end isn't known."""
        return _count(self.unknown)

    @property
    def ended(self) -> int:
        """How many jobs are gone with evidence of their end."""
        return max(0, self.gone_count - self.unaccounted_count - self.unknown_count)

    @property
    def unknown_share(self) -> float:
        """The jobs whose end isn't known, as a share of the jobs that are gone."""
        return self.unknown_count / self.gone_count if self.gone_count > 0 else 0.0

    def __str__(self) -> str:
        text = f"{self.jobs} jobs of {self.queue}: {self.stored} stored, {self.ended} ended"
        if self.discarded:
            text += f" ({self.discarded} of them discarded)"
        text += f", {self.unaccounted_count} unaccounted"
        if self.unaccounted:
            text += f" ({ranges_text(self.unaccounted_jobs)})"
        if self.unknown:
            text += f", {self.unknown_count} not known ({self.unknown_share:.1%} of those gone)"
        return text

    def as_json(self) -> dict[str, Any]:
        """Return the account for an XCom or a script: counts, and the first thousand ranges of sequences."""
        return {
            "queue": self.queue,
            "at": self.at.isoformat(),
            "jobs": self.jobs,
            "stored": self.stored,
            "gone": self.gone_count,
            "ended": self.ended,
            "discarded": self.discarded,
            "unaccounted": self.unaccounted_count,
            "unaccounted_sequences": [list(pair) for pair in self.unaccounted[:_REPORTED_RANGES]],
            "not_known": self.unknown_count,
            "not_known_share": round(self.unknown_share, 6),
            "not_known_sequences": [list(pair) for pair in self.unknown[:_REPORTED_RANGES]],
            "why_not_known": list(self.why_unknown),
        }

    @classmethod
    def of(cls, checkpoint: AccountCheckpoint) -> JobAccount:
        """Return the account that a checkpoint states."""
        return cls(
            checkpoint.stream,
            checkpoint.taken_at,
            max(0, checkpoint.last - checkpoint.first + 1),
            checkpoint.stored,
            tuple(checkpoint.unaccounted.pairs()),
            tuple(checkpoint.unknown.pairs()),
            checkpoint.why_unknown,
            checkpoint.discarded.count,
        )


async def account_for_jobs(connection: Connection, queue: WorkQueue) -> JobAccount:
    """Find the jobs of a queue that are gone without evidence of their end.

    What is settled is stored in the queue's audit, so that the next account reads only what is new.

    :raises NotFoundError: the queue doesn't exist
    """
    return JobAccount.of(await _Accounting(connection, queue, await take_snapshot(connection, queue)).run())


async def last_account(connection: Connection, queue: WorkQueue, created: str) -> JobAccount | None:
    """Return the account of a queue that was made last; ``None`` where none is stored.

    :param created: when the work queue was created, in the server's own text
    """
    if queue.audit is None:
        return None
    try:
        checkpoint = await read_checkpoint(connection, queue.audit.name, queue.name, created)
    except NotFoundError:
        return None
    return JobAccount.of(checkpoint) if checkpoint.taken_at > _ALWAYS else None


async def unaccounted_jobs(connection: Connection, queue: WorkQueue, snapshot: QueueSnapshot) -> SequenceRanges:
    """Return the jobs that are gone without evidence of their end, and store nothing.

    :param snapshot: the queue as it was read before
    """
    return (await _Accounting(connection, queue, snapshot).run(persist=False)).unaccounted


class _Accounting:
    def __init__(self, connection: Connection, queue: WorkQueue, snapshot: QueueSnapshot) -> None:
        self._connection, self._queue, self._snapshot = connection, queue, snapshot
        self._letters = queue.dead_letters.name if queue.dead_letters else None
        self._events = queue.events.name if queue.events else None
        self._audit = queue.audit.name if queue.audit else None
        # Since when the companions have all evidence that wasn't read before, and why not since earlier.
        self._complete_since, self._why_incomplete = _ALWAYS, ""
        self._why: list[str] = []
        self._companions: dict[str, Mapping[str, Any]] = {}

    async def run(self, *, persist: bool = True) -> AccountCheckpoint:
        connection, name = self._connection, self._queue.name
        before = AccountCheckpoint(stream=name, created=self._snapshot.created)
        if self._audit and self._audit in self._snapshot.companions:
            before = await read_checkpoint(connection, self._audit, name, self._snapshot.created)
        self._info = await stream_info(connection, name)
        taken_at = datetime.fromisoformat(self._info["ts"])
        stored = await stored_sequences(connection, name, self._info["state"])
        last = stored.last
        settled = before
        if last < before.last:
            # The server has lost jobs that it had stored, gives their sequences to others, and stores others again.
            lost = SequenceRanges.between(last + 1, before.last)
            again = SequenceRanges.between(max(1, stored.first), last if stored.exact else 0)
            again -= SequenceRanges.of(stored.deleted)
            settled = before.model_copy(
                update={
                    "last": last,
                    "taken_at": taken_at,
                    "open": (before.open | again) - lost,
                    "early": SequenceRanges(),
                    "claimed": before.claimed - lost,
                    "discarded": before.discarded - lost - again,
                    "unaccounted": before.unaccounted - lost - again,
                    "unknown": before.unknown - lost - again,
                }
            )
        self._before, self._claimed = settled, settled.claimed
        self._complete_since, self._why_incomplete = settled.complete_since, settled.why_incomplete
        self._evidence = EndEvidence(connection, self._snapshot, settled, self._letters)
        # A stream may be created with a first sequence of any size: no job had those below.
        first = max(1, int(self._info["config"].get("first_seq") or 1))
        opened = settled.open | (SequenceRanges.between(max(first, settled.last + 1), last) - settled.early)
        await self._read()
        if self._evidence.has_lost_entries:
            # The dead letter queue's file is older than this account: what it alone has stated may be lost with it.
            opened |= (settled.entered | settled.entered_before) & SequenceRanges.between(first, last)
        self._evidence.has_lost_entries = False
        gone = await self._without_evidence(opened, stored)
        if self._evidence.has_lost_entries:
            # The server lost entries that this very account has read.
            self._snapshot = await take_snapshot(connection, self._queue)
            return await self.run(persist=persist)
        # Evidence about jobs that don't exist yet can't be true.
        newest = int((await stream_info(connection, name))["state"]["last_seq"])
        ended, reopened, later = self._evidence.ended, self._evidence.reopened, SequenceRanges.between(last + 1, newest)
        deleted = settled.deleted | self._evidence.deleted
        accounted = await self._letters_and_handled(gone, deleted)
        gone -= accounted
        unaccounted, unknown = await self._divide(gone, last)
        known = settled.unaccounted - ended - reopened
        known -= await self._letters_and_handled(known & self._evidence.deleted, deleted)
        unknown = (unknown | settled.unknown | (known & self._claimed)) - ended - reopened
        stays = ((opened | reopened) & SequenceRanges.between(1, last)) - ended - gone - accounted
        # What was dropped before the snapshot is about jobs that were gone then, and so are looked at above.
        has_gap = self._complete_since > taken_at
        entered = (settled.entered | self._evidence.entered) - self._evidence.stated
        is_synced = taken_at - settled.entered_since > _SYNCED_WITHIN
        account = AccountCheckpoint(
            stream=name,
            created=self._snapshot.created,
            first=first,
            last=last,
            stored=self._info["state"]["messages"] if not stored.exact else stored.count(1, last),
            taken_at=taken_at,
            read=self._evidence.read_to,
            open=stays,
            deleted=deleted & (stays | later),
            early=((settled.early | ended) & later) - reopened,
            claimed=self._claimed & (stays | later),
            discarded=self._evidence.still_discarded(settled.discarded) & SequenceRanges.between(1, last) - stays,
            unaccounted=unaccounted | (known - self._claimed),
            unknown=unknown,
            why_unknown=tuple(dict.fromkeys((*settled.why_unknown, *self._why))) if unknown else (),
            complete_since=self._complete_since if has_gap else _ALWAYS,
            why_incomplete=self._why_incomplete if has_gap else "",
            entered=SequenceRanges() if is_synced else entered,
            entered_before=entered if is_synced else settled.entered_before - self._evidence.stated,
            entered_since=taken_at if is_synced else settled.entered_since,
            consumers=self._sampled(),
            completing=tuple(sorted(self._evidence.completing)),
            revision=before.revision,
        )
        if persist and self._audit and self._audit in self._companions:
            await write_checkpoint(connection, self._companions[self._audit], account)
        return account

    async def _read(self) -> None:
        """Read what the companions have stored since they were read last, up to their last messages now."""
        infos: dict[str, Mapping[str, Any]] = {}
        # The audit's position is read last and the audit first: an end that is read has all requeueing before it.
        for name in (self._events, self._letters, self._audit):
            if name and name in self._snapshot.companions:
                infos[name] = await stream_info(self._connection, name)
        for name, info in reversed(infos.items()):
            skew = _skew(self._info, info)
            read = self._evidence.read_to.get(name)
            self._note_gap(info, skew, read, read.to + 1 if read else 1)
            if missed := await self._evidence.read(info, skew):
                self._note_gap(await stream_info(self._connection, name), skew, self._evidence.read_to[name], missed)
        self._companions = infos
        self._claimed |= await self._evidence.judge_claims(self._read_jobs)

    async def _read_jobs(self, sequences: Sequence[int]) -> list[StoredMessage | None]:
        """Return jobs as the archive or the queue stores them; ``None`` where neither does."""
        archive = await self._archive()

        async def read(sequence: int) -> StoredMessage | None:
            copy = await archive.find(sequence) if archive else None
            return copy or await get_message(self._connection, self._queue.name, sequence)

        return await map_concurrently(read, sequences)

    def _note_gap(self, info: Mapping[str, Any], skew: timedelta, read: ReadPosition | None, due: int) -> None:
        """Note since when a companion has all that was stored there and is due to be read.

        :param read: of which stream ``due`` is the first sequence that wasn't read
        """
        config, state, name = info["config"], info["state"], info["config"]["name"]
        since, why = _ALWAYS, ""
        is_same = read is not None and read.created == info["created"]
        if not is_same:
            since, why = datetime.fromisoformat(info["created"]), f"{name} is younger than they are"
        if int(state["first_seq"]) > (due if is_same else 1):
            now = datetime.fromisoformat(info["ts"])
            first = datetime.fromisoformat(state["first_ts"]) if state["messages"] else now
            limits = any(config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes"))
            if name == self._letters and not limits:
                # Redrives remove entries, and record that. What somebody purges are dead letters that nothing brought
                # back: their jobs are unaccounted.
                max_age = timedelta(microseconds=config.get("max_age", 0) / 1_000)
                first = now - max_age if max_age else _ALWAYS
            if first > since:
                since, why = first, f"{name} has dropped what it stored before {first:%Y-%m-%d %H:%M:%S} UTC"
        # Streams that are created together are created by one server.
        if why and since > self._snapshot.created_at and since + skew > self._complete_since:
            self._complete_since, self._why_incomplete = since + skew, why

    async def _without_evidence(self, opened: SequenceRanges, stored: SequenceSet) -> SequenceRanges:
        """Return the open jobs that are gone without evidence; reads again, since it may come a bit later."""
        gone = await self._missing(opened - self._evidence.ended, stored)
        for pause in _PAUSES:
            if not gone:
                break
            await sleep(pause)
            await self._read()
            gone -= self._evidence.ended
        return gone

    async def _missing(self, opened: SequenceRanges, stored: SequenceSet) -> SequenceRanges:
        """Return which open jobs weren't stored in the snapshot."""
        below = opened & SequenceRanges.between(1, stored.first - 1)
        if stored.exact:
            return below | (opened & SequenceRanges.of(stored.deleted))
        # Too many are deleted for one answer of the server. As many as are stored, none of them is gone.
        rest = opened - below
        if rest.count <= self._info["state"]["messages"]:
            return below
        # What is yet to be delivered is stored, or looked at later.
        consumers = self._snapshot.consumers.values()
        horizon = min((consumer.delivered for consumer in consumers if consumer.pending), default=stored.last)
        gone = below
        for some in batches(rest & SequenceRanges.between(stored.first, horizon)):
            gone |= SequenceRanges.of(compress(some, await map_concurrently(self._is_gone, some)))
        return gone

    async def _is_gone(self, sequence: int) -> bool:
        return await get_message(self._connection, self._queue.name, sequence) is None

    async def _letters_and_handled(self, gone: SequenceRanges, deleted: SequenceRanges) -> SequenceRanges:
        """Return the jobs without evidence of their end that expired in flight, or whose entries a handler removed."""
        accounted, info = SequenceRanges(), self._companions.get(self._letters or "")
        if not gone or info is None:
            return accounted
        handlers = await read_handlers(self._connection, info["config"], self._queue.name)
        if not (gone & deleted or (handlers and self._audit)):
            return accounted
        snapshot = self._snapshot
        index = await read_index(self._connection, info["config"]["name"], snapshot.queue, snapshot.created)
        if handlers and self._audit:
            with_entries = frozenset(job for job in gone if job in index)
            handled = await self._evidence.jobs_with_removed_entries(self._audit, with_entries, self._read_jobs)
            accounted |= handled & gone
        if in_doubt := (gone & deleted) - accounted:
            reader = await ScanContext(self._queue, snapshot, with_unaccounted=False, handlers=handlers).reader(
                *(self._connection, index),
                archive=await self._archive(),
                audit=AuditLog.from_snapshot(self._connection, self._queue, snapshot),
            )
            for some in batches(in_doubt):
                jobs = await reader.classify([(job, index.entries_of(job)) for job in some])
                accounted |= SequenceRanges.of(job.sequence for job in jobs if not _is_open(job))
        return accounted

    async def _divide(self, gone: SequenceRanges, last: int) -> tuple[SequenceRanges, SequenceRanges]:
        """Divide jobs without evidence: first the jobs that would have left some, then all others."""
        unknown = gone & self._claimed
        if unknown:
            self._why.append("another consumer's worker may have ended them, and no archive shows whose they were")
            gone -= unknown
        if not gone:
            return gone, unknown
        archive = await self._archive()
        if self._complete_since > self._snapshot.created_at:
            first = await self._first_job_since(self._complete_since, archive, last)
            dropped = gone & SequenceRanges.between(1, first - 1)
            gone, unknown = gone - dropped, unknown | dropped
            self._why += [self._why_incomplete] if dropped else []
        unproved = self._unproved_consumers()
        if gone and (unproved or not self._snapshot.consumers):
            self._why.append(self._why_unproved(unproved))
        if unproved == self._snapshot.consumers.keys():
            return SequenceRanges(), unknown | gone
        if not unproved:
            return gone, unknown
        proved = SequenceRanges()
        for some in batches(gone):
            copies = await map_concurrently(archive.find, some) if archive else [None] * len(some)
            leaves = [_leaves_evidence(copy.subject if copy else None, self._snapshot, unproved) for copy in copies]
            proved |= SequenceRanges.of(compress(some, leaves))
        return proved, unknown | (gone - proved)

    async def _archive(self) -> ArchiveReader | None:
        return await ArchiveReader.open(self._connection, self._queue, self._snapshot.info)

    async def _first_job_since(self, moment: datetime, archive: ArchiveReader | None, last: int) -> int:
        """Return the lowest sequence from which on every job is known to be stored since a moment."""
        if archive and (job := await archive.first_job_since(moment)):
            return job
        low, high = max(1, int(self._info["state"]["first_seq"])), last + 1
        while low < high:
            middle = (low + high) // 2
            message = await next_message(self._connection, self._queue.name, middle, ">")
            if message is not None and message.stored_at < moment:
                low = message.sequence + 1
            else:
                high = middle
        message = await next_message(self._connection, self._queue.name, low, ">")
        return min(message.sequence if message else last + 1, last + 1)

    def _sampled(self) -> dict[str, bool]:
        """Return by consumer whether the server reports each of its acknowledgements, and the events store that."""
        events = self._companions.get(self._events or "")
        config = events["config"] if events else {}
        captured = covered_by_any(config.get("subjects") or [], ack_metric_filter(self._queue.name))
        # All metrics of a consumer have one subject.
        is_captured = captured and config.get("max_msgs_per_subject", -1) <= 0
        every = sampled_percent(ALL_SAMPLED)
        return {
            name: is_captured and sampled_percent(consumer.sample_freq) >= every
            for name, consumer in self._snapshot.consumers.items()
        }

    def _unproved_consumers(self) -> set[str]:
        """Return the consumers whose jobs may have ended without evidence since the last account."""
        if self._events not in self._companions:
            return set(self._snapshot.consumers)
        before = self._before.consumers
        sampled = {name for name, is_sampled in self._sampled().items() if is_sampled and before.get(name, True)}
        return self._snapshot.consumers.keys() - sampled - self._evidence.completing

    def _why_unproved(self, consumers: set[str]) -> str:
        if self._events not in self._companions:
            return "no events stream stores the ends of jobs: declare events"
        names = ", ".join(sorted(consumers))
        if not names:
            return "no consumer is left"
        return f"{self._events} has no ack metrics and no completions of {names}: set sample_freq to 100%"


def _leaves_evidence(subject: str | None, snapshot: QueueSnapshot, unproved: set[str]) -> bool:
    """Return whether a job's end would have left evidence.

    :param subject: by its copy in the archive, if there is one
    """
    consumer = snapshot.consumer_for(subject) if subject else None
    return not (consumer.name in unproved if consumer else unproved)


def _skew(queue: Mapping[str, Any], companion: Mapping[str, Any]) -> timedelta:
    """Return how much the clocks of two streams' servers may differ."""
    leaders = {(info.get("cluster") or {}).get("leader") for info in (queue, companion)}
    return timedelta() if len(leaders) == 1 else CLOCK_DIFFERENCE


def _is_open(job: object) -> bool:
    """Return whether the entries of a job that is gone leave open how it ended."""
    return isinstance(job, NotDead) and job.status in (Status.SPURIOUS, Status.GONE, Status.STALE, Status.UNACCOUNTED)


def _count(pairs: tuple[tuple[int, int], ...]) -> int:
    return sum(last - first + 1 for first, last in pairs)
