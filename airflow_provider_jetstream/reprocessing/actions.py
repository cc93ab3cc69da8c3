"""What people ask to have done with dead letters, as the ground floor's order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

REDRIVE = "redrive"
PARK = "park"
IN_PLACE = "in_place"
ACTIONS = (REDRIVE, PARK, IN_PLACE)


def request_for_action(
    action: str, selection: Selection, *, rate: float | None = None, why: str | None = None
) -> RedriveRequest:
    """Make the order for an action.

    :param action: ``redrive``, ``park`` or ``in_place``
    :param selection: which letters
    :param rate: letters a second at most
    :param why: a reason
    :return: the order, in nobody's name
    :raises RedriveOrderError: there is no such action, or it can't be had with the rest
    """
    if action not in ACTIONS:
        raise RedriveRequestError(f"expected an action among {', '.join(ACTIONS)}; found {action!r}")
    return RedriveRequest(
        selection=selection,
        rate=rate,
        why=why,
        max_redrives=0 if action == PARK else None,
        protocol=Protocol.IN_PLACE if action == IN_PLACE else Protocol.AUTO,
    )
