"""Removing from the work queue what has been brought back, parked, or done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import ApiError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.names import late_ack_subject
from airflow_provider_jetstream.jetstream.stored import get_message

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection

AGAIN = "run it again soon"


async def remove_original(connection: Connection, queue: str, consumer: str | None, sequence: int) -> None:
    """Remove a job that has been replaced or done.

    The late acknowledgement works on streams that deny deletes too; a job that no consumer has delivered can only be
    deleted.

    :param connection: the server
    :param queue: the work queue
    :param consumer: who delivered it; ``None`` where nobody did
    :param sequence: its stream sequence
    :raises RedriveError: it is still there
    :raises NotFoundError: the queue doesn't exist any more
    """
    failure: Exception | None = None
    try:
        if consumer:
            await connection.request(late_ack_subject(queue, consumer, sequence), b"+ACK")
        else:
            await connection.api(f"STREAM.MSG.DELETE.{queue}", {"seq": sequence, "no_erase": True})
    except (ApiError, TransientError) as error:
        failure = error
    if await get_message(connection, queue, sequence) is not None:
        cause = failure or "the server kept it"
        raise RedriveError(f"the original {sequence} could not be removed ({cause}); {AGAIN}")
