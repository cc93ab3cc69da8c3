"""The trigger of DAGs that messages start, for Airflow's ``AssetWatcher``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.tasks.arguments import check_positive_seconds, check_text
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.triggers.message_doorbell import ring
from airflow_provider_jetstream.triggers.message_payload import (
    payload_events,
    payload_key,
    payload_producer,
    require_payload_mode,
)
from airflow_provider_jetstream.triggers.payload_options import PayloadOptions
from airflow_provider_jetstream.triggers.watcher_arguments import dict_of_text, dicts_as_texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable

    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource

DOORBELL: Final = "doorbell"
PAYLOAD: Final = "payload"

# A run that an event starts needs some seconds until it pulls.
DEFAULT_INTERVAL = 10.0


class JetStreamMessageTrigger(BaseEventTrigger):
    """Fires when messages wait on a consumer of a work queue.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param consumer: the name of one of the queue's consumers
    :param mode: ``doorbell`` fires an event that says how many messages wait, and takes none: the DAG pulls them.
        ``payload`` takes the messages and fires one event for each with its body; it needs Airflow 3.3
    :param interval: of the mode ``doorbell``: seconds from an event to the next at least. While messages go on waiting,
        the time doubles from event to event, up to :data:`LONGEST_INTERVAL` seconds
    :param nats_conn_id: the Airflow connection
    :param payload: of the mode ``payload``: the fields of
        :class:`~airflow_provider_jetstream.triggers.payload_options.PayloadOptions`
    :raises ArgumentError: an argument can't be used
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
    """

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        consumer: str,
        mode: Literal["doorbell", "payload"] = DOORBELL,
        interval: float = DEFAULT_INTERVAL,
        nats_conn_id: str = "nats_default",
        **payload: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_text(nats_conn_id=nats_conn_id, consumer=consumer)
        check_positive_seconds(interval=interval)
        if mode not in (DOORBELL, PAYLOAD):
            raise ArgumentError(f"expected {DOORBELL} or {PAYLOAD} as mode, found {mode!r}: correct it")
        if payload and mode != PAYLOAD:
            raise ArgumentError(
                f"expected none of {', '.join(sorted(payload))} in the mode {mode}, found them: remove them, or set"
                f" mode={PAYLOAD!r}"
            )
        if mode == PAYLOAD:
            require_payload_mode()
        queue = load_queue(dict_of_text(work_queue))
        queue.consumer(consumer)
        self.work_queue = queue.model_dump(mode="json", exclude_unset=True)
        self.consumer = consumer
        self.mode = mode
        self.interval = interval
        self.nats_conn_id = nats_conn_id
        self.payload = PayloadOptions.of(payload) if mode == PAYLOAD else None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        arguments = {
            "work_queue": self.work_queue,
            "consumer": self.consumer,
            "mode": self.mode,
            "nats_conn_id": self.nats_conn_id,
            **(self.payload.as_json() if self.payload else {"interval": self.interval}),
        }
        return f"{type(self).__module__}.{type(self).__name__}", dicts_as_texts(arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire an event whenever messages wait, and again while they do; of the mode ``doorbell``.

        :raises ArgumentError: the mode is another
        """
        if self.payload is not None:
            raise ArgumentError(
                "expected a triggerer to share the pull of mode='payload', found one that runs the trigger alone, as"
                " dag.test() does: run the DAG in a scheduler, or use mode='doorbell'"
            )
        stream = str(self.work_queue["name"])
        async for waiting in ring(self.nats_conn_id, stream, self.consumer, self.interval, self.log):
            yield TriggerEvent(waiting)  # type: ignore[no-untyped-call]

    def shared_stream_key(self) -> Hashable | None:
        """Return what the triggers have in common that share one pull, in the mode ``payload``."""
        if self.payload is None:
            return None
        return payload_key(self)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> Any:
        """Return what pulls for all triggers of one key, in the mode ``payload``."""
        return payload_producer(kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Fire one event for each message of the shared pull, in the mode ``payload``."""
        if self.payload is None:
            raise ArgumentError("expected mode='payload' for a shared stream, found mode='doorbell'")
        async for event in payload_events(self.payload.body, shared_stream):
            yield event
