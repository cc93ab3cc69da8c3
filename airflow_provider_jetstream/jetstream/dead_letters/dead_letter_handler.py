"""The handlers of a dead letter queue: consumers of other programs, which remove an entry by acknowledging it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects, redrive_consumer
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects, settled_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# A stream of any other retention keeps an entry that is acknowledged.
_REMOVING = frozenset({"workqueue", "interest"})
_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class DeadLetterHandler:
    """A consumer of a dead letter queue as of one moment.

    :param config: its configuration, as the server returns it
    :param created: when it was created
    :param delivered: the highest sequence of an entry that it delivered
    :param deliveries: how often it delivered an entry, repeats included
    :param ack_floor: the sequence up to which every delivery ended
    :param in_flight: deliveries that haven't ended
    """

    name: str
    config: Mapping[str, Any]
    created: datetime
    delivered: int
    deliveries: int
    ack_floor: int
    in_flight: int

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> DeadLetterHandler:
        """Read a consumer from the server's CONSUMER.INFO."""
        return cls(
            name=info["name"],
            config=info["config"],
            created=datetime.fromisoformat(info["created"]),
            delivered=info["delivered"]["stream_seq"],
            deliveries=info["delivered"]["consumer_seq"],
            ack_floor=info["ack_floor"]["stream_seq"],
            in_flight=info["num_ack_pending"],
        )

    @property
    def can_be_pulled(self) -> bool:
        """Whether it delivers entries by pull requests."""
        return "deliver_subject" not in self.config

    @property
    def room(self) -> int:
        """How many entries it delivers to one request at most; none, or fewer, where too many are in flight."""
        room = [_UNLIMITED]
        if (max_ack_pending := self.config.get("max_ack_pending", -1)) > 0:
            room.append(max_ack_pending - self.in_flight)
        # The server refuses a larger request.
        if (max_batch := self.config.get("max_batch", 0)) > 0:
            room.append(max_batch)
        return min(room)

    @property
    def waits(self) -> list[timedelta]:
        """How long the server waits for an acknowledgement, by delivery."""
        waits = self.config.get("backoff") or [self.config.get("ack_wait", 0)]
        return [timedelta(microseconds=wait / 1_000) for wait in waits]

    def has_used_up(self, entry: int, *, others: int) -> bool:
        """Return whether it will never deliver an entry again that is still stored.

        :param entry: the entry's sequence
        :param others: deliveries in flight that may be of this entry
        """
        return entry <= settled_sequence(self.delivered, self.ack_floor, max(0, others))

    def takes(self, subject: str) -> bool:
        """Return whether it delivers entries of a subject."""
        return covered_by_any(filter_subjects(self.config), subject)


def own_consumer(queue: str) -> str:
    """Return the name of the consumer through which redrives acknowledge entries that no other consumer delivers."""
    return redrive_consumer(queue)


def removes_acknowledged(config: Mapping[str, Any]) -> bool:
    """Return whether an acknowledgement removes a message from a stream.

    :param config: the stream's configuration, as the server returns it
    """
    return config["retention"] in _REMOVING


async def read_handlers(connection: Connection, config: Mapping[str, Any], queue: str) -> tuple[DeadLetterHandler, ...]:
    """Read the handlers of a dead letter queue that get entries about jobs of a work queue.

    :param config: the dead letter queue's configuration, as the server returns it
    :raises NotFoundError: the dead letter queue doesn't exist
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    if not removes_acknowledged(config):
        return ()
    subjects = dead_letter_subjects(queue)
    return tuple(
        DeadLetterHandler.from_info(info)
        for name, info in (await list_consumers(connection, config["name"])).items()
        if name != own_consumer(queue)
        and any(overlaps(filter_, subject) for filter_ in filter_subjects(info["config"]) for subject in subjects)
    )
