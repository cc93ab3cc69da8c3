"""Choosing how to bring letters back, and saying what that protects from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import marker_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE
from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

_BATCHES_LEVEL = 2
_RESET_LEVEL = 4

GUARANTEES = {
    Protocol.COPY: (
        "nothing is lost at any point; a job can run twice only if the redrive is cut off between storing the copy and"
        " recording it, and is run again after the queue's duplicate window, or after a restart of the server"
    ),
    Protocol.ATOMIC: (
        "nothing is lost at any point; a job can run twice only if the redrive is cut off before the original is"
        " removed, and is run again more than a day later"
    ),
    Protocol.IN_PLACE: (
        "nothing is lost and nothing runs twice, at whatever point it is cut off and run again; letters that are no"
        " longer stored come back by copies"
    ),
}


@dataclass(frozen=True, slots=True)
class ProtocolChoice:
    """How letters are brought back.

    :param protocol: how
    :param because: why so
    """

    protocol: Protocol
    reason: str

    @property
    def guarantee(self) -> str:
        """What that protects from."""
        return GUARANTEES[self.protocol]


def choose_protocol(request: RedriveRequest, snapshot: QueueSnapshot, api_level: int) -> ProtocolChoice:
    """Choose how to bring letters back.

    :param order: what is asked for
    :param around: how the queue is
    :param api_level: the server's, as its API tells
    :return: the choice
    :raises RedriveOrderError: what is asked for isn't possible here
    """
    no_batches, no_reset = _no_batches(snapshot, api_level), _no_reset(api_level)
    _check_subject(request, snapshot)
    _check_undeliverable(request, snapshot)
    if request.protocol == Protocol.ATOMIC and no_batches:
        raise RedriveRequestError(f"expected a queue that allows atomic batches, found otherwise: {no_batches}")
    if request.protocol == Protocol.IN_PLACE and no_reset:
        raise RedriveRequestError(f"expected a server that can reset a consumer, found otherwise: {no_reset}")
    if request.protocol == Protocol.IN_PLACE:
        return ProtocolChoice(request.protocol, "it was asked for")
    crowded = capacity_problem(request, snapshot, markers=request.protocol != Protocol.COPY and not no_batches)
    if crowded and request.protocol == Protocol.AUTO and not request.impossible_in_place and not no_reset:
        return ProtocolChoice(Protocol.IN_PLACE, crowded)
    if crowded and snapshot.config.get("discard") != "new":
        raise RedriveRequestError(
            f"expected room for copies, found otherwise: {crowded}, and discards its oldest jobs for new ones; raise"
            " its limits, park letters with max_redrives 0, or redrive all of them in place"
        )
    if request.protocol != Protocol.AUTO:
        return ProtocolChoice(request.protocol, "it was asked for")
    if not no_batches:
        return ProtocolChoice(Protocol.ATOMIC, "the queue allows atomic batches")
    return ProtocolChoice(Protocol.COPY, no_batches)


def capacity_problem(order: RedriveRequest, around: QueueSnapshot, *, markers: bool) -> str:
    """Say that a queue has no room for the copies that are stored before their originals are removed.

    :param order: what is asked for
    :param around: how the queue is
    :param markers: whether each copy leaves a marker
    :return: a clause; empty where there is room
    """
    if order.max_redrives == 0:
        return ""
    state, named = around.state, order.selection.sequences
    dead = sum(state["messages"] if each.dead is None else each.dead for each in around.consumers.values())
    if named is not None:
        dead = min(dead, len(named))
    copies = min(dead, PAGE)
    needed = copies + dead + copies if markers else copies
    each = state["bytes"] / state["messages"] if state["messages"] else 0
    for limit, used, size in (("max_msgs", state["messages"], 1), ("max_bytes", state["bytes"], each)):
        most = around.config.get(limit, -1)
        if needed and 0 < most < used + needed * size:
            return f"{around.queue} has no room for copies ({limit} {most}, {used} used)"
    return ""


def _check_subject(order: RedriveRequest, around: QueueSnapshot) -> None:
    if order.subject is not None and (problem := target_problem(order.subject, around)):
        raise RedriveRequestError(problem)


def check_target(subject: str | None, around: QueueSnapshot) -> None:
    """Do nothing if a repaired letter can go where its repair says.

    :param subject: where that is; ``None`` where it doesn't say
    :param around: how the queue is
    :raises RedriveError: it can't
    """
    if subject is not None and (problem := target_problem(subject, around)):
        raise RedriveError(f"{problem}; the letter is untouched")


def target_problem(subject: str, around: QueueSnapshot) -> str:
    """Say why jobs can't go to a subject.

    :param subject: the subject
    :param around: how the queue is
    :return: a sentence; empty where they can
    """
    if not covered_by_any(around.config.get("subjects") or [], subject):
        return (
            f"expected a subject of {around.queue} ({', '.join(around.config.get('subjects') or [])}), found"
            f" {subject}: a dead letter comes back as a job of the same queue"
        )
    if around.consumer_for(subject) is None:
        return f"expected a subject that a consumer of {around.queue} takes, found {subject}: nobody would do the jobs"
    return ""


def _check_undeliverable(order: RedriveRequest, around: QueueSnapshot) -> None:
    """Refuse to move jobs that no consumer takes where they can't be moved."""
    if not around.unconsumed or Reason.UNDELIVERABLE not in (order.selection.reasons or ()):
        return
    named = ", ".join(sorted(around.unconsumed)[:5])
    if around.config.get("deny_delete"):
        raise RedriveRequestError(
            f"expected a queue that allows jobs to be deleted, found deny_delete on {around.queue}: those that no"
            f" consumer takes ({named}) can't be moved; give it a consumer that takes them, or leave undeliverable out"
        )
    if order.subject is None and order.max_redrives != 0:
        raise RedriveRequestError(
            f"expected a subject that a consumer takes for undeliverable jobs, found none: no consumer of"
            f" {around.queue} takes where they are ({named}); name one, or leave undeliverable out"
        )


def _no_batches(around: QueueSnapshot, api_level: int) -> str:
    marker = marker_subject(around.queue, 1)
    if api_level < _BATCHES_LEVEL:
        return "the server is older than 2.12 and has no atomic batches"
    if not around.config.get("allow_atomic") or not around.config.get("allow_msg_ttl"):
        return f"{around.queue} doesn't allow atomic batches; provision it with atomic_redrive"
    if not covered_by_any(around.config.get("subjects") or [], marker):
        return f"{around.queue} doesn't capture {marker.removesuffix('1')}*; provision it with atomic_redrive"
    if taker := around.consumer_for(marker):
        return f"consumer {taker.name} of {around.queue} would take the markers as jobs; give it a filter"
    return ""


def _no_reset(api_level: int) -> str:
    return "" if api_level >= _RESET_LEVEL else "the server is older than 2.14"
