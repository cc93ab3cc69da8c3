"""All work queues of a server at a glance: a request for each 256 streams, and one for each queue's consumers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from airflow_provider_jetstream.jetstream.inspection.health import (
    LeftOver,
    QueueHealth,
    count_left_over,
    inspect_consumers,
)
from airflow_provider_jetstream.jetstream.queue.discovery import (
    ANY_QUEUE,
    captured_queues,
    dead_letter_stream,
    has_dead_letter_mark,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# Subjects are compared with filters one by one, and the server lists them all.
_MOST_SUBJECTS = 2_000


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A work queue at a glance.

    :param config: its stream's configuration, as the server gives it
    :param state: its stream's state, as the server gives it
    :param letters: what the server tells of the stream that captures its deaths, if there is one
    :param health: its numbers; ``None`` where they are missing
    :param left: what else it holds; ``None`` where that isn't known
    :param problem: why numbers are missing
    """

    config: Mapping[str, Any]
    state: Mapping[str, Any]
    dead_letter_queue: Mapping[str, Any] | None
    health: QueueHealth | None
    left_over: LeftOver | None
    problem: UnreachableError | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return str(self.config["name"])

    @property
    def dead_letter_queue_state(self) -> tuple[int, int, str]:
        """The same as long as nothing was said about any death, and none was done away with."""
        told = self.dead_letter_queue["state"] if self.dead_letter_queue else {}
        return (told.get("last_seq", 0), told.get("messages", 0), self.health.created if self.health else "")

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """The same as long as nothing has become of any job, and nothing was said about any death."""
        consumers = self.health.consumers.values() if self.health else ()
        return (
            *(
                self.state["last_seq"],
                self.state["messages"],
                self.state.get("num_subjects", 0),
                self.dead_letter_queue_state,
            ),
            *((each.name, each.created, each.filters, each.deliveries, each.pending) for each in consumers),
            *((each.in_flight, each.ack_floor) for each in consumers),
        )


async def inspect_all_queues(
    connection: Connection, before: Mapping[str, QueueOverview] | None = None
) -> list[QueueOverview]:
    """Look at all streams of work-queue retention, also at those that were made by hand.

    :param connection: the server
    :param before: the last look by queue, so that what hasn't moved isn't counted again
    :return: the queues by name; dead letter queues aren't among them, whatever their retention
    :raises ApiError: the server refused to tell
    :raises TransientError: the server doesn't answer
    """
    streams = await list_streams(connection)
    by_name = {info["config"]["name"]: info for info in streams}
    tellers = _tellers(info["config"] for info in streams)

    async def look(info: Mapping[str, Any]) -> QueueOverview | None:
        config, state = info["config"], info["state"]
        capturing = dead_letter_stream([*tellers[config["name"]], *tellers[ANY_QUEUE]], config["name"])
        letters = by_name[capturing["name"]] if capturing else None
        try:
            found = QueueOverview(config, state, letters, await inspect_consumers(connection, info), None)
            return await _told_apart(connection, found, (before or {}).get(found.name))
        except NotFoundError:
            return None
        except UnreachableError as error:
            return QueueOverview(config, state, letters, None, None, error)

    queues = [info for info in streams if _is_queue(info["config"])]
    looks = [look for look in await map_concurrently(look, queues) if look is not None]
    return sorted(looks, key=lambda each: each.name)


def _is_queue(config: Mapping[str, Any]) -> bool:
    return config["retention"] == "workqueue" and not has_dead_letter_mark(config) and not captured_queues(config)


def _tellers(configs: Iterable[Mapping[str, Any]]) -> defaultdict[str, list[Mapping[str, Any]]]:
    """Put the streams that capture deaths with the queues whose deaths those are: there may be many of both."""
    tellers: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for config in configs:
        for queue in captured_queues(config):
            tellers[queue].append(config)
    return tellers


async def _told_apart(connection: Connection, look: QueueOverview, before: QueueOverview | None) -> QueueOverview:
    if look.health is None or look.state.get("num_subjects", 0) > _MOST_SUBJECTS:
        return look
    left = before.left_over if before and before.left_over and before.fingerprint == look.fingerprint else None
    if left is None:
        left = await count_left_over(connection, look.health)
    return QueueOverview(look.config, look.state, look.dead_letter_queue, look.health, left)
