"""How far the ends of a queue's jobs are accounted for, stored in the audit so that a scan reads new ends only."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, InstanceOf, PlainSerializer, ValidationError

from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.contract import ledger_subject
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

_HEADER_BYTES = 256


def _decoded(value: object) -> object:
    return SequenceRanges.decode(value) if isinstance(value, str) else value


_Ranges = Annotated[InstanceOf[SequenceRanges], BeforeValidator(_decoded), PlainSerializer(SequenceRanges.encode)]


class LedgerCheckpoint(BaseModel):
    """The ledger of one queue as a scan left it.

    :param stream: the work queue
    :param created: when it was created, in the server's own text
    :param last: its last sequence at that time
    :param messages: how many messages it stored then; -1 where the scan left evidence for the next one to read
    :param events_created: when the events stream was created; empty where there was none
    :param events_to: the last sequence of the events stream that was read
    :param audit_to: the last sequence of the audit that was read
    :param open: jobs up to ``last`` whose end nothing proved, most of them stored
    :param unaccounted: jobs that were gone without evidence of their end
    :param unknown: jobs that were gone, and whose end nothing can prove
    :param consumers: by name whether the server reported each acknowledgement
    :param completing: consumers of which a completion was stored
    :param at: when it was recorded, by the server's clock
    :param revision: its sequence in the audit
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    stream: str
    created: str
    last: int
    messages: int
    events_created: str
    events_to: int
    audit_to: int
    open: _Ranges
    unaccounted: _Ranges
    unknown: _Ranges
    consumers: dict[str, bool]
    completing: tuple[str, ...] = ()
    at: datetime = datetime.min.replace(tzinfo=UTC)
    revision: int = 0


async def read_checkpoint(connection: Connection, audit: str, queue: str, created: str) -> LedgerCheckpoint | None:
    """Read the last checkpoint of a queue; ``None`` where the audit has none.

    :param audit: the audit's stream
    :param created: when the work queue was created, in the server's own text
    """
    message = await last_message(connection, audit, ledger_subject(queue))
    if message is None:
        return None
    try:
        checkpoint = LedgerCheckpoint.model_validate_json(message.data)
    except ValidationError:
        return None
    update = {"at": message.stored_at, "revision": message.sequence}
    return checkpoint.model_copy(update=update) if checkpoint.created == created else None


async def write_checkpoint(connection: Connection, audit: Mapping[str, Any], checkpoint: LedgerCheckpoint) -> None:
    """Store a checkpoint in place of all earlier ones.

    Each is true by itself: of two scans at once, the slower one makes the next scan read a little more. Where it can't
    be stored, the next scan reads the same ends once more.

    :param audit: the server's STREAM.INFO of the audit
    """
    name, subject = audit["config"]["name"], ledger_subject(checkpoint.stream)
    body = checkpoint.model_dump_json(exclude={"at", "revision"}).encode()
    largest = audit["config"].get("max_msg_size", -1)
    room = min(connection.max_payload, largest) if largest > 0 else connection.max_payload
    if len(body) + _HEADER_BYTES > room:
        log.warning("The ledger of %s needs %d bytes and isn't stored in %s", checkpoint.stream, len(body), name)
        return
    try:
        await store(connection, subject, body)
    except JetStreamProviderError as error:
        log.info("How far the jobs of %s are accounted for couldn't be recorded: %s", checkpoint.stream, error)
        return
    try:
        # Only the last one is read. A purge harms a work queue that holds dead letters; the audit is no work queue.
        await connection.api(f"STREAM.PURGE.{name}", {"filter": subject, "keep": 1})
    except JetStreamProviderError as error:
        log.info("Older states of the ledger of %s stay in %s: %s", checkpoint.stream, name, error)
