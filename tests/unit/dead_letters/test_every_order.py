"""Every order of up to seven facts about a sequence is decided as a second, plain statement of the rules says.

The sequence had an earlier job and, after a loss of power, perhaps a later one; two consumers, of which the subject is
that of ``a``; a restart of the server. The first fact is always that the earlier job was stored.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from airflow_provider_jetstream.jetstream import DeadLetter
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.contract import MSG_ID, end_id
from airflow_provider_jetstream.jetstream.dead_letters.classify import classify
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.job_facts import JobFacts, QueueFacts, Unread
from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

# Deliveries of a consumer used up, a termination or a completion by one of its workers, the audit's records, the
# server's restart, and another job that gets the sequence.
FACTS: Final = (
    *("used up a", "used up b", "term a", "term b", "done a", "done b"),
    *("redriven", "requeued", "restart", "other job"),
)
# Where the job is now: stored, below or above the sequence up to which its consumer is done with every job; or gone,
# with a copy in the archive or without.
PLACES: Final = ("settled", "in flight", "archived", "gone")
JOB: Final = 5
EPOCH: Final = datetime(2026, 11, 1, tzinfo=UTC)
# Between two facts.
STEP: Final = timedelta(minutes=1)


def at(time: int) -> datetime:
    return EPOCH + STEP * (1 + time)


def nanoseconds(time: int) -> int:
    return int(at(time).timestamp()) * 10**9


class Seen(NamedTuple):
    """What an order of facts leaves to be seen of a job.

    :param times: when each fact was
    :param other: when another job got the sequence, if one did
    :param is_given_again: whether all that is stated of a job that is gone is older than that job
    :param deaths: when consumers stated its death, and which
    :param record: the audit's last record, and when it was
    :param knows_job: whether queue or archive say when the job was stored, and whose it is
    """

    times: dict[str, int]
    other: int
    is_given_again: bool
    deaths: list[tuple[int, str]]
    record: str
    recorded: int
    knows_job: bool

    @property
    def born(self) -> int:
        return 0 if self.is_given_again else self.other

    def is_of_job(self, time: int) -> bool:
        """Return whether what names its job is about this one."""
        return time < self.other if self.is_given_again else time > self.other

    @property
    def is_terminated(self) -> bool:
        return bool({"term a", "term b"} & self.times.keys())


def seen(order: Sequence[str], place: str) -> Seen:
    times = {fact: time for time, fact in enumerate(order, 1)}
    entered, other = (
        [time for fact, time in times.items() if fact.startswith(("used up", "term"))],
        times.get("other job", 0),
    )
    is_given_again = place == "archived" and bool(entered) and max(entered) < other
    has_terms = bool({"term a", "term b"} & times.keys())
    if place == "archived" and has_terms and not is_given_again:
        # What is older than the copy is about an earlier job.
        times = {fact: time for fact, time in times.items() if time not in entered or time >= other}
    used_up = {name: times[f"used up {name}"] for name in "ab" if f"used up {name}" in times}
    terms = {name: times[f"term {name}"] for name in "ab" if f"term {name}" in times}
    knows_job = place in {"settled", "in flight"} or (place == "archived" and has_terms)
    # That deliveries are used up is the server's word; any worker can terminate any job.
    if knows_job:
        terms.pop("b", None)
    elif used_up:
        terms = {name: time for name, time in terms.items() if name in used_up}
    elif len(terms) > 1:
        terms = {}
    deaths = sorted((time, name) for stated in (used_up, terms) for name, time in stated.items())
    recorded, record = max(
        ((times[name], name) for name in ("redriven", "requeued") if name in times), default=(-1, "")
    )
    return Seen(times, other, is_given_again, deaths, record, recorded, knows_job)


def said(order: Sequence[str], place: str) -> str:
    """Say what the rules say of the job that has the sequence last, from the order of the facts alone."""
    facts = seen(order, place)
    return ended(facts) or (stored if place in {"settled", "in flight"} else gone)(facts, place)


def ended(facts: Seen) -> str:
    """A job is completed whose own end is stored: that of its consumer, or else of the one that last had it."""
    names = {"a"} if facts.knows_job else set()
    names |= {facts.deaths[-1][1]} if facts.deaths else set()
    ends = [facts.times[f"done {name}"] for name in names if f"done {name}" in facts.times]
    is_unclear = False
    for end in ends:
        is_of_job = not facts.knows_job or facts.is_of_job(end)
        # It ran again where it was requeued since, and a worker terminated it.
        ran_again = facts.record == "requeued" and facts.is_terminated and facts.recorded > end
        # Where nothing says when a terminated job was stored, another one may have got the sequence since a restart.
        is_known = facts.knows_job or not facts.is_terminated or facts.times.get("restart", 0) < end
        if is_of_job and not ran_again and is_known:
            return "completed"
        is_unclear |= is_of_job and not ran_again
    if is_unclear:
        return "uncertain"
    others = {"done a", "done b"} & facts.times.keys()
    return "uncertain" if not facts.knows_job and facts.is_terminated and others and not ends else ""


def stored(facts: Seen, place: str) -> str:
    """A stored job is dead by the numbers, or by what its consumer stated since job, requeueing and restart."""
    requeued = facts.recorded if facts.record == "requeued" else 0
    valid = [(time, name) for time, name in facts.deaths if time >= max(facts.born, requeued)]
    if place == "settled" or any(name == "a" and time >= facts.times.get("restart", 0) for time, name in valid):
        return "dead"
    if valid:
        return "uncertain"
    return "stale" if facts.deaths else "alive"


def gone(facts: Seen, place: str) -> str:
    """A job that is gone is what the audit did last, or dead where it was terminated and its body is known."""
    if not any(fact.startswith(("used up", "term")) for fact in facts.times):
        return "stale"
    is_later = any(time > facts.recorded for time, _ in facts.deaths)
    # The record is about an earlier job where something became of the sequence after this job was stored.
    is_earlier = is_later and place == "archived" and facts.recorded < facts.born
    if facts.knows_job:
        is_earlier = not facts.is_of_job(facts.recorded)
    record = "" if is_earlier else facts.record
    if record == "redriven":
        return "redriven"
    valid = [time for time, _ in facts.deaths if not record or time >= facts.recorded]
    if not valid:
        return "redriven" if record else "uncertain"
    if facts.is_given_again:
        return "uncertain"
    terms = [facts.times[f"term {name}"] for name in "ab" if f"term {name}" in facts.times]
    if any(time in terms for time in valid):
        return "dead" if place == "archived" else "lost"
    return "unaccounted" if place == "archived" else "gone"


def message(time: int) -> StoredMessage:
    text = at(time).isoformat().replace("+00:00", "Z")
    return StoredMessage("q.jobs.a", JOB, text, (), b"job")


def consumer(name: str, place: str, up_since: datetime) -> ConsumerState:
    settled = JOB if place == "settled" else JOB - 1
    return ConsumerState(
        name=name,
        created=EPOCH,
        filters=(f"q.jobs.{name}",),
        max_ack_wait=timedelta(seconds=30),
        delivered=JOB + 1,
        ack_floor=settled,
        pending=0,
        in_flight=2,
        stored=2,
        dead=1,
        last_active=at(9),
        taken_at=at(10),
        up_since=up_since,
        deliveries=9,
    )


def queue_of(place: str, restart: int) -> QueueFacts:
    consumers = {name: consumer(name, place, at(restart)) for name in ("a", "b")}
    snapshot = QueueSnapshot("q", EPOCH.isoformat(), {}, {"last_seq": 9}, consumers, at(10))
    return QueueFacts(snapshot, up_since=at(restart))


_ACTIONS: tuple[Any, ...] = ("redriven", "requeued")
_KINDS = {"used up": EntryKind.DELIVERIES, "term": EntryKind.TERMINATION}
_QUEUES = {(place, restart): queue_of(place, restart) for place in PLACES for restart in range(8)}
_JOBS = [message(time) for time in range(8)]
# A record names when its job was stored, as a worker's completion does.
_RECORDS: dict[tuple[str, int, int], LetterRecord] = {
    (action, born, time): LetterRecord(
        stream="q",
        created=EPOCH.isoformat(),
        sequence=JOB,
        stored_at=_JOBS[born].time,
        action=action,
        subject="q.jobs.a",
        reason="terminated",
        fingerprint="",
        at=at(time),
    )
    for action in _ACTIONS
    for born in range(8)
    for time in range(8)
}


_ENTRIES = {
    (fact, time): Entry(time, _KINDS[fact[:-2]], fact[-1], at(time), 1)
    for fact in FACTS
    if fact[:-2] in _KINDS
    for time in range(8)
}
# A worker's completion names in its id when its job was stored.
_ENDS = {
    (born, time): replace(_JOBS[time], headers=((MSG_ID, end_id("q", JOB, nanoseconds(born))),))
    for born in range(8)
    for time in range(8)
}


def facts_of(order: Sequence[str], place: str) -> tuple[JobFacts, QueueFacts]:
    entries: list[Entry] = []
    ends: dict[str, StoredMessage | None] = {"a": None, "b": None}
    record, born, restart, last_end = None, 0, 0, None
    for time, fact in enumerate(order, 1):
        if fact == "other job":
            born = time
        elif fact == "restart":
            restart = time
        elif fact in _ACTIONS:
            record = _RECORDS[fact, born, time]
        else:
            kind, _, name = fact.rpartition(" ")
            if kind == "done":
                ends[name] = _ENDS[born, time]
                last_end = at(time)
            else:
                entries.append(_ENTRIES[fact, time])
    is_stored = place in ("settled", "in flight")
    is_given_again = place == "archived" and bool(entries) and max(entry.recorded_at for entry in entries) < at(born)
    job = JobFacts(
        *(JOB, tuple(entries), _JOBS[born] if is_stored else None, ends, record),
        archived=_JOBS[0 if is_given_again else born] if place == "archived" else None,
        is_given_again=is_given_again,
        records={},
        termination=None,
        foreign_end=last_end,
        near_acknowledgements=(),
        acknowledged_at=None,
        new_job=(None, JOB + 4, False),
        has_removed_entries=False,
    )
    return job, _QUEUES[place, restart]


def decided(order: Sequence[str], place: str) -> str:
    job, queue = facts_of(order, place)
    (result,) = classify([job], queue)
    assert not isinstance(result, Unread)
    return "dead" if isinstance(result, DeadLetter) else result.status.value


def check(most: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for place in PLACES:
        # A restart matters where only an entry proves the death, and where nothing says when the job was stored.
        others = FACTS if place in ("in flight", "gone") else [fact for fact in FACTS if fact != "restart"]
        for order in (order for length in range(most) for order in permutations(others, length)):
            expected, found = said(order, place), decided(order, place)
            assert found == expected, f"{place}: {', '.join(order) or 'nothing'}: {found}, expected {expected}"
            counts[found] += 1
    return counts


def test_every_order_of_up_to_six_facts_is_decided_as_the_plain_rules_say() -> None:
    counts = check(6)
    assert counts.total() == 2 * (36_101 + 18_730)
    # Each answer is given: none of the rules is out of reach.
    answers = {"dead", "completed", "redriven", "alive", "uncertain", "stale", "gone", "unaccounted", "lost"}
    assert counts.keys() == answers


@pytest.mark.slow
def test_every_order_of_seven_facts_is_decided_as_the_plain_rules_say() -> None:
    assert check(7).total() == 2 * (187_301 + 79_210)
