"""Compares a dead letter queue's entries with the consumers' numbers, and finds the dead letters that have no entry.

A stored job is pending, in flight or dead; so ``stored - num_pending - num_ack_pending`` is the number of dead ones,
whatever happened to their advisories. Which jobs these are is certain only up to the consumer's settled sequence: its
last delivery where nothing is in flight, its ack floor otherwise. Above it, an entry is evidence only as far as the
server hasn't restarted since. The server doesn't check the deliveries of a paused consumer, so each of them may have
been a job's last one and counts as uncertain.

Entries are read after the consumers are counted. A dead job that is redriven in between seems to have no entry, and
a job that dies meanwhile hides that in a second count. So a scan reads numbers and entries again where they differ. The
least difference counts: every count includes a dead job that no entry names.

A consumer whose numbers never stand still can't be counted. Its dead jobs are bounded: a job that it had delivered at
one moment, and that is still stored a little later, was dead or in flight at that moment.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences
from airflow_provider_jetstream.jetstream.client.streams import Streams, get_message, read_range
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.entry import believed_entries, death_entries, valid_since
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.queue.filter_marks import unproved_up_to
from airflow_provider_jetstream.jetstream.queue.finding import Restriction
from airflow_provider_jetstream.jetstream.queue.snapshot import count_consumers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


_NAMED = 5


def passed_finding(queue: str, name: str, sequences: Sequence[int]) -> Restriction:
    """Return why jobs are uncertain that a consumer has neither delivered nor is about to deliver."""
    text = (
        f"{len(sequences)} jobs are neither delivered, pending nor in flight by the numbers of consumer {name} of"
        f" {queue}: it passed them before something else than provisioning gave it their subjects;"
        f" they count as uncertain: once no worker has them, redrive them by their sequences ({_shown(sequences)})"
    )
    return Restriction("changed-consumer", text)


def _unproved(snapshot: QueueSnapshot, name: str, others: Collection[str]) -> tuple[int | None, str]:
    """Return up to which sequence a consumer may have passed jobs, ``None`` for all, and what shows that.

    :param others: the others that have more jobs in flight than their filters match
    """
    consumer = snapshot.consumers[name]
    if others:
        return None, f"consumer {', '.join(sorted(others))} has more jobs in flight than its filters match"
    if consumer.dead is not None and consumer.deliveries < consumer.dead + consumer.in_flight:
        return None, f"it has delivered {consumer.deliveries} times since it was created or reset"
    unproved = unproved_up_to(snapshot.config, name, consumer.filters)
    return unproved, "its filters aren't, or weren't, those with which it was provisioned"


def _shown(sequences: Sequence[int]) -> str:
    more = f" and {len(sequences) - _NAMED} more" if len(sequences) > _NAMED else ""
    return ", ".join(map(str, sequences[:_NAMED])) + more


_Item = TypeVar("_Item")

# An acknowledged job leaves the stream a moment after the consumer's state has changed.
REMOVAL_DELAY = 0.25
_MAX_BYTES_AT_ONCE = 16 << 20
# Compared before other tasks of the event loop run.
_SEQUENCES_AT_ONCE = 1_000


@dataclass(slots=True)
class Reconciliation:
    """How the entries of a dead letter queue differ from the consumers' numbers.

    :param orphans: stream sequences of dead letters that have no entry, in order
    :param uncertain: how many more there are, which can't be identified while jobs are in flight
    :param inconsistent_consumers: consumers that have fewer dead letters than entries state: after a crash jobs that
        were dead are alive again, or deliveries are open whose jobs are gone
    :param perhaps_handled: stream sequences of dead jobs without an entry that a handler may have handled, in order;
        they count as uncertain too
    :param disputed: stream sequences of jobs without an entry that a consumer's numbers call dead although it may never
        have delivered them, since its filters were changed: another one's worker may have them, in order; they count
        as uncertain too
    :param findings: why dead letters are uncertain, a sentence each
    :param unnamed: by consumer how many of the uncertain ones its numbers call dead although nothing says which these
        are, at most; without consumers that couldn't be counted, or whose numbers contradict entries
    """

    orphans: array[int] = field(default_factory=lambda: array("Q"))
    uncertain: int = 0
    inconsistent_consumers: set[str] = field(default_factory=set)
    perhaps_handled: array[int] = field(default_factory=lambda: array("Q"))
    disputed: array[int] = field(default_factory=lambda: array("Q"))
    findings: list[Restriction] = field(default_factory=list)
    unnamed: dict[str, int] = field(default_factory=dict)

    def believe_least(self, before: Reconciliation) -> None:
        """Count of each consumer no more jobs that nothing names than an earlier comparison does."""
        least = {name: min(count, before.unnamed.get(name, count)) for name, count in self.unnamed.items()}
        self.uncertain -= sum(self.unnamed.values()) - sum(least.values())
        self.unnamed = least

    def judge_orphans(self, snapshot: QueueSnapshot, orphans: Mapping[str, Sequence[int]]) -> None:
        """Divide the jobs without an entry into dead letters and disputed ones.

        :param orphans: by consumer their stream sequences in order
        """
        certain, disputed = list[int](), list[int]()
        busy = {name for name in self.inconsistent_consumers if snapshot.consumers[name].in_flight}
        for name, sequences in orphans.items():
            unproved, why = _unproved(snapshot, name, busy - {name})
            uncertain = [sequence for sequence in sequences if unproved is None or sequence <= unproved]
            certain += sequences[len(uncertain) :]
            disputed += uncertain
            if uncertain:
                text = (
                    f"{len(uncertain)} jobs without an entry are dead by the numbers of consumer {name} of"
                    f" {snapshot.queue}, and {why}: something else than provisioning has changed consumers, so these"
                    " jobs may never have been delivered, or a worker of another consumer may have them; they count as"
                    f" uncertain: once no worker has them, redrive them by their sequences ({_shown(uncertain)})"
                )
                self.findings.append(Restriction("changed-consumer", text))
        self.orphans, self.disputed = array("Q", sorted(certain)), array("Q", sorted(disputed))
        self.uncertain += len(disputed)

    def leave_open(self, below: int) -> None:
        """Count the orphans below a stream sequence as uncertain: whether they are handled isn't known."""
        self.perhaps_handled = array("Q", (sequence for sequence in self.orphans if sequence < below))
        self.orphans = self.orphans[len(self.perhaps_handled) :]
        self.uncertain += len(self.perhaps_handled)


async def reconcile(
    connection: Connection, snapshot: QueueSnapshot, index: EntryIndex, audit: AuditLog | None
) -> Reconciliation:
    """Compare the entries of a dead letter queue with the consumers' numbers.

    :param audit: the audit, if it has records
    """
    # A consumer that was too busy to be counted may have dead letters too.
    relevant = [consumer for consumer in snapshot.consumers.values() if consumer.dead != 0 or consumer.in_flight]
    if not relevant:
        return Reconciliation(unnamed=dict.fromkeys(snapshot.consumers, 0))
    known = await _count_known(connection, snapshot, index, audit)
    return await _compare(connection, snapshot, relevant, known, index)


async def compare_known(connection: Connection, snapshot: QueueSnapshot, known: KnownDeaths) -> Reconciliation:
    """Compare the dead jobs that are known, those without entries included, with the consumers' numbers."""
    relevant = [consumer for consumer in snapshot.consumers.values() if consumer.dead != 0 or known.jobs[consumer.name]]
    relevant += [busy for busy in snapshot.consumers.values() if busy.in_flight and busy not in relevant]
    return await _compare(connection, snapshot, relevant, known, None)


async def _compare(
    connection: Connection,
    snapshot: QueueSnapshot,
    consumers: Sequence[ConsumerState],
    known: KnownDeaths,
    index: EntryIndex | None,
) -> Reconciliation:
    """Compare the known deaths with the numbers of some consumers.

    :param index: all entries, where dead jobs without an entry are to be found; ``None`` where they are known
    """
    reconciliation = Reconciliation()
    orphans: dict[str, list[int]] = {}
    unknown: dict[str, int] = {}
    for consumer in consumers:
        name = consumer.name
        if index and consumer.dead is not None and consumer.dead <= known.jobs[name] and consumer.in_flight == 0:
            continue
        certain = [] if index is None else sorted(await _find_orphans(connection, snapshot, consumer, index))
        orphans[consumer.name] = certain
        if consumer.dead is None:
            delivered = await _count_delivered(connection, snapshot, consumer)
            _add_bounds(reconciliation, consumer, delivered - known.above_settled[name])
        else:
            rest = consumer.dead - known.jobs[name] - len(certain)
            if rest < 0:
                reconciliation.inconsistent_consumers.add(name)
                reconciliation.uncertain += await _count_disputed(connection, snapshot, consumer, known.jobs[name])
            if rest > 0:
                unknown[name] = rest
        if count := known.disbelieved[name]:
            reconciliation.findings.append(_restart_finding(snapshot.queue, consumer, count))
    reconciliation.unnamed = {
        name: 0
        for name, consumer in snapshot.consumers.items()
        if consumer.dead == known.jobs[name] + len(orphans.get(name, ()))
    }
    reconciliation.unnamed |= await _count_again(connection, snapshot, unknown) if unknown else {}
    reconciliation.uncertain += sum(reconciliation.unnamed.values())
    reconciliation.uncertain += sum(consumer.undecided for consumer in consumers)
    reconciliation.judge_orphans(snapshot, orphans)
    return reconciliation


async def name_passed_jobs(
    connection: Connection, snapshot: QueueSnapshot, index: EntryIndex, reconciliation: Reconciliation
) -> list[int]:
    """Name the jobs that are neither delivered, pending nor in flight by their consumer's numbers, where it is idle.

    A consumer that had nothing to deliver skips ahead without saying so, and passes the jobs of a subject that is moved
    to it later. Its numbers may for a moment say the same of jobs that were stored just then: these jobs are disputed.
    An entry proves no death of such a job: it may be about an earlier job of its sequence.

    :return: their stream sequences
    """
    passed: list[int] = []
    for name, count in reconciliation.unnamed.items():
        consumer = snapshot.consumers[name]
        if not 0 < count <= _SEQUENCES_AT_ONCE or consumer.in_flight or consumer.pending:
            continue
        start, stop = consumer.settled + 1, int(snapshot.state["last_seq"])
        found = [
            message.sequence
            for subject in consumer.filters
            async for message in read_range(connection, snapshot.queue, subject, start, stop)
        ]
        if len(found) == count:
            passed += found
            reconciliation.unnamed[name] = 0
            reconciliation.findings.append(passed_finding(snapshot.queue, name, sorted(found)))
    disputed = {*reconciliation.disputed, *(sequence for sequence in passed if sequence not in index)}
    reconciliation.disputed = array("Q", sorted(disputed))
    return passed


async def jobs_without_entry(
    connection: Connection,
    snapshot: QueueSnapshot,
    index: EntryIndex,
    reconciliation: Reconciliation,
    selection: Selection,
) -> array[int]:
    """Return in order the stream sequences of jobs without an entry that a selection may include.

    These are the orphans, and jobs that match no consumer where those are selected.
    """
    sequences = reconciliation.orphans[:]
    if selection.sequences is not None:
        # Whoever names a job knows that it isn't handled, and that no worker has it.
        sequences.extend(reconciliation.perhaps_handled)
        sequences.extend(reconciliation.disputed)
    if selection.selects_undeliverable:
        for subject in snapshot.unconsumed:
            async for message in read_range(connection, snapshot.queue, subject):
                if message.sequence not in index:
                    sequences.append(message.sequence)
    return array("Q", sorted(sequences))


async def _count_again(connection: Connection, snapshot: QueueSnapshot, unknown: Mapping[str, int]) -> dict[str, int]:
    """Count a second time: a job that was just acknowledged counts as dead until it is removed from the stream.

    :param unknown: by consumer how many jobs its numbers call dead although nothing says which these are
    :return: how many of them there are still, at most
    """
    later: Mapping[str, ConsumerState] = {}
    with suppress(NotFoundError):
        later = await count_consumers(connection, snapshot.queue)
    left: dict[str, int] = {}
    for name, count in unknown.items():
        before, after = snapshot.consumers[name].dead, later[name].dead if name in later else None
        left[name] = count if before is None or after is None else max(0, min(count, count + after - before))
    return left


def _add_bounds(reconciliation: Reconciliation, consumer: ConsumerState, most: int) -> None:
    """Count the dead jobs of a consumer that couldn't be counted.

    :param most: jobs that it had delivered, of which nothing is known and which are still stored
    """
    # A stalled consumer's open deliveries are counted by themselves.
    least = max(0, most - consumer.in_flight)
    reconciliation.uncertain += least
    if most > least and not consumer.stalled:
        text = (
            f"consumer {consumer.name} delivers jobs all the time, so its dead jobs can't be counted: besides those"
            f" found there are between {least} and {most}, of which {least} count as uncertain; count under a pause"
        )
        reconciliation.findings.append(Restriction("busy-consumer", text))


async def _count_disputed(
    connection: Connection, snapshot: QueueSnapshot, consumer: ConsumerState, with_entry: int
) -> int:
    """Count the jobs of an inconsistent consumer that are alive by its numbers and may be dead.

    Either the server forgot their deaths in a crash, or it keeps deliveries open whose jobs are gone, which no server
    before 2.12 ever ends: then as many jobs more are dead as there are such deliveries.

    :param with_entry: how many jobs have an entry that states their death
    """
    if consumer.dead is None or consumer.stalled:
        # Its open deliveries are counted by themselves.
        return 0
    if consumer.dead < 0:
        return min(consumer.in_flight, await _count_delivered(connection, snapshot, consumer))
    return min(consumer.in_flight, with_entry - consumer.dead)


def _restart_finding(queue: str, consumer: ConsumerState, count: int) -> Restriction:
    what = "another server led" if consumer.clustered else "the server restarted, as far as is known,"
    since = f"{consumer.up_since:%Y-%m-%dT%H:%M:%SZ}"
    return Restriction(
        "deaths-before-restart",
        f"{count} jobs of consumer {consumer.name} of {queue} died before {since}, when {what} and may have forgotten"
        f" that: while {consumer.in_flight} jobs are in flight, those that are still dead count as uncertain; look once"
        " nothing is in flight, or count under a pause",
    )


async def _count_delivered(connection: Connection, snapshot: QueueSnapshot, consumer: ConsumerState) -> int:
    """Count the stored jobs that a consumer had delivered and its numbers don't prove to be dead."""
    first, last = consumer.settled + 1, consumer.delivered
    if consumer.held_above is not None:
        last = min(last, consumer.held_above)
    if first > last:
        return 0
    await sleep(REMOVAL_DELAY)
    if _only_consumer(snapshot) is consumer:
        stored = await stored_sequences(connection, snapshot.queue)
        if stored.exact:
            return stored.count(first, last)
    count = 0
    for subject in consumer.filters:
        async for _ in read_range(connection, snapshot.queue, subject, first, last):
            count += 1
    return count


@dataclass(slots=True)
class KnownDeaths:
    """By consumer, how many jobs have an entry.

    :param jobs: that were dead when the consumer was counted
    :param above_settled: that were dead, which only their entry proves
    :param disbelieved: whose death a restart of the server may have undone
    """

    jobs: Counter[str] = field(default_factory=Counter)
    above_settled: Counter[str] = field(default_factory=Counter)
    disbelieved: Counter[str] = field(default_factory=Counter)


async def _count_known(
    connection: Connection, snapshot: QueueSnapshot, index: EntryIndex, audit: AuditLog | None
) -> KnownDeaths:
    """Count for each consumer the jobs that have an entry and were dead when the consumer was counted."""
    known = KnownDeaths()

    async def count(job: tuple[int, tuple[Entry, ...]], stored: Mapping[int, StoredMessage | None]) -> None:
        sequence, entries = job
        message = stored[sequence]
        consumer = snapshot.consumer_for(message.subject) if message else None
        if message is None or consumer is None or sequence > consumer.delivered:
            return
        if sequence > consumer.settled:
            since = valid_since(message, consumer, await audit.last_record(sequence) if audit else None)
            entries = believed_entries(snapshot, sequence, message, entries)
            deaths = [entry for entry in death_entries(entries) if since <= entry.recorded_at <= consumer.taken_at]
            if not any(consumer.believes(entry.recorded_at) for entry in deaths):
                known.disbelieved[consumer.name] += bool(deaths)
                return
            known.above_settled[consumer.name] += 1
        known.jobs[consumer.name] += 1

    only = _only_consumer(snapshot)
    stored = await stored_sequences(connection, snapshot.queue, snapshot.state) if only else None
    jobs = index.jobs()
    if only and stored and stored.exact:
        # The jobs of a consumer that takes every subject are known without reading them.
        for batch in _batches(index.sequences(only.settled), _SEQUENCES_AT_ONCE):
            known.jobs[only.name] += sum(sequence in stored for sequence in batch)
            await sleep(0)
        jobs = index.jobs(only.settled)
    for some in _batches(jobs, _batch_size(snapshot)):
        messages = await Streams(connection).get_many(snapshot.queue, [sequence for sequence, _ in some])
        await map_concurrently(partial(count, stored=messages), some)
    return known


def _only_consumer(snapshot: QueueSnapshot) -> ConsumerState | None:
    """Return the consumer whose filters match all that the queue stores, if there is one."""
    if len(snapshot.consumers) != 1 or snapshot.unconsumed:
        return None
    (consumer,) = snapshot.consumers.values()
    subjects = snapshot.config.get("subjects") or []
    return consumer if all(covered_by_any(consumer.filters, subject) for subject in subjects) else None


def _batch_size(snapshot: QueueSnapshot) -> int:
    """Return how many jobs to hold in memory at once: fewer where they are large."""
    average = snapshot.state["bytes"] / max(1, snapshot.state["messages"])
    return max(1, min(MAX_CONCURRENT, int(_MAX_BYTES_AT_ONCE / max(1.0, average))))


async def _find_orphans(
    connection: Connection, snapshot: QueueSnapshot, consumer: ConsumerState, index: EntryIndex
) -> list[int]:
    candidates: list[int] = []
    for subject in consumer.filters:
        candidates += [
            message.sequence
            async for message in read_range(connection, snapshot.queue, subject, stop=consumer.settled)
            if message.sequence not in index
        ]
    if not candidates:
        return []
    await sleep(REMOVAL_DELAY)

    async def is_stored(sequence: int) -> bool:
        return await get_message(connection, snapshot.queue, sequence) is not None

    orphans: list[int] = []
    for batch in _batches(candidates):
        still_stored = await map_concurrently(is_stored, batch)
        orphans += [sequence for sequence, stored in zip(batch, still_stored, strict=True) if stored]
    return orphans


def _batches(items: Iterable[_Item], size: int = 1_000) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
