"""The events that the server and the workers publish about jobs, as models.

Protocol: the ``io.nats.jetstream.advisory.v1`` and ``metric.v1`` schemas of the NATS project; completions,
cancellations and cancelled jobs are this package's own.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.limits import EVENT_ID, INTEGER, NAME, SEQUENCE, SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line

# Before the models, which pydantic builds in full only where these names are already known.
# Not what the server refuses as the name of a stream or a consumer: it would be a part of lines and of subjects.
Name = Annotated[str, Field(max_length=NAME, pattern=r"^[^\s\p{C}.*>]*$")]
JobId = Annotated[str, Field(max_length=EVENT_ID)]
SequenceNumber = Annotated[int, Field(ge=0, le=SEQUENCE)]
Count = Annotated[int, Field(ge=0, le=INTEGER)]
Line = Annotated[str, AfterValidator(lambda text: one_line(text) or "")]
ShortLine = Annotated[str, AfterValidator(lambda text: (one_line(text) or "")[:SHOWN_VALUE].rstrip())]


class _Advisory(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: JobId = ""
    timestamp: datetime
    domain: Annotated[str, Field(max_length=NAME)] | None = None
    stream: Name
    consumer: Name
    stream_seq: SequenceNumber
    deliveries: Count

    def is_of_server(self, stream: str, domain: str) -> bool:
        """Return whether an event of the server is about a stream, and not about one of that name in another domain.

        :param domain: the JetStream domain of the stream's server; empty where it has none
        """
        # A hub receives what the servers of its leaf nodes publish, and they what the hub does.
        return self.stream == stream and (self.domain or "") == domain


class MaxDeliveries(_Advisory):
    """A job used up its deliveries; it is still in its stream."""

    type: Literal["io.nats.jetstream.advisory.v1.max_deliver"] = "io.nats.jetstream.advisory.v1.max_deliver"


class Terminated(_Advisory):
    """A job was terminated; the server has removed it from a work queue.

    :param reason: the worker's, or the server's own when the job was deleted in flight
    """

    type: Literal["io.nats.jetstream.advisory.v1.terminated"] = "io.nats.jetstream.advisory.v1.terminated"
    reason: Line = ""


class Nak(_Advisory):
    """A worker sent a nak for a job."""

    type: Literal["io.nats.jetstream.advisory.v1.nak"] = "io.nats.jetstream.advisory.v1.nak"


class AckMetric(_Advisory):
    """A job was acknowledged, as the server's sampling reports it.

    :param ack_time: nanoseconds from the last delivery to the acknowledgement
    """

    type: Literal["io.nats.jetstream.metric.v1.consumer_ack"] = "io.nats.jetstream.metric.v1.consumer_ack"
    ack_time: Count = 0


class Completion(_Advisory):
    """A worker finished a job.

    :param job_id: the job's own id
    :param worker: the worker's name
    :param result: what the handler returned, as JSON
    """

    type: Literal["io.airflow.jetstream.v1.completion"] = "io.airflow.jetstream.v1.completion"
    job_id: JobId | None = None
    worker: Line | None = None
    result: Any = None


class Cancelled(_Advisory):
    """A worker received a cancelled job and settled it without running it.

    :param job_id: the job's own id
    :param worker: the worker's name
    :param why: the reason of the cancellation
    :param by: the person or task that cancelled it
    """

    type: Literal["io.airflow.jetstream.v1.cancelled"] = "io.airflow.jetstream.v1.cancelled"
    job_id: JobId | None = None
    worker: Line | None = None
    why: Line | None = None
    by: Line | None = None


class ReportedAttempt(_Advisory):
    """What a worker says of one attempt at a job: how far it is, or how it failed.

    :param deliveries: which delivery of the job it is
    :param job_id: the job's own id
    :param worker: the worker's name
    :param fraction: how much of the job is done, from 0 to 1
    :param text: what the handler is doing
    :param failed: whether the attempt has failed
    :param seconds: how long it took until it failed
    :param error_class: the class of the error
    :param error_message: the error's text
    :param error_place: where the handler failed, as ``module:function:line``
    :param waits_until: before this time of the server's clock the job certainly isn't delivered again
    :param requested_at: a time of the server's clock before this delivery
    :param ack_wait: the seconds that the worker had for this delivery
    :param asked: what a person has asked for since
    :param asked_by: the person or program that asked
    :param asked_at: when
    :param why: the reason, for people
    """

    type: Literal["io.airflow.jetstream.v1.attempt"] = "io.airflow.jetstream.v1.attempt"
    stream_seq: Annotated[int, Field(ge=1, le=SEQUENCE)]
    deliveries: Annotated[int, Field(ge=1, le=INTEGER)]
    job_id: JobId | None = None
    worker: Line | None = None
    fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    text: ShortLine | None = None
    failed: bool = False
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    error_class: ShortLine | None = None
    error_message: Line | None = None
    error_place: ShortLine | None = None
    waits_until: AwareDatetime | None = None
    requested_at: AwareDatetime | None = None
    ack_wait: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    asked: Literal["retry", "give_up"] | None = None
    asked_by: Line | None = None
    asked_at: AwareDatetime | None = None
    why: Line | None = None


class CancellationRequest(BaseModel):
    """A request to cancel all jobs with an id, or one of them.

    :param stream_seq: the stream sequence of the only job that it is for
    :param why: the reason, for people
    :param by: the person or task that requests it
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.cancellation"] = "io.airflow.jetstream.v1.cancellation"
    timestamp: datetime
    stream: Name
    job_id: JobId
    stream_seq: SequenceNumber | None = None
    why: Line | None = None
    by: Line | None = None


AnyAdvisory: TypeAlias = MaxDeliveries | Terminated | Nak | AckMetric | Completion | Cancelled

# The reason with which the server reports a job that was deleted while a worker had it.
DELETED_IN_FLIGHT = "Unacknowledged message was deleted"

_ADAPTER: TypeAdapter[AnyAdvisory] = TypeAdapter(Annotated[AnyAdvisory, Field(discriminator="type")])


def parse_advisory(data: bytes) -> AnyAdvisory | None:
    """Parse a message's body as an advisory; ``None`` for any other body, since a stream may capture more."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError:
        return None


def parse_cancellation_request(data: bytes) -> CancellationRequest | None:
    """Parse a message's body as a request to cancel jobs; ``None`` for any other body."""
    try:
        return CancellationRequest.model_validate_json(data)
    except ValidationError:
        return None


def parse_attempt(data: bytes) -> ReportedAttempt | None:
    """Parse a message's body as what a worker says of an attempt; ``None`` for any other body."""
    try:
        return ReportedAttempt.model_validate_json(data)
    except ValidationError:
        return None
