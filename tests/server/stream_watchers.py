"""Runs watchers of a shared stream as a triggerer of Airflow 3.3 does, with a list in place of the database."""

import asyncio
import json
import pkgutil
from typing import Any, Self

import pytest
from airflow.triggers.base import BaseEventTrigger
from airflow.triggers.shared_stream import SharedStreamManager

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
from testbed.face import NatsPyConnection
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, stored_count

# A triggerer exchanges events and confirmations with its supervisor about once a second.
_ROUND = 0.05


def connect_airflow_to(server: NatsServer, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Make a server the one behind Airflow's connection ``nats_default``."""
    connection = {"conn_type": "nats", "host": server.url, "extra": {"timeout": 2}} | fields
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(connection))


def payload_trigger(queue: WorkQueue, **options: Any) -> JetStreamMessageTrigger:
    """Return a trigger for the consumer of :func:`~testbed.queues.small_queue`."""
    return JetStreamMessageTrigger(work_queue=queue, consumer=CONSUMER, mode="payload", **{"max_wait": 1} | options)


async def is_empty(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    """Return whether no message is left."""
    return not await stored_count(connection, queue.name)


class StreamWatchers:
    """The triggers of one triggerer.

    :param ack_timeout: seconds that Airflow has for storing an event
    :ivar stored: the payloads that the database has, with the numbers of their triggers
    :ivar fired: the events that wait to be stored
    :ivar stores: whether the database takes events
    :ivar errors: what triggers failed with
    """

    def __init__(self, *triggers: BaseEventTrigger, ack_timeout: float = 300.0, queue_size: int = 1024) -> None:
        self.manager = SharedStreamManager(ack_timeout=ack_timeout, max_subscriber_queue=queue_size)
        self.stored: list[tuple[int, dict[str, Any]]] = []
        self.fired: list[tuple[int, dict[str, Any], int | None]] = []
        self.stores = True
        self.errors: list[Exception] = []
        self._triggers = list(triggers)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._storing = asyncio.create_task(self._store_events())
        for number, trigger in enumerate(self._triggers):
            self.start(number, trigger)
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in list(self._tasks):
            await self.stop(number)
        self._storing.cancel()
        await asyncio.gather(self._storing, return_exceptions=True)

    def start(self, number: int, trigger: BaseEventTrigger) -> None:
        """Start a trigger from its stored form."""
        path, arguments = trigger.serialize()
        stored: BaseEventTrigger = pkgutil.resolve_name(path)(**json.loads(json.dumps(arguments)))
        self._tasks[number] = asyncio.create_task(self._run(number, stored))

    async def stop(self, number: int) -> None:
        """Cancel a trigger, as after its DAG was paused."""
        task = self._tasks.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def sequences(self, number: int = 0) -> list[int]:
        """Return the stream sequences of the messages whose events are stored for a trigger."""
        return [payload["sequence"] for trigger, payload in self.stored if trigger == number]

    async def _run(self, number: int, trigger: BaseEventTrigger) -> None:
        key = trigger.shared_stream_key()
        stream = self.manager.subscribe(trigger_id=number, trigger=trigger, key=key)
        try:
            async for event in trigger.filter_shared_stream(stream):
                payload = json.loads(json.dumps(event.payload, allow_nan=False))
                seq = self.manager.bind_pending_event(trigger_id=number, key=key)
                self.fired.append((number, payload, seq))
        except Exception as error:
            self.errors.append(error)
            raise
        finally:
            await self.manager.unsubscribe(number, key)

    async def _store_events(self) -> None:
        while True:
            await asyncio.sleep(_ROUND)
            if not self.stores:
                continue
            fired, self.fired = self.fired, []
            self.stored += [(number, payload) for number, payload, _ in fired]
            self.manager.confirm_persisted([seq for _, _, seq in fired if seq is not None])
