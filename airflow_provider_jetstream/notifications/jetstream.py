"""The notifier that publishes what became of a task or a DAG run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseNotifier

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError, WrongStreamError
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.origin import Origin, short_digest
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import DEFAULT_CONN_ID, is_templated
from airflow_provider_jetstream.tasks.context import NamedMissingValues
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import dag_file, load_queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue

# What one event has in common however often its callback runs.
_IDENTITY = ("dag_id", "run_id", "task_id", "map_index", "try_number", "state")


@dataclass(frozen=True, slots=True)
class _Notification:
    subject: str
    body: dict[str, Any]
    job_id: str
    origin: Origin | None
    queue: WorkQueue | None
    diagnosed: WorkQueue | None


class JetStreamNotifier(NamedMissingValues, BaseNotifier):
    """Publish a message about a task or a DAG run, from ``on_failure_callback`` and the like.

    Where a stream captures the subject, the message is a stored job with an id of its own: a callback that runs twice
    for the same try of a task stores it once. Elsewhere it is sent to whoever subscribes at the moment.

    The body is a JSON object: ``message``; of the task ``dag_id``, ``run_id``, ``task_id``, ``map_index``,
    ``try_number``, ``state`` and ``log_url``; the ``exception``; and, where a queue is diagnosed, the ``diagnosis``,
    whose ``text`` says in some lines what broke, what to do, and what speaks for it. Of a DAG run it has ``dag_id``,
    ``run_id`` and ``reason``. What isn't known is absent.

    :param subject: where to publish
    :param message: text for people
    :param queue: the work queue that the subject belongs to: a
        :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path. Without it, the server
        says whether a stream captures the subject
    :param diagnose: a work queue whose dead letters the notification diagnoses
    :param nats_conn_id: the Airflow connection
    :param context: Airflow's, where the notifier is awaited outside of a callback
    :raises ArgumentError: the subject can't be published to
    """

    template_fields: Sequence[str] = ("subject", "message", "queue", "diagnose", "nats_conn_id")

    def __init__(
        self,
        *,
        subject: str,
        message: str | None = None,
        queue: QueueSource | None = None,
        diagnose: QueueSource | None = None,
        nats_conn_id: str = DEFAULT_CONN_ID,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        known: Any = context
        super().__init__(known)
        self.subject = subject
        self.message = message
        self.queue = queue
        self.diagnose = diagnose
        self.nats_conn_id = nats_conn_id
        # Callbacks run outside of a task, where nothing else tells it.
        self._dag_file = dag_file()
        if not is_templated(subject):
            _check_subject(subject)

    def notify(self, context: Context) -> None:
        """Publish from a callback, blocking.

        :raises JetStreamProviderError: the message isn't known to be stored or sent
        """
        hook_for(self.nats_conn_id).blocking(_send, self._notification(context))

    async def async_notify(self, context: Context) -> None:
        """Publish from the triggerer, awaited."""
        await hook_for(self.nats_conn_id).awaited(_send, self._notification(context))

    def _notification(self, context: Context) -> _Notification:
        _check_subject(self.subject)
        body = {"message": self.message, **_event(context)}
        body = {name: value for name, value in body.items() if value is not None}
        names = json.dumps([body.get(name) for name in _IDENTITY])
        job_id = f"notification-{short_digest(self.subject, names, self.message or '')}"
        origin = None
        if "task_id" in body:
            origin = Origin(body["dag_id"], body["run_id"], body["task_id"], body["map_index"])
        return _Notification(
            self.subject,
            body,
            job_id,
            origin,
            None if self.queue is None else load_queue(self.queue, file=self._dag_file),
            None if self.diagnose is None else load_queue(self.diagnose, file=self._dag_file),
        )


def _event(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the callback is about; a callback of a DAG has no task, and one of a deadline has neither."""
    instance, run = context.get("ti"), context.get("dag_run")
    error = context.get("exception")
    exception = one_line(f"{type(error).__name__}: {error}") if isinstance(error, BaseException) else None
    values: dict[str, Any] = {
        "dag_id": getattr(instance or run, "dag_id", None),
        "run_id": getattr(instance or run, "run_id", None) or context.get("run_id"),
        "reason": context.get("reason"),
        "exception": exception,
    }
    if instance is None:
        return values
    map_index = getattr(instance, "map_index", None)
    state = getattr(instance, "state", None)
    return values | {
        "task_id": instance.task_id,
        "map_index": -1 if map_index is None else map_index,
        "try_number": getattr(instance, "try_number", None),
        "state": None if state is None else str(getattr(state, "value", state)),
        "log_url": getattr(instance, "log_url", None),
    }


async def _send(connection: Connection, notification: _Notification) -> None:
    body, headers = dict(notification.body), {MSG_ID: notification.job_id, JOB_ID: notification.job_id}
    if notification.diagnosed:
        body["diagnosis"] = await _diagnosis(connection, notification.diagnosed)
    if origin := notification.origin:
        headers |= {MSG_ID: origin.message_id(notification.job_id), **origin.headers()}
    payload = json.dumps(body).encode()
    if notification.queue is None and not await _is_captured(connection, notification.subject):
        await connection.publish(notification.subject, payload, headers)
        # The server answers it behind the message, so it has the message when the connection is closed.
        await connection.api("INFO")
        return
    ack = await runtime.store(connection, notification.subject, payload, headers)
    if notification.queue and ack.stream != notification.queue.name:
        raise WrongStreamError(
            f"expected {notification.queue.name} to store the notification on {notification.subject}, found"
            f" {ack.stream}: correct the subject or the queue"
        )


async def _is_captured(connection: Connection, subject: str) -> bool:
    configs = [info["config"] for info in await runtime.list_streams(connection, subject)]
    return any(covered_by_any(config.get("subjects") or [], subject) for config in configs)


async def _diagnosis(connection: Connection, queue: WorkQueue) -> dict[str, Any]:
    """Diagnose a queue; a notification that can't say more is still worth sending."""
    try:
        return (await runtime.diagnose_dead_letters(connection, queue)).as_json(groups=3)
    except JetStreamProviderError as error:
        problem = one_line(str(error))
        return {"queue": queue.name, "error": problem, "text": f"{queue.name} can't be diagnosed: {problem}"}


def _check_subject(subject: object) -> None:
    problem = "it is no text" if not isinstance(subject, str) else subject_problem(subject, wildcards=False)
    if problem:
        raise ArgumentError(f"expected a subject to publish a notification on, found {subject!r}: {problem}")
