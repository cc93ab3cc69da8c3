"""Diagnoses a queue's dead letters: what they died of, whether that is still so, and what to do about it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Completion
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.client.streams import read_bulk
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import JOB_RELEASE, completion_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    # Reason, consumer, the error's class, and the digest of the place in the code or else of the error's text.
    CauseKey: TypeAlias = tuple[Reason, str | None, str | None, str, str]

MOST_EVENTS = 4_000
_LEAST_EVENTS = 100
# Results of handlers may be as large as messages may be.
_MOST_BYTES = 32 * 2**20
_EVENTS_AT_ONCE = 256


@dataclass(slots=True)
class RecentCompletions:
    """When each consumer completed jobs, since a moment.

    :param since: from when on the completions are known
    """

    since: datetime
    _times: dict[str, array[float]] = field(default_factory=dict)

    def add(self, consumer: str, at: datetime) -> None:
        """Add a completion, not earlier than those before."""
        self._times.setdefault(consumer, array("d")).append(at.timestamp())

    def count(self, consumer: str, start: datetime, stop: datetime | None = None) -> int:
        """Count a consumer's completions later than ``start``, and not later than ``stop``."""
        times = self._times.get(consumer, array("d"))
        end = len(times) if stop is None else bisect_right(times, stop.timestamp())
        return max(0, end - bisect_right(times, start.timestamp()))

    def within(self, consumer: str, start: datetime, stop: datetime) -> int:
        """Count a consumer's completions from ``start`` to ``stop``, both included."""
        times = self._times.get(consumer, array("d"))
        return max(0, bisect_right(times, stop.timestamp()) - bisect_left(times, start.timestamp()))


async def read_recent_completions(connection: Connection, queue: str, info: Mapping[str, Any]) -> RecentCompletions:
    """Read the last 4,000 events of a queue at most; fewer where they are large.

    :param info: the server's STREAM.INFO of the queue's events stream
    """
    state = info["state"]
    average = max(1, int(state["bytes"]) // max(1, int(state["messages"])))
    most = min(MOST_EVENTS, max(_LEAST_EVENTS, _MOST_BYTES // average))
    start = max(1, int(state["first_seq"]), int(state["last_seq"]) - most + 1)
    filters = completion_filter(queue).removesuffix(">"), ack_metric_filter(queue).removesuffix("*")
    is_whole = start == 1 or not state["messages"]
    recent = RecentCompletions(datetime.fromisoformat(info["created"])) if is_whole else None
    # A worker may store a completion, and the server report the same job's acknowledgement.
    seen: set[tuple[str, int]] = set()
    count = 0
    async for message in read_bulk(connection, info, start):
        recent = recent or RecentCompletions(message.stored_at)
        end = _completed(message, queue, connection.domain) if message.subject.startswith(filters) else None
        if end and end not in seen:
            seen.add(end)
            recent.add(end[0], message.stored_at)
        count += 1
        if count % _EVENTS_AT_ONCE == 0:
            await sleep(0)
    return recent or RecentCompletions(datetime.fromisoformat(info["ts"]))


def _completed(message: StoredMessage, queue: str, domain: str) -> tuple[str, int] | None:
    """Return consumer and stream sequence of a completed job; ``None`` for an end of another kind."""
    event = event_of(message, queue, domain)
    return (event.consumer, event.stream_seq) if isinstance(event, AckMetric | Completion) else None


_LATELY = timedelta(minutes=10)
_LONGEST_GAP = timedelta(days=1)
_GAPS = 10
_LEAST_COMPLETIONS = 10
_IMPROBABLE = 0.01
_MOST_DIED_AGAIN = 0.5
_CANARY = 10


class Cause(StrEnum):
    """Whether what killed the letters would kill them again."""

    STILL_FAILING = "still failing"
    """A letter died of it lately, and too little has been completed since."""
    NOT_SEEN_SINCE = "not seen since"
    """So much has been completed since that the cause is probably gone."""
    UNKNOWN = "unknown"
    """Nothing has been tried since."""


class Action(StrEnum):
    """What to do next."""

    NOTHING = "nothing"
    """There are no dead letters."""
    WAIT = "wait"
    """Don't redrive: the letters would die again."""
    TRY_A_FEW = "try_a_few"
    """Redrive a few, then the others if none dies again."""
    REPAIR = "repair"
    """As they are, the jobs can't be done: repair or park them."""
    START_WORKERS = "start_workers"
    """Nobody would run the redriven jobs."""
    ADD_CONSUMER = "add_consumer"
    """No consumer takes the jobs."""


@dataclass(frozen=True, slots=True)
class ConsumerActivity:
    """What a consumer does at the moment.

    :param pending: jobs that it has yet to deliver for the first time
    :param in_flight: deliveries that haven't ended
    :param pulls: open pull requests of workers
    :param paused: whether it is paused
    """

    pending: int
    in_flight: int
    pulls: int
    paused: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ConsumerActivity:
        """Read it from the server's CONSUMER.INFO."""
        return cls(info["num_pending"], info["num_ack_pending"], info["num_waiting"], bool(info.get("paused")))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do about the letters of one cause.

    :param text: what to do, in a sentence
    :param evidence: what speaks for it, a sentence each
    :param completed_since: how many jobs the same consumer has completed since the last of the letters died; ``None``
        where nothing records that
    """

    action: Action
    cause: Cause
    text: str
    evidence: tuple[str, ...]
    completed_since: int | None


def recommend(
    group: CauseGroup, completions: RecentCompletions | None, activity: ConsumerActivity | None, now: datetime
) -> Recommendation:
    """Decide what to do about a group.

    :param completions: what the queue's consumers have completed lately, where that is recorded
    :param activity: of the group's consumer, where it exists
    :param now: by the server's clock
    """
    since = during = None
    if completions and group.consumer:
        since = completions.count(group.consumer, group.last)
        during = _completed_during(group, completions, now)
    cause = _cause(group, since, during, now)
    action, text = _action(group, cause, activity)
    evidence = tuple(_evidence(group, activity, since, during, now))
    return Recommendation(action, cause, text, evidence, since)


def _completed_during(group: CauseGroup, completions: RecentCompletions, now: datetime) -> int:
    """Return how many jobs the consumer completed while the letters died; what isn't stored any more is estimated."""
    consumer = group.consumer or ""
    known = completions.within(consumer, max(group.first, completions.since), group.last)
    if completions.since <= group.first:
        return known
    unknown = min(completions.since, group.last) - group.first
    seconds = (now - completions.since).total_seconds()
    rate = completions.within(consumer, completions.since, now) / seconds if seconds > 0 else 0.0
    return known + round(rate * unknown.total_seconds())


def _cause(group: CauseGroup, since: int | None, during: int | None, now: datetime) -> Cause:
    if since is not None and during is not None and since >= _LEAST_COMPLETIONS:
        share = group.count / (group.count + during)
        if (1 - share) ** since <= _IMPROBABLE:
            return Cause.NOT_SEEN_SINCE
    gap = (group.last - group.first) / max(1, group.count - 1)
    if now - group.last <= max(_LATELY, min(_GAPS * gap, _LONGEST_GAP)):
        return Cause.STILL_FAILING
    return Cause.UNKNOWN


def _action(group: CauseGroup, cause: Cause, activity: ConsumerActivity | None) -> tuple[Action, str]:
    return _obstacle(group, activity) or _advice(group, cause, activity)


def _obstacle(group: CauseGroup, activity: ConsumerActivity | None) -> tuple[Action, str] | None:
    """Return what keeps the jobs from being delivered, whatever they died of."""
    consumer = group.consumer
    if group.reason == Reason.UNDELIVERABLE:
        return Action.ADD_CONSUMER, "declare a consumer for their subjects: then they are delivered without a redrive"
    if consumer and activity is None:
        advice = "provision the queue again, parking its dead letters first (--park-dead), then"
        return Action.ADD_CONSUMER, f"consumer {consumer} is gone: {advice} {_canary(group)}"
    if activity and activity.paused:
        return Action.START_WORKERS, f"consumer {consumer} is paused: resume it, then {_canary(group)}"
    return None


def _advice(group: CauseGroup, cause: Cause, activity: ConsumerActivity | None) -> tuple[Action, str]:
    is_idle = activity is not None and not activity.pulls and not activity.in_flight
    is_given_up = group.reason == Reason.TERMINATED and cause == Cause.UNKNOWN
    if cause == Cause.STILL_FAILING:
        return Action.WAIT, f"don't redrive yet: mend the cause, then {_canary(group)}"
    if group.redriven >= group.count * _MOST_DIED_AGAIN:
        return Action.REPAIR, "a redrive didn't help before: repair them, or park them"
    if group.reason == Reason.EXPIRED:
        return Action.REPAIR, "their time is over, and would be after a redrive: repair them, or park them"
    if is_idle:
        text = f"no worker pulls from consumer {group.consumer}: start one, then {_canary(group)}"
        return Action.START_WORKERS, text
    if is_given_up:
        text = f"a worker gave them up for good: mend the handler or repair them, then {_canary(group)}"
        return Action.REPAIR, text
    tried = _canary(group) + (", then the others if none dies again" if group.count > 1 else "")
    return Action.TRY_A_FEW, tried if cause == Cause.NOT_SEEN_SINCE else f"nothing has been tried since: {tried}"


def _canary(group: CauseGroup) -> str:
    if group.count == 1:
        return "redrive it"
    return f"redrive {_CANARY if group.count > _CANARY else 1} of them first"


def _evidence(
    group: CauseGroup, activity: ConsumerActivity | None, since: int | None, during: int | None, now: datetime
) -> Iterator[str]:
    yield f"the last one died {_span(now - group.last)} ago, the first {_span(now - group.first)} ago"
    if group.redriven:
        yield f"{group.redriven} of {group.count} were redriven before and died again"
    if since is None and group.consumer:
        yield f"what consumer {group.consumer} completes isn't recorded: the queue has no events"
    elif since is not None:
        # Nothing lies between the first and the last death of one letter.
        meanwhile = f", and about {during} while they died" if group.first < group.last else ""
        yield f"consumer {group.consumer} completed {since} jobs since the last one died{meanwhile}"
        if during and during > group.count:
            yield "most of its jobs are completed, so the cause concerns these jobs rather than all"
    if activity:
        state = "is paused, " if activity.paused else ""
        yield (
            f"consumer {group.consumer} {state}has {activity.pulls} open pull requests of workers,"
            f" {activity.in_flight} jobs in flight and {activity.pending} pending"
        )


def _span(span: timedelta) -> str:
    seconds = max(0, round(span.total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


_T = TypeVar("_T", bound="Hashable")

_MOST_VALUES = 128


class FrequentValues(Generic[_T]):
    """Values with their numbers; of more than 128 different ones the rarer half is only counted together.

    The count of a value that was dropped and came again is too low; ``left_out`` counts what is missing.
    """

    __slots__ = ("_counts", "left_out")

    def __init__(self) -> None:
        self._counts: Counter[_T] = Counter()
        self.left_out = 0

    def add(self, value: _T) -> None:
        """Count a value."""
        self._counts[value] += 1
        if len(self._counts) > _MOST_VALUES:
            ranked = self._counts.most_common()
            self._counts = Counter(dict(ranked[: _MOST_VALUES // 2]))
            self.left_out += sum(count for _, count in ranked[_MOST_VALUES // 2 :])

    def largest(self, limit: int) -> tuple[list[tuple[_T, int]], int]:
        """Return the most frequent values, and how many were counted that aren't among them."""
        ranked = self._counts.most_common()
        return ranked[:limit], self.left_out + sum(count for _, count in ranked[limit:])


# A group of more than a 500th of all letters is found, however many groups of one letter there are.
_MOST_GROUPS = 1_000


def shown_text(text: str | None) -> str | None:
    """Return any text as one line of at most 200 characters, without control characters and invalid UTF-8."""
    line = one_line(readable_text(text)) if text else None
    return line[:SHOWN_VALUE] if line else None


@dataclass(slots=True)
class CauseGroup:
    """Letters of one cause.

    :param reason: why they died
    :param consumer: the consumer that delivered them
    :param select: the fields of a selection of just these letters
    :param first: when the first of them died
    :param last: when the last of them died
    :param example: the letter of the lowest stream sequence
    :param redriven: how many of them were redriven before, and died again
    :param subjects: their subjects
    :param tasks: DAG and task that published them
    :param releases: the releases that their jobs name in the header ``Job-Release``
    """

    reason: Reason
    consumer: str | None
    select: dict[str, object]
    first: datetime
    last: datetime
    example: int
    error_class: str | None
    error_message: str | None
    error_place: str | None
    count: int = 0
    redriven: int = 0
    subjects: FrequentValues[str] = field(default_factory=FrequentValues)
    tasks: FrequentValues[tuple[str, str]] = field(default_factory=FrequentValues)
    releases: FrequentValues[str] = field(default_factory=FrequentValues)

    @property
    def place(self) -> str:
        """Where and of what the letters died, in a few words."""
        what = self.error_class or self.error_message or str(self.reason)
        return f"{what} in {self.error_place}" if self.error_place else what

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        died_at = letter.death.died_at
        self.count += 1
        self.redriven += letter.redrives > 0
        self.first, self.last = min(self.first, died_at), max(self.last, died_at)
        self.subjects.add(shown_text(letter.subject) or "")
        if letter.origin:
            self.tasks.add((shown_text(letter.origin.dag_id) or "", shown_text(letter.origin.task_id) or ""))
        if release := shown_text(first(letter.headers, JOB_RELEASE)):
            self.releases.add(release)


class CauseGroups:
    """All letters by cause; groups of the fewest letters are given up where there are too many."""

    def __init__(self) -> None:
        self.letters = 0
        self.left_out = 0
        self._groups: dict[CauseKey, CauseGroup] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        key = _key(letter)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _group(letter, key)
        group.add(letter)
        self.letters += 1
        if len(self._groups) > _MOST_GROUPS:
            ranked = sorted(self._groups.items(), key=lambda item: -item[1].count)
            self._groups = dict(ranked[: _MOST_GROUPS // 2])
            self.left_out += sum(group.count for _, group in ranked[_MOST_GROUPS // 2 :])

    def largest(self) -> list[CauseGroup]:
        """Return the groups in descending order of their size, groups of one size by their first sequence."""
        return sorted(self._groups.values(), key=lambda group: (-group.count, group.example))


def _key(letter: DeadLetter) -> CauseKey:
    death = letter.death
    if death.traceback_digest:
        return (death.reason, death.consumer, death.error_class, "traceback_digest", death.traceback_digest)
    return (death.reason, death.consumer, death.error_class, "fingerprint", death.fingerprint)


def _group(letter: DeadLetter, key: CauseKey) -> CauseGroup:
    death = letter.death
    reason, consumer, error_class, digest_field, digest = key
    select: dict[str, object] = {"reasons": [reason.value], "consumer": consumer, "error_class": error_class}
    return CauseGroup(
        reason,
        consumer,
        {name: value for name, value in {**select, digest_field: digest}.items() if value is not None},
        death.died_at,
        death.died_at,
        letter.sequence,
        shown_text(error_class),
        shown_text(death.error_message or death.explanation),
        shown_text(death.error_place),
    )


_MOST_REPORTED = 10
_VALUES = 5
_ONE_PLACE = 0.8


@dataclass(frozen=True, slots=True)
class DiagnosedGroup:
    """Dead letters of one cause, and what to do about them.

    :param share: their share of all the letters that were selected, from 0 to 1
    """

    letters: CauseGroup
    share: float
    recommendation: Recommendation

    def __str__(self) -> str:
        letters, advice = self.letters, self.recommendation
        began = f"began {letters.first:%Y-%m-%d %H:%M} UTC"
        return f"{letters.place}, {self.share:.0%}, {began}, {advice.cause}: {advice.text}"

    def as_json(self) -> dict[str, Any]:
        """Return the group for an XCom, the page or a script; of its values the most frequent five of each kind."""
        letters, advice = self.letters, self.recommendation
        subjects, subjects_left_out = letters.subjects.largest(_VALUES)
        tasks, tasks_left_out = letters.tasks.largest(_VALUES)
        releases, releases_left_out = letters.releases.largest(_VALUES)
        return {
            "count": letters.count,
            "share": round(self.share, 4),
            "first": letters.first.isoformat(),
            "last": letters.last.isoformat(),
            "reason": letters.reason.value,
            "consumer": letters.consumer,
            "error_class": letters.error_class,
            "error_message": letters.error_message,
            "error_place": letters.error_place,
            "example": letters.example,
            "select": dict(letters.select),
            "redriven": letters.redriven,
            "subjects": [{"subject": subject, "count": count} for subject, count in subjects],
            "subjects_left_out": subjects_left_out,
            "tasks": [{"dag_id": dag_id, "task_id": task_id, "count": count} for (dag_id, task_id), count in tasks],
            "tasks_left_out": tasks_left_out,
            "releases": [{"release": release, "count": count} for release, count in releases],
            "releases_left_out": releases_left_out,
            "cause": advice.cause.value,
            "action": advice.action.value,
            "advice": advice.text,
            "evidence": list(advice.evidence),
            "completed_since": advice.completed_since,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis(TaskReport):
    """What a queue's dead letters died of.

    :param queue: the queue's name
    :param at: when this was so, by the server's clock
    :param dead: how many dead letters were selected
    :param uncertain: how many more jobs may be dead: letters that can't be identified yet
    :param groups: the letters by cause, the largest group first
    :param left_out: letters of causes that aren't among the groups, since there were too many causes
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    """

    queue: str
    at: datetime
    dead: int
    uncertain: int
    groups: tuple[DiagnosedGroup, ...]
    left_out: int
    risks: tuple[Finding, ...] = ()

    @property
    def action(self) -> Action:
        """What to do about the largest group."""
        return self.groups[0].recommendation.action if self.groups else Action.NOTHING

    @property
    def headline(self) -> str:
        """The diagnosis in one line, for a notification."""
        if not self.groups:
            unknown = f" are proved: {self.uncertain} jobs may be dead" if self.uncertain else ""
            return f"{self.queue}: no dead letters{unknown}"
        largest = self.groups[0]
        causes = "one cause" if largest.share >= _ONE_PLACE else f"the largest of {len(self.groups)} causes"
        if largest.letters.error_place:
            causes = causes.replace("cause", "place")
        return f"{self.queue}: {self.dead} dead letters, {causes}: {largest}"

    @property
    def text(self) -> str:
        """The diagnosis in some lines for people: what broke, an example of its error, what to do, and the evidence."""
        lines = [self.headline]
        for group in self.groups[:_VALUES]:
            lines += [f"- {group.letters.count} letters: {group}"]
            if error := group.letters.error_message:
                lines += [f"  - for example: {error}"]
            lines += [f"  - {evidence}" for evidence in group.recommendation.evidence]
        if others := self.dead - sum(group.letters.count for group in self.groups[:_VALUES]):
            lines.append(f"- {others} letters of other causes")
        if self.uncertain and self.groups:
            lines.append(f"- {self.uncertain} more jobs may be dead")
        lines += [f"- risk: {risk}" for risk in self.risks]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def as_json(self, groups: int = _MOST_REPORTED) -> dict[str, Any]:
        """Return the diagnosis for an XCom, the page or a script.

        :param groups: how many of the largest groups it has
        """
        reported = self.groups[:groups]
        return {
            "queue": self.queue,
            "at": self.at.isoformat(),
            "dead": self.dead,
            "uncertain": self.uncertain,
            "action": self.action.value,
            "headline": self.headline,
            "text": self.text,
            "risks": [str(risk) for risk in self.risks],
            "groups": [group.as_json() for group in reported],
            "letters_left_out": self.dead - sum(group.letters.count for group in reported),
        }


async def diagnose_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    selection: Selection | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Find out what a queue's dead letters died of, whether that is still so, and what to do about it.

    It changes nothing and holds no letter in memory.

    :param selection: which dead letters; all in circulation where absent
    :param on_progress: called now and then with the number of letters that were read
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises UnsuitableQueueError: its dead letters can't be told from other jobs
    """
    selection = selection or Selection()
    scan = await Scan.begin(connection, queue, unaccounted=selection.unaccounted)
    groups = CauseGroups()
    async for page in scan.pages(selection):
        for letter in page.letters:
            groups.add(letter)
        if on_progress:
            on_progress(groups.letters)
    snapshot, completions = scan.snapshot, None
    if groups.letters and (events := scan.context.events):
        completions = await read_recent_completions(connection, queue.name, snapshot.companions[events])
    activities = {
        name: ConsumerActivity.of(info) for name, info in (await list_consumers(connection, queue.name)).items()
    }
    diagnosed = tuple(
        DiagnosedGroup(
            group,
            group.count / groups.letters,
            recommend(group, completions, activities.get(group.consumer or ""), snapshot.taken_at),
        )
        for group in groups.largest()
    )
    return Diagnosis(
        queue.name, snapshot.taken_at, groups.letters, scan.uncertain, diagnosed, groups.left_out, scan.risks
    )
