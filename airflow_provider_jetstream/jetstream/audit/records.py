"""The audit's records: one action on one dead letter, and the progress of a redrive."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

Action = Literal["redriven", "requeued", "parked", "discarded", "handled"]


class AuditRecord(BaseModel):
    """What records of the audit have in common."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str


class KeptLetter(BaseModel):
    """What is kept of a discarded letter, so that it can be brought back.

    :param redrive: the id of the redrive that discarded it
    :param headers: the headers of the record that a parked letter has, as they are on the wire, in base64
    :param copy_in: where the body is: in the ``archive``, in this ``record``, or ``nowhere``
    :param body: the body in base64, where it is in this record
    :param last_entry: its last entry in the dead letter queue; a later one was stored to bring it back
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    redrive: str
    headers: str
    copy_in: Literal["archive", "record", "nowhere"]
    body: str | None = None
    last_entry: int = 0


class LetterRecord(AuditRecord):
    """One action on one dead letter.

    :param sequence: the job's stream sequence
    :param stored_at: when the job was stored, in the server's own text; with ``stream``, ``created`` and ``sequence``
        the letter's identity, since a loss of power gives a sequence to another job. Absent where only a worker's copy
        of the job was left, which states no exact time
    :param job_id: the job's own id, shortened
    :param action: ``redriven`` as a new job, ``requeued`` in place, ``parked``, ``discarded``, or found to be
        ``handled`` by a handler of the dead letter queue
    :param new_sequence: the new job's stream sequence, or the sequence of the parked letter in the dead letter queue
    :param new_stream: the new job's stream, where it isn't the letter's own
    :param copy_of: the letter of this queue of which the job was a copy, if it was one
    :param subject: the new job's subject
    :param consumer: the consumer that delivered the job, if any did
    :param left_out: headers for which the new job had no room
    :param redrives: how often the job has been redriven now
    :param reason: why the job was dead
    :param died_at: when it died
    :param fingerprint: the fingerprint of its death
    :param error_class: the type of the error that it died of, where a worker recorded that
    :param error_message: the beginning of the error's text, or of the worker's explanation
    :param why: the reason given for the redrive
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param run: the key of the redrive
    :param wave: the wave of the redrive, where it has waves
    :param changes: what a transform changed
    :param kept: what is kept of a discarded letter
    """

    sequence: int
    stored_at: str | None = None
    job_id: str | None = None
    action: Action
    new_sequence: int | None = None
    new_stream: str | None = None
    copy_of: int | None = None
    subject: str
    consumer: str | None = None
    left_out: dict[str, str] | None = None
    redrives: int = 0
    reason: str
    died_at: datetime | None = None
    fingerprint: str
    error_class: str | None = None
    error_message: str | None = None
    why: str | None = None
    who: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    wave: int | None = None
    changes: dict[str, Any] | None = None
    kept: KeptLetter | None = None

    @property
    def in_place(self) -> bool:
        """Whether the stored job itself is delivered again, rather than a copy."""
        return self.action == "requeued"

    @property
    def leaves_job(self) -> bool:
        """Whether the stored job stays, so that it may have died once more since."""
        return self.action in ("requeued", "handled")


class RunRecord(AuditRecord):
    """The progress of one redrive.

    :param run: its key
    :param from_sequence: the first sequence of the audit that may hold one of its letters
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param why: the reason given for it
    :param report: counts so far
    :param finished: whether the redrive is complete
    :param redrive: the redrive's id
    """

    run: str
    from_sequence: int
    who: dict[str, Any] = Field(default_factory=dict)
    why: str | None = None
    report: dict[str, Any] = Field(default_factory=dict)
    finished: bool = False
    redrive: str | None = None


_Model = TypeVar("_Model", bound=BaseModel)


def encode_record(record: AuditRecord) -> bytes:
    """Encode a record; what isn't UTF-8 in it, as in a header that was left out, is replaced."""
    try:
        return record.model_dump_json(exclude_none=True).encode()
    except PydanticSerializationError:
        values = record.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def parse_record(model: type[_Model], message: StoredMessage | None, created: str | None = None) -> _Model | None:
    """Parse a record of any kind, with the server's time of when it was stored; ``None`` where the message isn't one.

    :param created: when the work queue was created, in the server's own text; records of another one don't count
    """
    if message is None or proves_nothing(message):
        return None
    try:
        record = model.model_validate_json(message.data)
    except ValidationError:
        return None
    if created is not None and getattr(record, "created", None) != created:
        return None
    # Advisories have the server's time; records are compared with them.
    return record.model_copy(update={"at": message.stored_at}) if "at" in model.model_fields else record
