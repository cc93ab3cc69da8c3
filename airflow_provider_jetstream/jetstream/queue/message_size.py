"""The size of a job as the server counts it, and of its redriven copy, compared with a queue's limit.

The server counts headers and body towards ``max_msg_size``, and so does this module, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_provider_jetstream.jetstream.client.headers import Headers, is_servers, wire_size
from airflow_provider_jetstream.jetstream.contract import (
    AIRFLOW_TASK,
    JOB_ID,
    MSG_ID,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    TRACE_PARENT,
    TRACE_STATE,
    due_message_id,
)
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields

# The headers that a redriven copy leaves out where it has no room, in this order; the audit has all of them but the
# trace.
OPTIONAL_HEADERS: Final = (
    REDRIVE_CONSUMER,
    REDRIVE_STREAM,
    REDRIVE_SEQUENCE,
    TRACE_STATE,
    TRACE_PARENT,
    REDRIVE_COUNT,
)

# Placeholders of the length of a message id, a redriven copy's, a task's key, and at most that of a time.
_MESSAGE_ID = "x" * 22
_COPY_ID = "redrive:99:" + _MESSAGE_ID
_TASK_KEY = "x" * 32
# The longest message id of a job that a repeated schedule makes.
LONGEST_DUE_ID = due_message_id("", 10**20 - 1)

_JOB_HEADERS = wire_size(Headers([(MSG_ID, _MESSAGE_ID), (AIRFLOW_TASK, _TASK_KEY)]))
_SCHEDULED_HEADERS = wire_size(Headers([(AIRFLOW_TASK, _TASK_KEY), (JOB_ID, _MESSAGE_ID), (MSG_ID, LONGEST_DUE_ID)]))
_COPY_HEADERS = wire_size(Headers([(AIRFLOW_TASK, _TASK_KEY), (JOB_ID, _MESSAGE_ID), (MSG_ID, _COPY_ID)]))


class Measured(NamedTuple):
    """The size of a job besides its headers.

    :param body_size: the size of its body in bytes
    :param copied_id: the ``Job-Id`` that only its redriven copy needs, if it needs one
    """

    body_size: int
    copied_id: str | None


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest message that a queue's stream stores.

    :param stream: the stream
    :param max_msg_size: its limit in bytes
    :param redriven: whether its jobs may be redriven, as copies
    """

    stream: str
    max_msg_size: int
    redriven: bool

    @classmethod
    def of(cls, queue: QueueFields, config: Mapping[str, Any] | None = None) -> SizeLimit | None:
        """Return the limit of a queue; ``None`` where it has none.

        :param config: the stream's configuration on the server, where it is known; else the declaration counts
        """
        limit = queue.max_msg_size if config is None else config.get("max_msg_size")
        if limit is None or limit <= 0:
            return None
        return cls(queue.name, limit, queue.dead_letters is not None)

    def problem(self, job: Measured, headers: Mapping[str, str]) -> str | None:
        """Return why the stream wouldn't store a job or its redriven copy; ``None`` where it stores both.

        :param headers: all headers of the job
        """
        advice = f"send a reference instead of the data, or raise max_msg_size of {self.stream}"
        size = job.body_size + wire_size(headers)
        if size > self.max_msg_size:
            return (
                f"has {size} bytes, {job.body_size} of them its body, and {self.stream} stores at most"
                f" {self.max_msg_size}: {advice}"
            )
        copy_size = job.body_size + _least_copy_headers(headers.items(), job.copied_id)
        if self.redriven and copy_size > self.max_msg_size:
            return (
                f"has {size} bytes, but its redriven copy would have at least {copy_size}, and {self.stream} stores at"
                f" most {self.max_msg_size}, so that it couldn't be redriven as a dead letter: {advice}"
            )
        return None


def size_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    """Warn of a limit that leaves less for a job's body than the headers need."""
    limit, needed = queue.max_msg_size, _JOB_HEADERS
    if limit is None or limit <= 0:
        return
    headers = f"the headers of a DAG's job take {_JOB_HEADERS} bytes"
    if queue.dead_letters:
        needed = max(_JOB_HEADERS, _COPY_HEADERS)
        headers += f", and those of its redriven copy {_COPY_HEADERS}"
    if queue.schedules:
        needed = max(needed, _SCHEDULED_HEADERS)
        headers += f", and those of a scheduled job {_SCHEDULED_HEADERS}"
    if limit < 2 * needed:
        left = f"{limit - needed} bytes for its body" if limit > needed else "nothing for its body"
        yield QueueWarning("message-size", f"max_msg_size {limit}: {headers}, which leaves {left}; raise the limit")


def _least_copy_headers(headers: Iterable[tuple[str, str]], copied_id: str | None) -> int:
    own = [(name, value) for name, value in headers if not is_servers(name) and name not in OPTIONAL_HEADERS]
    added = [(JOB_ID, copied_id)] if copied_id else []
    return wire_size(Headers([*own, *added, (MSG_ID, _COPY_ID)]))
