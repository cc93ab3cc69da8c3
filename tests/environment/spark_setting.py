"""What the queries of spark_queries.py stand on: a session, and streams on a server; needs this package only."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream import connect, connection_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream import ConnectionSettings

Message = tuple[str, str] | tuple[str, str, dict[str, str]]
"""Subject after the stream's name, body, headers."""


@dataclass
class Setting:
    """Where one query runs.

    :param name: of its streams, and what their names begin with
    :param folder: of its own, shared by client and server
    :param remote: whether the session is one of Spark Connect
    """

    spark: SparkSession
    url: str
    name: str
    folder: Path
    remote: bool
    options: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {"servers": self.url}

    @property
    def settings(self) -> ConnectionSettings:
        """The settings of a connection to the server."""
        return connection_settings({"servers": (self.url,), "timeout": 10})

    def make_stream(self, messages: Iterable[Message] = (), suffix: str = "", **config: Any) -> dict[str, str]:
        """Create a stream with messages, and return the options that name it."""
        name = self.name + suffix
        self.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory", **config})
        self.publish(messages, f"{name}.")
        return {**self.options, "stream": name}

    def publish(self, messages: Iterable[Message], before: str) -> None:
        """Publish messages one after the other, and wait until each is stored.

        :param before: what the subjects begin with
        """

        async def run() -> None:
            async with connect(self.settings) as connection:
                for subject, body, *headers in messages:
                    await connection.publish_acknowledged(before + subject, body.encode(), dict(*headers))

        asyncio.run(run())

    def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to JetStream's API."""

        async def run() -> dict[str, Any]:
            async with connect(self.settings) as connection:
                return await connection.api(subject, request)

        return asyncio.run(run())

    def stored(self, options: Mapping[str, str]) -> int:
        """Return how many messages a stream has stored so far."""
        return int(self.api(f"STREAM.INFO.{options['stream']}")["state"]["last_seq"])

    def load(self, options: Mapping[str, str], **more: str) -> DataFrame:
        """Return the messages of a stream."""
        return self.spark.read.format("jetstream").options(**options, **more).load()

    def follow(
        self, options: Mapping[str, str], batch: Callable[[DataFrame, int], None] | None = None, **more: str
    ) -> list[int]:
        """Run a query over what is available, from its checkpoint, and return how many rows each batch had.

        :param batch: gets each batch; by default all go into ``self.folder / "rows"``
        """
        options = {"startingOffsets": "earliest", **options, **more}
        writer = self.spark.readStream.format("jetstream").options(**options).load().writeStream
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True)
        query = (
            writer.foreachBatch(batch).start()
            if batch
            else writer.format("parquet").option("path", str(self.folder / "rows")).start()
        )
        assert query.awaitTermination(120), "expected the query to end within two minutes"
        return [size for progress in query.recentProgress if (size := progress.numInputRows)]

    def rows(self, frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
        """Return a frame's rows in order."""
        return sorted(tuple(row) for row in frame.selectExpr(*columns).collect())


@contextmanager
def raises(*parts: str) -> Iterator[None]:
    """Require that the block fails with an error that contains some texts."""
    try:
        yield
    except Exception as error:
        if missing := [part for part in parts if part not in str(error)]:
            raise AssertionError(f"expected {missing} in the error, found {error}") from error
    else:
        raise AssertionError(f"expected an error about {parts}, found none")
