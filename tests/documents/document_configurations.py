"""Every stream and consumer of the source documents, as the documents' own commands and clients create them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

QUEUES = Path(__file__).resolve().parents[2] / "example_dags" / "queues"

_SECOND = 1_000_000_000
_MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
# What ``nats consumer add`` and the Go client send of their own.
_PULL = {"ack_policy": "explicit", "deliver_policy": "all", "replay_policy": "instant"}


@dataclass(frozen=True)
class Document:
    """The streams of one document, with the consumers of each.

    :param queue_file: declares the same queue
    :param streams: the configuration of each stream that the document writes out, the queue's own last
    :param consumers: by stream, the configuration of each consumer
    """

    queue_file: str
    streams: tuple[dict[str, Any], ...]
    consumers: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path of the queue file."""
        return QUEUES / self.queue_file

    async def create(self, connection: NatsPyConnection) -> None:
        """Create everything by hand."""
        for stream in self.streams:
            await connection.api(f"STREAM.CREATE.{stream['name']}", stream)
        await self._create_consumers(connection)

    async def restart(self, connection: NatsPyConnection) -> None:
        """Do what the document's programs do at each start: ``CreateOrUpdateStream``, ``CreateOrUpdateConsumer``.

        What their configuration doesn't name gets the server's default.
        """
        for stream in self.streams:
            await connection.api(f"STREAM.UPDATE.{stream['name']}", stream)
        await self._create_consumers(connection)

    async def _create_consumers(self, connection: NatsPyConnection) -> None:
        for stream_name, consumers in self.consumers.items():
            for consumer in consumers:
                await create_consumer(connection, stream_name, consumer)


async def create_consumer(connection: NatsPyConnection, stream: str, config: dict[str, Any]) -> None:
    """Create or update a consumer, as the CLI and the Go client do."""
    subject = f"CONSUMER.CREATE.{stream}.{config['durable_name']}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    named = config | {"name": config["durable_name"]}
    await connection.api(subject, {"stream_name": stream, "config": named, "action": ""})


JOBS_STREAM: dict[str, Any] = {
    "name": "jobs",
    "subjects": ["jobs.*.*"],
    "storage": "file",
    "num_replicas": 1,
    "retention": "workqueue",
    "discard": "new",
    "max_msgs": 20_000,
    "max_msgs_per_subject": -1,
    "max_bytes": 256 * 2**20,
    "max_age": 7 * 86_400 * _SECOND,
    "max_msg_size": -1,
    "duplicate_window": 120 * _SECOND,
    "allow_rollup_hdrs": False,
    "deny_delete": False,
    "deny_purge": False,
}
JOBS = Document(
    "jobs.yaml",
    (
        {
            "name": "jobs_dlq",
            "subjects": [f"{_MAX_DELIVERIES}.jobs.*"],
            "metadata": {"dead_letter_queue": "true"},
        },
        JOBS_STREAM,
    ),
)

TASKS_STREAM: dict[str, Any] = {
    "name": "TASKS",
    "subjects": ["tasks.>"],
    "retention": "workqueue",
    "storage": "file",
}
TASKS = Document("tasks_unpartitioned.yaml", (TASKS_STREAM,), {"TASKS": (_PULL | {"durable_name": "worker"},)})
PARTITIONS = Document(
    "tasks.yaml",
    (TASKS_STREAM,),
    {
        "TASKS": tuple(
            _PULL | {"durable_name": f"worker-{number}", "filter_subject": f"tasks.{number}.>"} for number in range(2)
        )
    },
)
PRIORITIES = tuple(
    Document(
        f"tasks_{level}.yaml",
        ({"name": f"TASKS_{level.upper()}", "subjects": [f"tasks.{level}.>"], "retention": "workqueue"},),
        {f"TASKS_{level.upper()}": (_PULL | {"durable_name": "worker"},)},
    )
    for level in ("high", "normal")
)

_ORDERS_LIMITS: dict[str, Any] = {
    "storage": "file",
    "num_replicas": 1,
    "retention": "workqueue",
    "discard": "new",
    "max_msgs": -1,
    "max_msgs_per_subject": -1,
    "max_bytes": 256 * 2**20,
    "max_age": 0,
    "duplicate_window": 120 * _SECOND,
    "deny_delete": True,
    "deny_purge": False,
    "allow_direct": True,
}
_BACKOFF = {"backoff": [5 * _SECOND], "max_deliver": 2}
ORDERS = Document(
    "orders.yaml",
    (
        _ORDERS_LIMITS
        | {"name": "orders_unprocessed", "subjects": [f"{_MAX_DELIVERIES}.orders_stream.*"], "max_msg_size": -1},
        _ORDERS_LIMITS | {"name": "orders_stream", "subjects": ["orders.*"], "max_msg_size": 2**20},
    ),
    {
        "orders_stream": (
            _PULL
            | _BACKOFF
            | {"durable_name": "processor", "description": "Orders processor", "filter_subject": "orders.*"},
        ),
        "orders_unprocessed": (
            _PULL | _BACKOFF | {"durable_name": "unprocessed_order_handler", "description": "handle unprocessed jobs"},
        ),
    },
)

IMAGES = Document(
    "images.yaml",
    (
        {
            "name": "IMAGES",
            "subjects": ["IMAGES.>"],
            "retention": "workqueue",
            "storage": "file",
            "discard": "old",
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": 0,
            "max_msg_size": 512,
            "duplicate_window": 3_600 * _SECOND,
        },
    ),
    {
        "IMAGES": (
            _PULL
            | {
                "durable_name": "BW",
                "max_deliver": 5,
                "ack_wait": 30 * _SECOND,
                "filter_subject": "IMAGES.blackandwhite",
            },
        )
    },
)

DOCUMENTS = {
    "jobs": JOBS,
    "TASKS": TASKS,
    "TASKS in partitions": PARTITIONS,
    "TASKS_HIGH": PRIORITIES[0],
    "TASKS_NORMAL": PRIORITIES[1],
    "orders": ORDERS,
    "IMAGES": IMAGES,
}
