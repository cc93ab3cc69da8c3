"""Which jobs have ended, by what is stored about them in the order in which it is read; nothing is decided here.

What the last account has settled is stored in the audit (:class:`AccountCheckpoint`), so that the next one reads what
is new.
"""

from __future__ import annotations

import logging
from array import array
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import islice
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer, ValidationError

from airflow_provider_jetstream.jetstream.advisories import AckMetric, parse_advisory
from airflow_provider_jetstream.jetstream.archive import republished_message, republishing_stream
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import pause_if_due
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_with_position, read_bulk, read_range
from airflow_provider_jetstream.jetstream.contract import (
    account_subject,
    completion_filter,
    entry_copies_filter,
    handled_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry import (
    BY_WORKERS,
    ENDS,
    HIGHEST_JOB,
    EntryKind,
    EntryParser,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing
from airflow_provider_jetstream.jetstream.queue.consumer_state import consumer_state
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.queue.filter_marks import may_have_had

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


log = logging.getLogger(__name__)

_HEADER_BYTES = 256


def _decoded(value: object) -> object:
    return SequenceRanges.decode(value) if isinstance(value, str) else value


_Ranges = Annotated[InstanceOf[SequenceRanges], BeforeValidator(_decoded), PlainSerializer(SequenceRanges.encode)]


class ReadPosition(BaseModel):
    """How far a stream was read.

    :param created: when the stream was created, in the server's own text
    :param to: the last sequence that was read
    :param time: when the message of that sequence was stored; a stream that lost messages has another one there
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    created: str
    to: int
    time: str


class AccountCheckpoint(BaseModel):
    """An account of one queue's jobs.

    Positions are stored together with what was read up to them, by one message: evidence about a job that the snapshot
    doesn't have yet is in ``early``.

    :param stream: the work queue
    :param created: when it was created, in the server's own text
    :param first: the first sequence that it ever gave
    :param last: its last sequence in the snapshot
    :param stored: how many messages it stored then
    :param taken_at: when that was, by the server's clock
    :param read: how far each companion was read, by its name
    :param open: jobs up to ``last`` whose end nothing proved, most of them stored
    :param deleted: those of them of which the server has reported that they were deleted in flight
    :param early: jobs after ``last`` whose end was read
    :param claimed: jobs that a worker ended, and of which it isn't known whether its consumer had them
    :param discarded: jobs that ended because somebody discarded them
    :param unaccounted: jobs that are gone without evidence of their end
    :param unknown: jobs that are gone, and of whose end there may have been evidence
    :param why_unknown: why that isn't known, a clause each
    :param complete_since: since when the companions have all evidence about other jobs, where they dropped some that
        was stored after ``taken_at``
    :param why_incomplete: why not since earlier
    :param entered: jobs whose end nothing but the dead letter queue has stated since ``entered_since``: a loss of power
        may take its last entries, and leave this checkpoint
    :param entered_before: the same of some time before that
    :param entered_since: by the server's clock
    :param consumers: by name whether the server reported each acknowledgement
    :param completing: consumers of which a completion was stored
    :param revision: the checkpoint's sequence in the audit
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[2] = 2
    stream: str
    created: str
    first: Annotated[int, Field(ge=1)] = 1
    last: Annotated[int, Field(ge=0)] = 0
    stored: Annotated[int, Field(ge=0)] = 0
    taken_at: datetime = datetime.min.replace(tzinfo=UTC)
    read: dict[str, ReadPosition] = Field(default_factory=dict)
    open: _Ranges = Field(default_factory=SequenceRanges)
    deleted: _Ranges = Field(default_factory=SequenceRanges)
    early: _Ranges = Field(default_factory=SequenceRanges)
    claimed: _Ranges = Field(default_factory=SequenceRanges)
    discarded: _Ranges = Field(default_factory=SequenceRanges)
    unaccounted: _Ranges = Field(default_factory=SequenceRanges)
    unknown: _Ranges = Field(default_factory=SequenceRanges)
    why_unknown: tuple[str, ...] = ()
    complete_since: datetime = datetime.min.replace(tzinfo=UTC)
    why_incomplete: str = ""
    entered: _Ranges = Field(default_factory=SequenceRanges)
    entered_before: _Ranges = Field(default_factory=SequenceRanges)
    entered_since: datetime = datetime.min.replace(tzinfo=UTC)
    consumers: dict[str, bool] = Field(default_factory=dict)
    completing: tuple[str, ...] = ()
    revision: int = 0


async def read_checkpoint(connection: Connection, audit: str, queue: str, created: str) -> AccountCheckpoint:
    """Read the last checkpoint of a queue; an empty checkpoint where the audit has none.

    :param audit: the audit's stream
    :param created: when the work queue was created, in the server's own text
    """
    subject = account_subject(queue)
    # The next one is stored on condition that this message is still the last, whoever published it.
    message, revision = await last_with_position(connection, audit, subject)
    nothing = AccountCheckpoint(stream=queue, created=created, revision=revision)
    if message is None:
        return nothing
    try:
        checkpoint = AccountCheckpoint.model_validate_json(message.data)
    except ValidationError:
        return nothing
    return checkpoint.model_copy(update={"revision": revision}) if checkpoint.created == created else nothing


async def write_checkpoint(connection: Connection, audit: Mapping[str, Any], checkpoint: AccountCheckpoint) -> None:
    """Store a checkpoint, unless another account has stored one since that of its ``revision``.

    Where it isn't stored, the next account reads the same evidence once more.

    :param audit: the server's STREAM.INFO of the audit
    """
    name, body = audit["config"]["name"], checkpoint.model_dump_json(exclude={"revision"}).encode()
    largest = audit["config"].get("max_msg_size", -1)
    room = min(connection.max_payload, largest) if largest > 0 else connection.max_payload
    if len(body) + _HEADER_BYTES > room:
        log.warning("The account of %s needs %d bytes and isn't stored in %s", checkpoint.stream, len(body), name)
        return
    if not all(value.is_storable for _, value in checkpoint if isinstance(value, SequenceRanges)):
        log.warning("The account of %s isn't stored in %s: its jobs are too scattered", checkpoint.stream, name)
        return
    condition = {"Nats-Expected-Last-Subject-Sequence": str(checkpoint.revision)}
    try:
        await store(connection, account_subject(checkpoint.stream), body, condition)
    except JetStreamProviderError as error:
        log.info("The account of %s isn't stored: %s", checkpoint.stream, error)


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
        """Return the jobs that are discarded and weren't brought back, earlier ones included."""
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
        """Count the ends whose consumers may have had the jobs; drop the other ends.

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
        snapshot = self._snapshot
        believed, open_to_doubt = await self._judge_by(claims, read_jobs, snapshot.config, snapshot.consumers)
        rest = {consumer: claimed - believed - open_to_doubt for consumer, claimed in claims.items()}
        if any(rest.values()):
            # Another tool may have given the consumer their subject since the snapshot.
            config = (await stream_info(self._connection, snapshot.queue))["config"]
            infos = await list_consumers(self._connection, snapshot.queue)
            consumers = {name: consumer_state(info, 0, None, None) for name, info in infos.items()}
            believed_now, gone_now = await self._judge_by(rest, read_jobs, config, consumers)
            believed, open_to_doubt = believed | believed_now, open_to_doubt | gone_now
        return believed, open_to_doubt

    async def _judge_by(
        self,
        claims: Mapping[str, SequenceRanges],
        read_jobs: ReadJobs,
        config: Mapping[str, Any],
        consumers: Mapping[str, ConsumerState],
    ) -> tuple[SequenceRanges, SequenceRanges]:
        """Judge by the consumers of one moment."""
        believed, unknown = _Growing(), _Growing()
        for some in batches(reduce(or_, claims.values(), SequenceRanges())):
            for sequence, job in zip(some, await read_jobs(some), strict=True):
                if job is None:
                    unknown.add(sequence)
                elif any(
                    sequence in claimed
                    and may_have_had(config, consumers, consumer, sequence, job.subject, job.stored_at)
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
