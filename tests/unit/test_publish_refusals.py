"""Which refusals of a stream pass by themselves, need room, or are final."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JobError,
    JobTooLargeError,
    QueueFullError,
    TerminalError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.publishing.refusals import is_full, is_passing, job_error

# Status, error code and description as the server sends them.
_REFUSALS = [
    (503, 10077, "maximum messages exceeded", QueueFullError),
    (503, 10077, "maximum bytes exceeded", QueueFullError),
    (503, 10077, "maximum messages per subject exceeded", QueueFullError),
    (503, 10077, "store is closed", UnreachableError),
    (503, 10077, "stream closed", UnreachableError),
    (400, 10002, "resource limits exceeded for account", QueueFullError),
    (503, 10023, "insufficient resources", QueueFullError),
    (500, 10028, "insufficient memory resources available", QueueFullError),
    (500, 10047, "insufficient storage resources available", QueueFullError),
    (503, 10008, "JetStream system temporarily unavailable", UnreachableError),
    (500, 10009, "JetStream cluster can not handle request", UnreachableError),
    (503, 10004, "incomplete results", UnreachableError),
    (500, 10041, "raft: not leader", UnreachableError),
    (409, 10158, "duplicate message id is in process", UnreachableError),
    (429, 10167, "too many requests", UnreachableError),
    (400, 10054, "message size exceeds maximum allowed", JobTooLargeError),
    (400, 10060, "expected stream does not match", JobError),
    (400, 10166, "per-message TTL is disabled", JobError),
    (500, 10109, "stream sealed", JobError),
]


@pytest.mark.parametrize(("status", "code", "description", "expected"), _REFUSALS)
def test_a_refusal_is_transient_where_the_server_means_it_so(
    status: int, code: int, description: str, expected: type[Exception]
) -> None:
    refusal = ApiError(status, code, description, "q.a", stream="q")
    error = job_error(refusal)
    assert type(error) is expected
    assert isinstance(error, TransientError) is not isinstance(error, TerminalError)
    assert (is_full(refusal), is_passing(refusal)) == (expected is QueueFullError, expected is UnreachableError)
    assert description in str(error) or expected is JobTooLargeError
