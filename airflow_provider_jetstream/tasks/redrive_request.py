"""Redrive requests, made from an operator's arguments or from an action that a person chose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
from airflow_provider_jetstream.jetstream.redrive.request import LEASE_TIMEOUT, Protocol, RedriveRequest
from airflow_provider_jetstream.tasks.arguments import check_function
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.tasks.template_values import (
    is_absent,
    parse_flag,
    parse_number,
    parse_selection,
    parse_text,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

REDRIVE = "redrive"
PARK = "park"
IN_PLACE = "in_place"
DISCARD = "discard"
UNDO = "undo"
ACTIONS = (REDRIVE, PARK, IN_PLACE, DISCARD, UNDO)


def redrive_request(  # noqa: PLR0913 - each is an argument of its own in a DAG
    *,
    select: object,
    sequences: object,
    subject: object,
    transform: Any,
    rate: object,
    protocol: object,
    max_redrives: object,
    why: object,
    lease_timeout: Any = None,
    census: object = False,
    target_queue: Any = None,
    order_key: object = None,
    waves: object = None,
    stop_when: object = None,
    patch: Any = None,
    discard: object = False,
    without_copy: object = False,
    undo: object = None,
) -> RedriveRequest:
    """Parse the arguments of a redrive operator after templating, which may have made text of numbers.

    :raises SelectionError: the selection isn't understood
    :raises RedriveRequestError: another argument can't be used, or not together with the others
    :raises QueueDeclarationError: the target is no work queue
    """
    check_function("transform", transform, "DeadLetter", RedriveRequestError)
    return RedriveRequest(
        selection=parse_selection(select, sequences),
        subject=parse_text(subject),
        transform=transform,
        rate=parse_number("rate", rate, float),
        protocol=_parse_protocol(protocol),
        max_redrives=parse_number("max_redrives", max_redrives, int),
        why=parse_text(why),
        lease_timeout=LEASE_TIMEOUT if is_absent(lease_timeout) else lease_timeout,
        census=parse_flag("census", census, RedriveRequestError),
        target=None if is_absent(target_queue) else load_queue(target_queue),
        order_key=parse_text(order_key),
        waves=_parse_json("waves", waves) or (),
        stop_when=_parse_json("stop_when", stop_when),
        # A run's configuration without a patch may render to an empty list.
        patch=None if is_absent(patch) or patch in ([], "[]") else JsonPatch.of(patch),
        discard=parse_flag("discard", discard, RedriveRequestError),
        without_copy=parse_flag("without_copy", without_copy, RedriveRequestError),
        undo=parse_text(undo),
    )


def request_for_action(
    action: str,
    selection: Selection,
    *,
    rate: float | None = None,
    why: str | None = None,
    patch: JsonPatch | str | None = None,
    undo: str | None = None,
) -> RedriveRequest:
    """Make the request for an action: ``redrive``, ``park``, ``in_place``, ``discard`` or ``undo``.

    :param undo: the id of the redrive whose discarded letters come back
    :raises RedriveRequestError: there is no such action, or the other arguments don't fit it
    """
    if action not in ACTIONS:
        raise RedriveRequestError(f"expected an action among {', '.join(ACTIONS)}; found {action!r}")
    if (action == UNDO) != (undo is not None):
        raise RedriveRequestError(
            f"expected the id of a redrive with the action undo only, found {action} and {undo!r}"
        )
    return RedriveRequest(
        selection=selection,
        rate=rate,
        why=why,
        patch=patch,
        max_redrives=0 if action == PARK else None,
        protocol=Protocol.IN_PLACE if action == IN_PLACE else Protocol.AUTO,
        discard=action == DISCARD,
        undo=undo,
    )


def _parse_json(name: str, value: object) -> Any:
    """Return an argument that a template may have rendered to its JSON text."""
    if is_absent(value):
        return None
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) or None
    except (ValueError, RecursionError):
        raise RedriveRequestError(f'expected {name} as JSON, such as [10, 100, "rest"], found {value!r}') from None


def _parse_protocol(value: object) -> Protocol:
    if is_absent(value):
        return Protocol.AUTO
    try:
        return Protocol(str(value))
    except ValueError:
        known = ", ".join(Protocol)
        raise RedriveRequestError(f"expected a protocol among {known}; found {value!r}") from None
