"""The steps for the consumers of a queue's streams: what each is to be, in an order that the server accepts.

A job of a work queue has one consumer. Where a change of filters would give stored jobs another one, or none, the step
is blocked; with ``drain`` it waits until the jobs are done (:mod:`.drain`). Observed with nats-server 2.10 to 2.15:

- A consumer never delivers what it has passed, so a filter that it gains finds none of the jobs stored before.
- A consumer that is created begins with the first stored job, and delivers what others have in flight, too.
- The server refuses to create a consumer whose filter overlaps with another's (error 10100), and one without a filter
  beside others (10099). An update is checked for the first only: a consumer that loses its filters silently gets the
  jobs of all others too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, covers, overlaps
from airflow_provider_jetstream.jetstream.contract import DRAINED, PARTITIONS, handed_over_subject
from airflow_provider_jetstream.jetstream.provisioning.plan import Drain, Step, consumer_step, job_count, listed
from airflow_provider_jetstream.jetstream.publishing.schedules import scheduled_subjects
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.declaration import mover_consumer
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import consumer_differences, merged_consumer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer, DeadLetterQueue
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

MULTIPLE_UNFILTERED = 10099
NOT_UNIQUE = 10100

_UNFILTERED = (">",)


async def existing_consumers(connection: Connection, stream: str) -> dict[str, dict[str, Any]]:
    """Return the server's configurations of a stream's consumers by name."""
    # Older servers leave the name out of the configuration of a consumer that was created with a durable name only.
    consumers = (await list_consumers(connection, stream)).items()
    return {name: {"name": name, **info["config"]} for name, info in consumers}


async def dead_letter_consumer_steps(
    connection: Connection, stream: DeadLetterQueue, existing: Mapping[str, Any] | None
) -> list[Step]:
    """Return the steps for the declared consumers of a dead letter queue.

    :param existing: the server's configuration of the stream, if it has it
    """
    if not stream.consumers:
        return []
    configs = await existing_consumers(connection, stream.name) if existing else {}
    steps = [consumer_step(stream.name, configs.get(consumer.name), consumer.config()) for consumer in stream.consumers]
    # With another retention, consumers share messages.
    return _in_accepted_order(steps, configs) if (existing or stream.config())["retention"] == "workqueue" else steps


async def mover_steps(
    connection: Connection, queue: str, stream: str, existing: Mapping[str, Any] | None
) -> list[Step]:
    """Return the step for the consumer by which movers take jobs that are due.

    :param stream: the queue's stream of schedules
    :param existing: the server's configuration of the stream, if it has it
    """
    configs = await existing_consumers(connection, stream) if existing else {}
    declared = mover_consumer(queue)
    return [consumer_step(stream, configs.get(declared.name), declared.config())]


async def work_queue_consumer_steps(
    connection: Connection,
    queue: WorkQueue,
    declared: Mapping[str, dict[str, Any]],
    configs: Mapping[str, dict[str, Any]],
    stored: tuple[str, ...],
    *,
    drain: bool,
) -> list[Step]:
    """Return the steps for the consumers of a work queue, and for undeclared ones that are in the way.

    :param declared: the declared configurations by name
    :param configs: the server's configurations by name
    :param stored: the subjects that the stream stores
    :param drain: whether to wait for the jobs that a change would give another consumer
    """
    changes = _Changes(queue, declared, configs)
    await changes.count(connection)
    steps = [changes.declared_step(name, config, stored, drain=drain) for name, config in declared.items()]
    steps += [step for name in changes.undeclared if (step := changes.undeclared_step(name, drain=drain))]
    # What an interrupted drain has taken from a consumer may be in flight there: nobody else gets it before.
    return _in_accepted_order(sorted(steps, key=lambda step: step.drain is None), configs)


class _Changes:
    """How the filters of a work queue's consumers change, and which stored jobs that concerns.

    :ivar undeclared: the names of consumers that aren't declared
    """

    def __init__(
        self, queue: WorkQueue, declared: Mapping[str, dict[str, Any]], configs: Mapping[str, dict[str, Any]]
    ) -> None:
        self._queue = queue
        self._existing = {name: without_mark(config) for name, config in configs.items()}
        # The filters that an interrupted drain has taken from consumers.
        self._interrupted = {name: filters for name, config in configs.items() if (filters := given_up(config))}
        self._before = {name: filter_subjects(config) for name, config in configs.items()}
        self._targets = {name: filter_subjects(config) for name, config in declared.items()}
        self.undeclared = [name for name in configs if name not in declared]
        taken = [subject for target in self._targets.values() for subject in target]
        self._after = self._targets | {
            name: tuple(
                subject
                for subject in self._before[name]
                if not _overlap_any(subject, taken) and subject != handed_over_subject(queue.name, name)
            )
            for name in self.undeclared
        }
        self._changed = {name for name, filters in self._before.items() if sorted(filters) != sorted(self._after[name])}
        self._resized = {name: resize for resize in _resizes(queue, self._existing) for name in resize.consumers}
        self._scheduled: Counter[str] = Counter()
        # By consumer: the jobs that others get, that nobody gets, that it would miss, and that are in its partition.
        self._handed: dict[str, Counter[str]] = {}
        self._lost: dict[str, Counter[str]] = {}
        self._missed: dict[str, Counter[str]] = {}
        self._divided: dict[str, int] = {}

    async def count(self, connection: Connection) -> None:
        """Count the stored and scheduled jobs that the changes concern."""
        jobs: Counter[str] = Counter()
        filters = {subject for name in self._changed for subject in (*self._before[name], *self._after[name])}
        for one in filters:
            jobs |= await _stored(connection, self._queue.name, [one])
        if self._changed:
            self._scheduled = await scheduled_subjects(connection, self._queue.name)
        for subject, count in jobs.items():
            old, new = _owner(self._before, subject), _owner(self._after, subject)
            if old and new is None:
                self._lost.setdefault(old, Counter())[subject] = count
            elif old is None and new in self._before:
                self._missed.setdefault(str(new), Counter())[subject] = count
            elif old and old != new and new not in self._before.keys() - self._changed:
                self._handed.setdefault(old, Counter())[subject] = count
        for name in self._resized:
            self._divided[name] = (await _stored(connection, self._queue.name, self._before[name])).total()

    def declared_step(self, name: str, config: dict[str, Any], stored: tuple[str, ...], *, drain: bool) -> Step:
        """Return the step of a declared consumer."""
        step = consumer_step(self._queue.name, self._existing.get(name), config, stored)
        own, missed = self._before.get(name), self._missed.get(name)
        if own is None:
            return step
        blocked = [self._missed_text(name, missed)] if missed else []
        lost = self._without_consumer(own, Counter() if drain else self._lost.get(name, Counter()))
        blocked += [lost] if lost else []
        if name in self._interrupted or self._handed.get(name) or (drain and self._lost.get(name)):
            return self._drained(name, step, blocked, drain=drain)
        return self._resize(name, replace(step, blocked=(*step.blocked, *blocked)), drain=drain)

    def undeclared_step(self, name: str, *, drain: bool) -> Step | None:
        """Return the step of an undeclared consumer that is in the way; ``None`` where it isn't."""
        existing, label = self._existing[name], f"{self._queue.name}/{name}"
        step = Step("consumer", label, "keep", dict(existing))
        if name not in self._changed:
            step = self._resize(name, step, drain=drain)
            return step if step.drain or step.blocked else None
        if kept := self._after[name]:
            fields = filter_fields(kept)
            differences = consumer_differences(existing, fields)
            step = Step("consumer", label, "update", merged_consumer(existing, fields), differences)
        else:
            unused = filter_fields((handed_over_subject(self._queue.name, name),))
            step = Step("consumer", label, "remove", merged_consumer(existing, unused))
        lost = self._without_consumer(self._before[name], Counter())
        return self._drained(name, step, [lost] if lost else [], drain=drain)

    def _drained(self, name: str, step: Step, blocked: list[str], *, drain: bool) -> Step:
        """Return the step of a consumer whose jobs have to be done first."""
        own = (*self._interrupted.get(name, ()), *self._before[name])
        receivers = [
            other
            for other, target in self._targets.items()
            if other != name and any(_overlap_any(subject, own) for subject in target)
        ]
        handed, lost = (found.get(name, Counter()).total() for found in (self._handed, self._lost))
        if not drain:
            blocked.insert(0, self._drain_needed(name, receivers, handed + lost))
            return Step("consumer", step.name, "keep", dict(self._existing[name]), (), (*step.blocked, *blocked))
        blocked += [
            f"{receiver} exists, and the server never delivers what a consumer has passed: declare a consumer of"
            " another name for the subjects that it is to get"
            for receiver in receivers
            if receiver in self._changed
        ]
        created = [subject for receiver in receivers for subject in self._targets[receiver]]
        waited = Drain(self._queue, handed + lost, tuple(receivers), tuple(_common(own, created)))
        action = "update" if step.action == "keep" else step.action
        return replace(step, action=action, blocked=(*step.blocked, *blocked), drain=waited)

    def _resize(self, name: str, step: Step, *, drain: bool) -> Step:
        """Return the step for a consumer that may be a partition.

        With another number keys have other partitions: the stored jobs of a key and its new ones would have different
        consumers. With a smaller one the last partitions have no workers.
        """
        resize = self._resized.get(name)
        if resize is None or not (resize.number or name in resize.surplus):
            return step
        jobs, others = self._divided[name], sum(self._divided[other] for other in resize.consumers)
        if drain:
            filters = self._before[name]
            return replace(step, drain=Drain(self._queue, jobs, (), filters)) if jobs else step
        blocked = []
        if resize.number and name == resize.consumers[0] and others:
            blocked.append(
                f"{resize.base_name} would go from {resize.number} to {resize.declared} partitions while"
                f" {_are(others)} stored in them, and the later jobs of a key would have another consumer than those;"
                f" {_HOW}; or declare a consumer of another name on other subjects, publish there, and let this one run"
                " out"
            )
        if name in resize.surplus and jobs:
            blocked.append(
                f"{resize.base_name} is declared with {resize.declared} partitions, and {_are(jobs)} stored in this"
                " surplus one, from which no worker of this declaration pulls; run a worker with the earlier"
                " declaration until they are done"
            )
        return replace(step, blocked=(*step.blocked, *blocked))

    def _drain_needed(self, name: str, receivers: Sequence[str], jobs: int) -> str:
        if name in self._interrupted or not receivers:
            return "a drain of its jobs was interrupted: provision with drain=True (apply --drain) to go on"
        unfiltered = any(self._targets[receiver] == _UNFILTERED for receiver in receivers)
        code = MULTIPLE_UNFILTERED if unfiltered else NOT_UNIQUE
        return (
            f"{_filter_text(self._before[name])} overlaps with those declared for {listed(receivers)}, and the server"
            f" gives a job one consumer (error {code}), while {_are(jobs)} stored for {name}: {_HOW}; or declare {name}"
            " with filters that don't overlap"
        )

    def _without_consumer(self, own: Iterable[str], lost: Counter[str]) -> str:
        """Return why no consumer would take jobs of a consumer's subjects; empty where each has one.

        :param own: its filters
        :param lost: the stored jobs that none would take
        """
        scheduled = {
            subject: count
            for subject, count in self._scheduled.items()
            if covered_by_any(own, subject) and not _owner(self._after, subject)
        }
        jobs = lost + Counter(scheduled)
        if not jobs:
            return ""
        return (
            f"{job_count(jobs.total())} on {listed(list(jobs))} would have no consumer: keep that filter until they are"
            " done, or declare a consumer for them"
        )

    def _missed_text(self, name: str, jobs: Counter[str]) -> str:
        return (
            f"{job_count(jobs.total())} on {listed(list(jobs))} would never be delivered: {name} has passed what it had"
            " no filter for; declare a consumer of another name for these subjects"
        )


_HOW = (
    "stop publishing, let workers finish and redrive or park its dead letters, then provision again; or provision with"
    " drain=True (apply --drain), which waits for that and parks what is dead"
)


class _Resize:
    """A change of the number of partitions, or consumers that an earlier one has left.

    :ivar consumers: the consumers that exist, the declared ones first
    :ivar surplus: the consumers beyond the declared number
    :ivar number: the number of before; 0 where it is the same
    """

    def __init__(
        self, base_name: str, partitions: Sequence[Consumer], existing: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.base_name, self.declared = base_name, len(partitions)
        self.surplus = [name for name in existing if _is_surplus(name, existing[name], base_name, partitions)]
        provisioned = [consumer.name for consumer in partitions if consumer.name in existing]
        self.consumers = [*provisioned, *self.surplus]
        # Those made by hand have no number in their metadata.
        recorded = [(existing[name].get("metadata") or {}).get(PARTITIONS) for name in provisioned]
        counts = {int(count) for count in recorded if count and count.isdecimal()} or {len(self.consumers)}
        self.number = max(counts - {len(partitions)}, default=0) if provisioned else 0


def _resizes(queue: WorkQueue, existing: Mapping[str, Mapping[str, Any]]) -> Iterator[_Resize]:
    declared: dict[str, list[Consumer]] = {}
    for consumer in queue.consumers:
        if consumer.partition is not None:
            declared.setdefault(consumer.base_name, []).append(consumer)
    for base_name, partitions in declared.items():
        yield _Resize(base_name, partitions, existing)


def _is_surplus(name: str, config: Mapping[str, Any], base_name: str, partitions: Sequence[Consumer]) -> bool:
    """Return whether a consumer is a partition of an earlier, larger number of them."""
    number = name.removeprefix(f"{base_name}-")
    if name == number or not number.isdecimal() or int(number) < len(partitions):
        return False
    return all(
        any(_differ_by_number(declared, existing, number) for declared in partitions[0].filter_subjects)
        for existing in filter_subjects(config)
    )


def _differ_by_number(first: str, other: str, number: str) -> bool:
    first_tokens, other_tokens = first.split("."), other.split(".")
    different = [pair for pair in zip(first_tokens, other_tokens, strict=False) if pair[0] != pair[1]]
    return len(first_tokens) == len(other_tokens) and different == [("0", number)]


def given_up(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the filters that a drain has taken from a consumer, if it hasn't ended."""
    return tuple((config.get("metadata") or {}).get(DRAINED, "").split())


def without_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a consumer's configuration without the mark of a drain."""
    metadata = config.get("metadata") or {}
    if DRAINED not in metadata:
        return dict(config)
    return {**config, "metadata": {key: text for key, text in metadata.items() if key != DRAINED}}


def filter_fields(filters: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a consumer's configuration for filters; a single one has a field of its own."""
    return {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": list(filters)}


def _in_accepted_order(steps: Sequence[Step], existing: Mapping[str, Mapping[str, Any]]) -> list[Step]:
    """Order steps as the server accepts them, and block a step that it would refuse in any order.

    :param steps: the steps for consumers of one stream; where there is a choice, their order is kept
    :param existing: the server's configurations of the stream's consumers by name
    """
    current = {name: filter_subjects(config) for name, config in existing.items()}
    ordered: list[Step] = []
    waiting = list(steps)
    while waiting:
        step = next((step for step in waiting if not _conflict(step, current)), waiting[0])
        waiting.remove(step)
        if conflict := _conflict(step, current):
            step = replace(step, blocked=(*step.blocked, conflict))
        if step.action == "remove" or step.blocked:
            # An obstacle to a blocked step isn't reported again for other steps.
            current.pop(step.consumer, None)
        elif step.action != "keep":
            current[step.consumer] = filter_subjects(step.config)
        ordered.append(step)
    return ordered


def _conflict(step: Step, current: Mapping[str, Sequence[str]]) -> str:
    """Return why a step isn't possible beside the other consumers as they are; empty where it is."""
    name, target = step.consumer, filter_subjects(step.config)
    if step.action in ("keep", "remove") or sorted(current.get(name, ())) == sorted(target):
        return ""
    others = {other: filters for other, filters in current.items() if other != name}
    if target == _UNFILTERED and others:
        return (
            f"it has no filter and would get the jobs of {listed(list(others))} too (error {MULTIPLE_UNFILTERED}): give"
            " it one, or remove the others by hand once they have no jobs"
        )
    for other, filters in others.items():
        if any(_overlap_any(subject, filters) for subject in target):
            return (
                f"{_filter_text(target)} overlaps with {listed(filters)} of consumer {other} (error {NOT_UNIQUE}): make"
                " them disjoint; consumers that exchange subjects need two provisionings, or other names"
            )
    return ""


async def _stored(connection: Connection, stream: str, filters: Iterable[str]) -> Counter[str]:
    """Return the subjects of the stored jobs that filters match, with their numbers."""
    return Counter({name: count for one in filters async for name, count in subject_counts(connection, stream, one)})


def _owner(table: Mapping[str, Sequence[str]], subject: str) -> str | None:
    return next((name for name, filters in table.items() if covered_by_any(filters, subject)), None)


def _common(own: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Yield filters that match whatever matches both of two lists, and little more."""
    for left in dict.fromkeys(own):
        for right in dict.fromkeys(others):
            if overlaps(left, right):
                yield right if covers(left, right) else left


def _overlap_any(subject: str, filters: Iterable[str]) -> bool:
    return any(overlaps(subject, other) for other in filters)


def _filter_text(filters: Sequence[str]) -> str:
    return f"its filter {listed(filters)}"


def _are(count: int) -> str:
    return "1 job is" if count == 1 else f"{count} jobs are"
