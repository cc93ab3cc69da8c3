"""Removing from the work queue what has been brought back, parked, or done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.asking import ask_each
from airflow_provider_jetstream.jetstream.connection_failures import decoded
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.names import late_ack_subject
from airflow_provider_jetstream.jetstream.reading import at_once
from airflow_provider_jetstream.jetstream.stored import get_message, next_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.connection import Connection

AGAIN = "run it again soon"

# Looks beyond those at single jobs cost more than they save.
_LOOKS = 8


async def remove_originals(
    connection: Connection, queue: str, originals: Mapping[int, str | None]
) -> dict[int, JetStreamProviderError]:
    """Remove jobs that have been replaced or done.

    The late acknowledgement works on streams that deny deletes too; a job that no consumer has delivered can only be
    deleted. Neither's answer says that the job is gone, so the queue is looked at.

    :param connection: the server
    :param queue: the work queue
    :param originals: their stream sequences, and who delivered each; ``None`` where nobody did
    :return: for those that are still there why
    :raises NotFoundError: the queue doesn't exist any more
    :raises TransientError: the queue couldn't be looked at
    """
    asked = [_removal(queue, consumer, sequence) for sequence, consumer in originals.items()]
    answers = dict(zip(originals, await ask_each(connection, asked), strict=True))
    stored = await _still_stored(connection, queue, sorted(originals)) if originals else []
    return {
        sequence: RedriveError(f"the original {sequence} could not be removed ({_cause(answers[sequence])}); {AGAIN}")
        for sequence in stored
    }


def _removal(queue: str, consumer: str | None, sequence: int) -> tuple[str, bytes]:
    if consumer:
        return late_ack_subject(queue, consumer, sequence), b"+ACK"
    return f"$JS.API.STREAM.MSG.DELETE.{queue}", b'{"seq":%d,"no_erase":true}' % sequence


def _cause(answer: bytes | TransientError) -> object:
    if isinstance(answer, TransientError):
        return answer
    try:
        decoded(answer or b"{}", "removal")
    except (ApiError, TransientError, ValueError) as error:
        return error
    return "the server kept it"


async def _still_stored(connection: Connection, queue: str, sequences: list[int]) -> list[int]:
    """Look which jobs of some are stored: by those between the first and the last, while there are few."""
    wanted, at, last = set(sequences), sequences[0], sequences[-1]
    found: list[int] = []
    for _ in range(_LOOKS + len(sequences) // _LOOKS):
        message = await next_message(connection, queue, at, ">") if at <= last else None
        if message is None or message.sequence > last:
            return found
        if message.sequence in wanted:
            found.append(message.sequence)
        at = message.sequence + 1

    async def stored(sequence: int) -> bool:
        return await get_message(connection, queue, sequence) is not None

    rest = [each for each in sequences if each >= at]
    return [*found, *(each for each, there in zip(rest, await at_once(stored, rest), strict=True) if there)]
