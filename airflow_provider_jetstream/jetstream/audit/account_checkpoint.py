"""What the last account of a queue's jobs has settled, stored in the audit so that the next one reads what is new."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer, ValidationError

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.streams import last_with_position
from airflow_provider_jetstream.jetstream.contract import account_subject
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

_HEADER_BYTES = 256


def _decoded(value: object) -> object:
    return SequenceRanges.decode(value) if isinstance(value, str) else value


_Ranges = Annotated[InstanceOf[SequenceRanges], BeforeValidator(_decoded), PlainSerializer(SequenceRanges.encode)]


class ReadPosition(BaseModel):
    """How far a stream was read.

    :param created: when the stream was created, in the server's own text
    :param to: the last sequence that was read
    :param time: when the message of that sequence was stored; a stream that lost messages has another one there
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    created: str
    to: int
    time: str


class AccountCheckpoint(BaseModel):
    """An account of one queue's jobs.

    Positions are stored together with what was read up to them, by one message: evidence about a job that the snapshot
    doesn't have yet is in ``early``.

    :param stream: the work queue
    :param created: when it was created, in the server's own text
    :param first: the first sequence that it ever gave
    :param last: its last sequence in the snapshot
    :param stored: how many messages it stored then
    :param taken_at: when that was, by the server's clock
    :param read: how far each companion was read, by its name
    :param open: jobs up to ``last`` whose end nothing proved, most of them stored
    :param deleted: those of them of which the server has reported that they were deleted in flight
    :param early: jobs after ``last`` whose end was read
    :param claimed: jobs that a worker ended, and of which it isn't known whether its consumer had them
    :param discarded: jobs that ended because somebody discarded them
    :param unaccounted: jobs that are gone without evidence of their end
    :param unknown: jobs that are gone, and of whose end there may have been evidence
    :param why_unknown: why that isn't known, a clause each
    :param complete_since: since when the companions have all evidence about other jobs, where they dropped some that
        was stored after ``taken_at``
    :param why_incomplete: why not since earlier
    :param entered: jobs whose end nothing but the dead letter queue has stated since ``entered_since``: a loss of power
        may take its last entries, and leave this checkpoint
    :param entered_before: the same of some time before that
    :param entered_since: by the server's clock
    :param consumers: by name whether the server reported each acknowledgement
    :param completing: consumers of which a completion was stored
    :param revision: the checkpoint's sequence in the audit
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[2] = 2
    stream: str
    created: str
    first: Annotated[int, Field(ge=1)] = 1
    last: Annotated[int, Field(ge=0)] = 0
    stored: Annotated[int, Field(ge=0)] = 0
    taken_at: datetime = datetime.min.replace(tzinfo=UTC)
    read: dict[str, ReadPosition] = Field(default_factory=dict)
    open: _Ranges = Field(default_factory=SequenceRanges)
    deleted: _Ranges = Field(default_factory=SequenceRanges)
    early: _Ranges = Field(default_factory=SequenceRanges)
    claimed: _Ranges = Field(default_factory=SequenceRanges)
    discarded: _Ranges = Field(default_factory=SequenceRanges)
    unaccounted: _Ranges = Field(default_factory=SequenceRanges)
    unknown: _Ranges = Field(default_factory=SequenceRanges)
    why_unknown: tuple[str, ...] = ()
    complete_since: datetime = datetime.min.replace(tzinfo=UTC)
    why_incomplete: str = ""
    entered: _Ranges = Field(default_factory=SequenceRanges)
    entered_before: _Ranges = Field(default_factory=SequenceRanges)
    entered_since: datetime = datetime.min.replace(tzinfo=UTC)
    consumers: dict[str, bool] = Field(default_factory=dict)
    completing: tuple[str, ...] = ()
    revision: int = 0


async def read_checkpoint(connection: Connection, audit: str, queue: str, created: str) -> AccountCheckpoint:
    """Read the last checkpoint of a queue; an empty checkpoint where the audit has none.

    :param audit: the audit's stream
    :param created: when the work queue was created, in the server's own text
    """
    subject = account_subject(queue)
    # The next one is stored on condition that this message is still the last, whoever published it.
    message, revision = await last_with_position(connection, audit, subject)
    nothing = AccountCheckpoint(stream=queue, created=created, revision=revision)
    if message is None:
        return nothing
    try:
        checkpoint = AccountCheckpoint.model_validate_json(message.data)
    except ValidationError:
        return nothing
    return checkpoint.model_copy(update={"revision": revision}) if checkpoint.created == created else nothing


async def write_checkpoint(connection: Connection, audit: Mapping[str, Any], checkpoint: AccountCheckpoint) -> None:
    """Store a checkpoint, unless another account has stored one since that of its ``revision``.

    Where it isn't stored, the next account reads the same evidence once more.

    :param audit: the server's STREAM.INFO of the audit
    """
    name, body = audit["config"]["name"], checkpoint.model_dump_json(exclude={"revision"}).encode()
    largest = audit["config"].get("max_msg_size", -1)
    room = min(connection.max_payload, largest) if largest > 0 else connection.max_payload
    if len(body) + _HEADER_BYTES > room:
        log.warning("The account of %s needs %d bytes and isn't stored in %s", checkpoint.stream, len(body), name)
        return
    if not all(value.is_storable for _, value in checkpoint if isinstance(value, SequenceRanges)):
        log.warning("The account of %s isn't stored in %s: its jobs are too scattered", checkpoint.stream, name)
        return
    condition = {"Nats-Expected-Last-Subject-Sequence": str(checkpoint.revision)}
    try:
        await store(connection, account_subject(checkpoint.stream), body, condition)
    except JetStreamProviderError as error:
        log.info("The account of %s isn't stored: %s", checkpoint.stream, error)
