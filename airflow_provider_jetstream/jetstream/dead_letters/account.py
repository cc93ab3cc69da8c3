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
from itertools import compress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges, ranges_text
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences, stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.ended_jobs import (
    CLOCK_DIFFERENCE,
    AccountCheckpoint,
    EndEvidence,
    ReadPosition,
    batches,
    read_checkpoint,
    write_checkpoint,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import read_index
from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
from airflow_provider_jetstream.jetstream.dead_letters.handlers import read_handlers
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.stream_api import SequenceSet
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


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
            # It may know of later ones, too.
            (checkpoint.discarded & SequenceRanges.between(1, checkpoint.last)).count,
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
                    "discarded": (before.discarded & SequenceRanges.between(1, last)) - again,
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
            discarded=(self._evidence.still_discarded(settled.discarded) & SequenceRanges.between(1, newest)) - stays,
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
