"""The same work done with the client library nats-py: a data source that fetches with it, and a loop that publishes."""

import asyncio
from collections.abc import Iterator
from datetime import datetime

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

_FETCH = 1000
_Row = tuple[bytes, str, str, int, datetime]


class LibraryDataSource(DataSource):
    """Reads a limits stream with nats-py, a thousand messages at a time, and yields tuples."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "natspy"

    def schema(self) -> str:
        """Return the columns, those of the ``jetstream`` format."""
        return "value binary, subject string, stream string, seq bigint, timestamp timestamp"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader."""
        return _Reader(dict(self.options))


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[_Row]:
        with asyncio.Runner() as runner:
            client = runner.run(nats.connect(self._options["servers"]))
            stream, remaining = self._options["stream"], int(self._options["messages"])
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True)
            reader = runner.run(client.jetstream().pull_subscribe("", stream=stream, config=config))
            while remaining:
                fetched = runner.run(reader.fetch(min(_FETCH, remaining)))
                remaining -= len(fetched)
                for message in fetched:
                    metadata = message.metadata
                    yield message.data, message.subject, stream, metadata.sequence.stream, metadata.timestamp
            runner.run(client.close())


async def publish_one_by_one(url: str, subject: str, messages: int, body: bytes) -> None:
    """Publish messages with ids, each awaited before the next."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    run = client.new_inbox()
    for number in range(messages):
        await jetstream.publish(subject, body, headers={"Nats-Msg-Id": f"{run}:{number}"})
    await client.close()
