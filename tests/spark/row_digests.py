"""A digest of each message of a stream, as Spark's tasks read it and as nats-py does."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import TYPE_CHECKING

import nats
import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nats.aio.msg import Msg
    from pyspark.sql import DataFrame

_FETCH = 1000
_SCHEMA = pa.schema([("seq", pa.int64()), ("digest", pa.binary())])


def digest(sequence: int, subject: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """Return the digest of a message; each part has its length before it."""
    whole = hashlib.blake2b(struct.pack(">q", sequence), digest_size=16)
    for part in (subject.encode(), *(text.encode() for header in headers for text in header), body):
        whole.update(struct.pack(">i", len(part)))
        whole.update(part)
    return whole.digest()


def total(digests: dict[int, bytes]) -> str:
    """Return one digest of all messages in the order of their sequences."""
    return hashlib.sha256(b"".join(digests[sequence] for sequence in sorted(digests))).hexdigest()


def spark_digests(rows: DataFrame) -> dict[int, bytes]:
    """Return the digests of a frame's rows by their sequences; fails where one is there twice."""
    batches = rows.mapInArrow(_digest_batches, "seq bigint, digest binary").toArrow()
    digests = dict(zip(batches.column("seq").to_pylist(), batches.column("digest").to_pylist(), strict=True))
    assert len(digests) == batches.num_rows
    return digests


def _digest_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sequences = batch.column("seq").to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("subject", "value"))
        lists = batch.column("headers").to_pylist() if "headers" in batch.schema.names else [()] * len(sequences)
        # A message without headers has a null.
        pairs = [[(pair["key"], pair["value"]) for pair in headers or ()] for headers in lists]
        subjects, values = columns
        found = map(digest, sequences, subjects, pairs, values)
        yield pa.RecordBatch.from_arrays(
            [pa.array(sequences, pa.int64()), pa.array(found, pa.binary())], schema=_SCHEMA
        )


def nats_py_digests(url: str, stream: str, messages: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Read a stream with nats-py; returns the digests without headers and with them.

    The consumer leaves a work queue's jobs where they are, since it acknowledges none and is deleted.
    """

    async def read() -> tuple[dict[int, bytes], dict[int, bytes]]:
        without: dict[int, bytes] = {}
        complete: dict[int, bytes] = {}
        client = await nats.connect(url)
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1, ack_wait=600)
        reader = await client.jetstream().pull_subscribe("", durable="digests", stream=stream, config=config)
        while len(without) < messages:
            for message in await reader.fetch(min(_FETCH, messages - len(without)), timeout=60):
                sequence = message.metadata.sequence.stream
                without[sequence] = digest(sequence, message.subject, (), message.data)
                complete[sequence] = digest(sequence, message.subject, _headers(message), message.data)
        left = (await reader.consumer_info()).num_pending
        await client.jetstream().delete_consumer(stream, "digests")
        await client.close()
        assert left == 0
        return without, complete

    return asyncio.run(read())


def _headers(message: Msg) -> Iterable[tuple[str, str]]:
    return (message.headers or {}).items()
