"""Chooses the protocol of a redrive, states what it guarantees, and checks the sequences that a request names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, RedriveRequestError
from airflow_provider_jetstream.jetstream.queue.field_rules import copy_problem
from airflow_provider_jetstream.jetstream.queue.preconditions import held_problem
from airflow_provider_jetstream.jetstream.queue.stream_config import StreamRoom
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.target import subject_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

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
