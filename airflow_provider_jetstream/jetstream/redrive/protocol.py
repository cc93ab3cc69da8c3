"""Chooses the protocol of a redrive, and states what it guarantees.

It checks the queue that gets the new jobs, which may be another one than the letters' own and fulfils the same
preconditions, and the sequences that a request names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.intent import Target
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE
from airflow_provider_jetstream.jetstream.dead_letters.selection import NotKept, Selection
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    QueueDeclarationError,
    RedriveError,
    RedriveRequestError,
)
from airflow_provider_jetstream.jetstream.queue.field_rules import copy_problem
from airflow_provider_jetstream.jetstream.queue.preconditions import held_problem, queue_findings, require_no_refusal
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.queue.stream_config import StreamRoom
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import BY_POLICY, Protocol, RedriveRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


@dataclass(frozen=True, slots=True)
class RedriveTarget:
    """The queue that gets the new jobs.

    :param queue: its declaration
    :param snapshot: its stream, companions and consumers
    :param is_other: whether it isn't the letters' own
    :param risks: what its preconditions say where it is another one
    """

    queue: WorkQueue
    snapshot: QueueSnapshot
    is_other: bool = False
    risks: tuple[Finding, ...] = ()

    @property
    def stream(self) -> str:
        """The stream that stores the new jobs."""
        return self.snapshot.queue

    @property
    def other_snapshot(self) -> QueueSnapshot | None:
        """Its snapshot where it is another queue than the letters' own."""
        return self.snapshot if self.is_other else None

    def for_intent(self, last: int) -> Target:
        """Return what an intent says about the stream that is about to store new jobs.

        :param last: a sequence that the stream has reached
        """
        archive = self.queue.archive
        return Target(
            stream=self.stream,
            created=self.snapshot.created,
            last=last,
            archive=archive.name if archive and archive.name in self.snapshot.companions else None,
        )

    def check_subject(self, repaired: str | None, subject: str) -> None:
        """Raise unless a letter can become a job of a subject.

        :param repaired: the subject that its repair names, if it names one
        :param subject: the subject otherwise
        :raises RedriveError: the queue wouldn't store the subject, or no consumer matches one that isn't the letter's
        """
        # A letter's own subject may have lost its consumer only for now.
        if repaired is None and not self.is_other:
            problem = _capture_problem(subject, self.snapshot, is_other=False)
        else:
            problem = subject_problem(repaired or subject, self.snapshot, is_other=self.is_other)
        if problem:
            raise RedriveError(f"{problem}; the letter is untouched")


def subject_problem(subject: str, snapshot: QueueSnapshot, *, is_other: bool) -> str:
    """Return a sentence that says why a subject of a queue can't have jobs; empty if it can.

    :param is_other: whether the queue isn't the letters' own
    """
    if problem := _capture_problem(subject, snapshot, is_other=is_other):
        return problem
    if snapshot.consumer_for(subject) is None:
        return (
            f"expected a subject that a consumer of {snapshot.queue} takes, found {subject}: no worker would get the"
            " jobs"
        )
    return ""


def _capture_problem(subject: str, snapshot: QueueSnapshot, *, is_other: bool) -> str:
    """Return a sentence that says why the queue wouldn't store a message on a subject; empty if it would."""
    subjects, transform = snapshot.config.get("subjects") or [], snapshot.config.get("subject_transform") or {}
    if not covered_by_any(subjects, subject):
        advice = (
            "name one in the request, or in each repair"
            if is_other
            else "a dead letter comes back as a job of the same queue unless the request names a target"
        )
        return f"expected a subject of {snapshot.queue} ({', '.join(subjects)}), found {subject}: {advice}"
    if transform and covered_by_any([transform.get("src") or ">"], subject):
        return (
            f"expected a subject that {snapshot.queue} stores as it is, found {subject}: it would store the copy as"
            f" {transform.get('dest')} (subject_transform)"
            + ("; name another target" if is_other else ", once more; redrive all letters in place")
        )
    return ""


def own_queue(scan: Scan) -> RedriveTarget:
    """Return the letters' own queue as the target."""
    return RedriveTarget(scan.queue, scan.snapshot)


async def read_target(connection: Connection, request: RedriveRequest, scan: Scan) -> RedriveTarget:
    """Return the queue that gets the new jobs, which fulfils the preconditions.

    :raises RedriveRequestError: it is a companion of the letters' queue
    :raises UnsuitableQueueError: it is no work queue
    :raises NotFoundError: it doesn't exist
    """
    target = request.target
    if target is None or target.name == scan.queue.name:
        return own_queue(scan)
    if target.name in scan.queue.companion_names():
        raise RedriveRequestError(
            f"expected another work queue as target, found {target.name}, which belongs to {scan.queue.name}: name a"
            " queue with workers of its own"
        )
    snapshot = await take_snapshot(connection, target)
    findings = queue_findings(snapshot, target)
    require_no_refusal(target.name, findings)
    return RedriveTarget(target, snapshot, is_other=True, risks=findings)


def own_request(request: RedriveRequest, queue: WorkQueue) -> RedriveRequest:
    """Return a request that names no target where the target is the letters' own queue, and a policy's letters.

    :raises QueueDeclarationError: the request applies a policy that the queue doesn't declare
    """
    if request.discard == BY_POLICY and request.selection == NotKept():
        keep = require_dead_letters(queue).keep
        if keep is None:
            problem = "expected dead_letters.keep, found none: declare it, and name the queue's file; no server has it"
            raise QueueDeclarationError(queue.name, [problem])
        policy = f"by policy: {keep.describe()}"
        why = f"{policy}; {request.why}" if request.why else policy
        return replace(request, selection=NotKept(keep=keep), why=why)
    if request.target is None or request.target.name != queue.name:
        return request
    return replace(request, target=None)


_RESET_LEVEL = 4
_NAMED = 5
_NO_ENTRY = "no entry in the dead letter queue"
_EXCLUDED = "it is dead, but the rest of the selection excludes it"
_PARKED = "it is parked; select parked to bring it back"

_ONCE = "nothing is lost and nothing runs twice, at whatever point it is cut off and whenever any redrive comes next"

GUARANTEES = {
    Protocol.COPY: (
        f"{_ONCE}; where the queue's archive doesn't show whether a copy was stored, the letter is set aside until a"
        " request names it"
    ),
    Protocol.IN_PLACE: (
        f"{_ONCE}, unless the reset is held back by the network for half a minute; letters that are no longer stored"
        " come back by copies"
    ),
}

# The changes in place of which a redrive may be killed, batch by batch, in their order.
KILL_POINTS: Mapping[str, Sequence[str]] = {
    Protocol.COPY: ("intent", "store", "record", "remove", "entries"),
    Protocol.IN_PLACE: ("pause", "record", "reset", "entries"),
    "discard": ("record", "remove", "entries"),
}

_DISCARDED = f"{_ONCE}: what is recorded as discarded is finished by the next redrive"
_RETURNED = f"{_ONCE}: letters come back parked"


@dataclass(frozen=True, slots=True)
class ProtocolChoice:
    """The chosen protocol.

    :param protocol: how letters are brought back
    :param reason: why this protocol was chosen
    :param rest_in_place: whether letters whose copies are too large for the queue are then requeued in place
    :param of_discard: what discarding letters or bringing them back guarantees, where that is what is done
    """

    protocol: Protocol
    reason: str
    rest_in_place: bool = False
    of_discard: str = ""

    @property
    def guarantee(self) -> str:
        """What the protocol guarantees, as a sentence."""
        return self.of_discard or GUARANTEES[self.protocol]


def choose_protocol(
    request: RedriveRequest,
    snapshot: QueueSnapshot,
    api_level: int,
    handlers: Sequence[str] = (),
    *,
    target: QueueSnapshot | None = None,
) -> ProtocolChoice:
    """Choose how to bring letters back.

    :param api_level: the API level of the server
    :param handlers: the consumers of the dead letter queue that handle letters
    :param target: the queue that gets the new jobs, where it is another one
    :raises RedriveRequestError: the request isn't possible for this queue
    """
    no_reset = _no_reset(api_level)
    storing = target or snapshot
    _check_subject(request, storing, is_other=target is not None)
    _check_undeliverable(request, snapshot)
    _check_protocol(request, snapshot, no_reset, handlers)
    if request.discard or request.undo:
        guarantee = _DISCARDED if request.discard else _RETURNED
        return ProtocolChoice(Protocol.COPY, "no job is stored", of_discard=guarantee)
    if request.protocol == Protocol.IN_PLACE:
        return ProtocolChoice(request.protocol, "the request names it")
    held = held_problem(snapshot.queue, snapshot.held_above)
    can_reset = not (request.impossible_in_place or no_reset or handlers or held)
    if request.makes_jobs and (no_copies := copy_problem(storing.config)):
        if request.protocol == Protocol.AUTO and can_reset:
            return ProtocolChoice(Protocol.IN_PLACE, no_copies)
        raise RedriveRequestError(
            f"expected a queue that stores copies, found otherwise: {no_copies}; redrive all of them in place, or park"
            " them with max_redrives 0"
        )
    full = capacity_problem(request, snapshot, target=target)
    if full and request.protocol == Protocol.AUTO and can_reset:
        return ProtocolChoice(Protocol.IN_PLACE, full)
    if full and (no_room := _no_room(storing)):
        raise RedriveRequestError(
            f"expected room for copies, found otherwise: {no_room}, and discards its oldest jobs for new ones; raise"
            " its limits, park letters with max_redrives 0, or redrive all of them in place"
        )
    if request.protocol != Protocol.AUTO:
        return ProtocolChoice(request.protocol, "the request names it")
    reason = f"the new jobs go to {target.queue}, another stream" if target else "the queue has room for copies"
    return ProtocolChoice(Protocol.COPY, reason, can_reset)


def capacity_problem(request: RedriveRequest, snapshot: QueueSnapshot, *, target: QueueSnapshot | None = None) -> str:
    """Return a clause that says why a queue can't store copies before the originals are removed; empty if it can.

    :param target: the queue that stores the copies, where it is another one
    """
    if not request.makes_jobs:
        return ""
    state, sequences = snapshot.state, request.selection.sequences
    dead = sum(
        state["messages"] if consumer.dead is None else consumer.dead for consumer in snapshot.consumers.values()
    )
    if sequences is not None:
        dead = min(dead, len(sequences))
    needed = min(dead, PAGE)
    average = state["bytes"] / state["messages"] if state["messages"] else 0
    storing = target or snapshot
    if target is not None:
        # Nothing is removed there for what is stored.
        state, needed = target.state, dead
    for limit, used, size in (("max_msgs", state["messages"], 1), ("max_bytes", state["bytes"], average)):
        maximum = storing.config.get(limit, -1)
        if needed and 0 < maximum < used + needed * size:
            return f"{storing.queue} has no room for copies ({limit} {maximum}, {used} used)"
    return ""


def _no_room(snapshot: QueueSnapshot) -> str:
    """Return a clause that says why not even one copy can be stored without dropping a job; empty if one can."""
    room = StreamRoom(snapshot.config, snapshot.state["messages"], snapshot.state["bytes"])
    problem = room.problem(1, 1)
    return f"{snapshot.queue} has no room for copies ({problem})" if problem else ""


def _check_subject(request: RedriveRequest, snapshot: QueueSnapshot, *, is_other: bool) -> None:
    if request.subject is not None and (problem := subject_problem(request.subject, snapshot, is_other=is_other)):
        raise RedriveRequestError(problem)


def _check_protocol(request: RedriveRequest, snapshot: QueueSnapshot, no_reset: str, handlers: Sequence[str]) -> None:
    """Refuse a protocol that the queue, its server or its handlers don't allow."""
    held = held_problem(snapshot.queue, snapshot.held_above)
    if request.protocol == Protocol.IN_PLACE and held:
        raise RedriveRequestError(
            f"expected a queue of which each delivered job that is stored is dead, found that {held}: a redrive in"
            " place would run them again; wait, or use another protocol"
        )
    if request.protocol == Protocol.IN_PLACE and no_reset:
        raise RedriveRequestError(f"expected a server that can reset a consumer, found otherwise: {no_reset}")
    if request.protocol == Protocol.IN_PLACE and handlers:
        # A reset delivers every stored job: those that a handler has handled, and those that it is handling.
        raise RedriveRequestError(
            f"expected a dead letter queue without handlers, found its consumer {', '.join(handlers)}: a redrive in"
            " place would run again what it has handled; use another protocol"
        )


def _check_undeliverable(request: RedriveRequest, snapshot: QueueSnapshot) -> None:
    """Refuse undeliverable jobs where they can't be removed from their subjects."""
    if not snapshot.unconsumed or Reason.UNDELIVERABLE not in (request.selection.reasons or ()):
        return
    named = ", ".join(sorted(snapshot.unconsumed)[:5])
    if snapshot.config.get("deny_delete"):
        raise RedriveRequestError(
            f"expected a queue that allows jobs to be deleted, found deny_delete on {snapshot.queue}: those that no"
            f" consumer takes ({named}) can't be moved; give it a consumer that takes them, or leave undeliverable out"
        )
    if request.subject is None and request.makes_jobs:
        raise RedriveRequestError(
            f"expected a subject that a consumer takes for undeliverable jobs, found none: no consumer of"
            f" {snapshot.queue} takes where they are ({named}); name one, or leave undeliverable out"
        )


def _no_reset(api_level: int) -> str:
    return "" if api_level >= _RESET_LEVEL else "the server is older than 2.14"


async def require_sequences(scan: Scan, selection: Selection, done: Collection[int] = ()) -> None:
    """Raise unless every sequence that a selection names is a dead letter that it selects.

    :param done: sequences that an earlier try of the redrive has handled
    :raises DeadLetterGoneError: a sequence isn't a selected dead letter (any more)
    """
    if selection.sequences is None:
        return
    missing = set(selection.sequences) - set(done)
    causes: dict[int, str] = {}
    async for page in scan.pages(selection):
        missing -= {letter.sequence for letter in page.letters}
        causes.update({job.sequence: job.status.meaning for job in page.dismissed})
    if not missing:
        return
    causes |= await _excluded(scan, missing)
    named = "; ".join(f"{sequence}: {causes.get(sequence, _NO_ENTRY)}" for sequence in sorted(missing)[:_NAMED])
    raise DeadLetterGoneError(
        f"expected dead letters of {scan.queue.name}, found otherwise for {len(missing)} of {len(selection.sequences)}"
        f" sequences ({named}); nothing was redriven: leave them out, or redrive all"
    )


async def _excluded(scan: Scan, sequences: set[int]) -> dict[int, str]:
    """Return for each dead letter that the rest of a selection excludes why it does."""
    causes: dict[int, str] = {}
    for parked, cause in ((False, _EXCLUDED), (True, _PARKED)):
        every = Selection(sequences=frozenset(sequences), reasons=frozenset(Reason), parked=parked)
        causes |= {letter.sequence: cause async for letter in scan.letters(every)}
    return causes
