"""A job that is sent and has no final answer yet, and how long and how often it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.frame_encoder import encode_message, encode_subject
from airflow_provider_jetstream.jetstream.client.headers import encode_headers

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob


@dataclass(frozen=True, slots=True)
class SendingLimits:
    """How long and how often jobs are sent.

    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent for want of an answer
    :param away_timeout: how many seconds the server may say that it can't store a job just now, as it does while it
        shuts down, starts, or elects a leader
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    """

    ack_timeout: float
    attempts: int
    away_timeout: float
    room_timeout: float


@dataclass(slots=True)
class JobInFlight:
    """A job that is sent.

    :param deadline: when it is sent again, by the monotonic clock
    :param attempts: how often it was sent for want of an answer
    :param foreign_answer: whether something answered that is no stream
    :param answer_lost: whether an attempt had no answer, so that the job may be stored
    :param passing_since: since when the server can't store it just now
    :param passing: how often that was the answer
    :param is_passing: whether that was the last answer
    :param refusal: why the server can't; ``None`` where no stream answers
    """

    job: OutgoingJob
    payload: bytes
    deadline: float = 0.0
    attempts: int = 1
    foreign_answer: bool = False
    answer_lost: bool = False
    passing_since: float = 0.0
    passing: int = 0
    is_passing: bool = False
    refusal: JetStreamProviderError | None = None

    def encode(self, reply: bytes, limit: int) -> bytes | None:
        """Return it as it is sent; ``None`` where it is too large.

        :param reply: the subject for its answer
        :param limit: the size of the largest message, after which the server closes the connection
        """
        headers = encode_headers(self.job.headers)
        if len(self.payload) + len(headers) > limit:
            return None
        return encode_message(encode_subject(self.job.subject), self.payload, headers, reply)
