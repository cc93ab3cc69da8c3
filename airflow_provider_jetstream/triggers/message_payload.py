"""The mode ``payload`` of :class:`.message.JetStreamMessageTrigger`: an event for each message, with its body.

Airflow 3.3 runs one pull for all triggers of one key, and says when the database has an event
(``airflow.triggers.shared_stream``). Only then is its message acknowledged.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.triggers.message_event import message_event
from airflow_provider_jetstream.triggers.payload_options import PayloadOptions
from airflow_provider_jetstream.triggers.watcher_arguments import dict_of_text
from airflow_provider_jetstream.worker.errors import InvalidBodyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Mapping

    from airflow.triggers.shared_stream import SharedStreamProducer

    from airflow_provider_jetstream.triggers.message_event import BodyForm
    from airflow_provider_jetstream.triggers.taken_messages import TakenMessage


def require_payload_mode() -> None:
    """Refuse an Airflow that doesn't say when it has stored an event.

    :raises ArgumentError: it is older than 3.3
    """
    if hasattr(BaseEventTrigger, "create_shared_stream_producer"):
        return
    from airflow import __version__ as found

    raise ArgumentError(
        "expected Airflow 3.3 or newer for mode='payload', which acknowledges a message once Airflow has stored its"
        f" event, found {found}: upgrade Airflow, or use mode='doorbell'"
    )


def payload_key(trigger: BaseEventTrigger) -> Hashable:
    """Return all that the shared pull uses; only the form of the body is each trigger's own."""
    path, arguments = trigger.serialize()
    return (path, json.dumps({name: value for name, value in arguments.items() if name != "body"}, sort_keys=True))


def payload_producer(arguments: Mapping[str, Any]) -> SharedStreamProducer:
    """Return what pulls for all triggers of one key.

    :param arguments: those of the first trigger
    """
    # Not above: Airflow has what it stands on since 3.3.
    from airflow_provider_jetstream.triggers.message_producer import MessageProducer

    options = PayloadOptions.of(
        {field.name: arguments[field.name] for field in fields(PayloadOptions) if field.name in arguments}
    )
    queue = dict_of_text(arguments["work_queue"])
    return MessageProducer(arguments["nats_conn_id"], queue, arguments["consumer"], options)


async def payload_events(form: BodyForm, shared_stream: AsyncIterator[TakenMessage]) -> AsyncIterator[TriggerEvent]:
    """Yield an event for each message, and reject those that can't be one.

    :param form: of the bodies
    """
    from airflow.triggers.shared_stream import reject_shared_stream_event

    async for taken in shared_stream:
        try:
            event = message_event(taken.message, form, taken.size, taken.stored)
        except InvalidBodyError as error:
            taken.refuse(error)
            reject_shared_stream_event()
        else:
            yield TriggerEvent(event)  # type: ignore[no-untyped-call]
