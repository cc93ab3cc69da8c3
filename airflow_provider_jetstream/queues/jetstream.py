"""The scheme ``jetstream`` of Airflow's ``MessageQueueTrigger``; needs the extra ``messaging``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Airflow takes the error about a provider that isn't installed for an optional feature.
from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider

if TYPE_CHECKING:
    from airflow.triggers.base import BaseEventTrigger


class JetStreamMessageQueueProvider(BaseMessageQueueProvider):
    """Makes ``MessageQueueTrigger(scheme="jetstream", …)`` a message trigger of this package.

    The other arguments are those of
    :class:`~airflow_provider_jetstream.triggers.message.JetStreamMessageTrigger`.
    """

    scheme = "jetstream"

    def trigger_class(self) -> type[BaseEventTrigger]:
        """Return the trigger of the scheme."""
        from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger

        return JetStreamMessageTrigger

    # Abstract in common-messaging 2.0.
    def queue_matches(self, queue: str) -> bool:
        """Return that the scheme has no addresses in the form of Airflow's deprecated ``queue``."""
        return False

    def trigger_kwargs(self, queue: str, **kwargs: Any) -> dict[str, Any]:
        """Return what an address would say: nothing."""
        return {}
