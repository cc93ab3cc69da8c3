"""Taking a dead letter out of circulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, UnreachableError
from airflow_provider_jetstream.jetstream.letter_record import record_headers
from airflow_provider_jetstream.jetstream.names import parked_filter, parked_subject
from airflow_provider_jetstream.jetstream.redrive.copying import check_size
from airflow_provider_jetstream.jetstream.storing import store

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter


async def park(connection: Connection, letter: DeadLetter, letters: str, why: str) -> int:
    """Store a letter where no scan counts it, with the reason.

    :param connection: the server
    :param letter: the dead letter
    :param letters: the dead letter queue
    :param why: the reason
    :return: its sequence in the dead letter queue
    :raises RedriveError: it isn't stored
    :raises TransientError: it isn't known to be stored
    """
    death = letter.death
    headers = record_headers(
        death, subject=letter.subject, time=letter.time, headers=letter.headers, teller="park", parked=why
    )
    check_size(letter, letter.body, headers, connection.max_payload)
    try:
        subject = parked_subject(death.stream, death.consumer, death.sequence)
        receipt = await store(connection, subject, letter.body, headers)
    except ApiError as error:
        raise RedriveError(f"{letters} refused to park {letter.sequence}: {error.description}") from None
    except UnreachableError:
        raise RedriveError(
            f"expected {letters} to capture {parked_filter(death.stream)}, found that no stream does: add that subject"
            " to be able to park letters"
        ) from None
    if receipt.stream != letters:
        raise RedriveError(f"expected {letters} to keep the parked letter {letter.sequence}, found {receipt.stream}")
    return receipt.sequence
