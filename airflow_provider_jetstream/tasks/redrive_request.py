"""From what a redrive operator was given to the order of the ground floor: which letters, and how."""

from __future__ import annotations

from typing import Any

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.tasks.template_values import absent, number, selection_of, text


def redrive_request(
    *,
    select: object,
    sequences: object,
    subject: object,
    transform: Any,
    rate: object,
    protocol: object,
    max_redrives: object,
    why: object,
) -> RedriveRequest:
    """Read an order; a number may be its text.

    :param select: which dead letters, in any form in which the operator takes it
    :param sequences: stream sequences, as numbers or as pairs of first and last
    :param subject: where the jobs go
    :param transform: what repairs letters on their way
    :param rate: letters a second at most
    :param protocol: how, or its name
    :param max_redrives: letters redriven so often before are parked instead
    :param why: a reason
    :return: the order, in nobody's name
    :raises SelectionError: the selection isn't understood
    :raises RedriveOrderError: another part of it can't be used, or not together
    """
    if transform is not None and not callable(transform):
        raise RedriveRequestError(
            f"expected a function that takes a DeadLetter as transform, found {type(transform).__name__}"
        )
    return RedriveRequest(
        selection=selection_of(select, sequences),
        subject=text(subject),
        transform=transform,
        rate=number("rate", rate, float),
        protocol=_protocol(protocol),
        max_redrives=number("max_redrives", max_redrives, int),
        why=text(why),
    )


def _protocol(given: object) -> Protocol:
    if absent(given):
        return Protocol.AUTO
    try:
        return Protocol(str(given))
    except ValueError:
        known = ", ".join(Protocol)
        raise RedriveRequestError(f"expected a protocol among {known}; found {given!r}") from None
