"""Streams on a real server for the tests of the data source, over its own kind of connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed.spark_face import SourceStream, read_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALL = ("value", "subject", "stream", "seq", "timestamp", "headers")
METHODS = ("consumer", "direct", "api")


def make_stream(stream: SourceStream, **config: Any) -> None:
    """Create a stream on subjects that begin with its name."""
    settings = {"name": stream.name, "subjects": [f"{stream.name}.>"], "allow_direct": True, **config}
    stream.api(f"STREAM.CREATE.{stream.name}", settings)


def publish(stream: SourceStream, messages: Iterable[tuple[str, Mapping[str, str] | None, bytes]]) -> None:
    """Publish messages with headers or without, and wait until they are stored."""
    frames = []
    for subject, headers, body in messages:
        if headers is None:
            frames.append(b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(body), body))
            continue
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        block = f"NATS/1.0\r\n{lines}\r\n".encode()
        frames.append(
            b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), len(block), len(block) + len(body), block, body)
        )
    last = stream.info().last
    for start in range(0, len(frames), 1000):
        stream.socket.send(b"".join(frames[start : start + 1000]))
    while stream.info().last < last + len(frames):
        pass


def publish_numbers(stream: SourceStream, count: int, start: int = 0) -> None:
    """Publish numbers on seven subjects."""
    publish(
        stream, ((f"{stream.name}.{number % 7}", None, str(number).encode()) for number in range(start, start + count))
    )


def delete(stream: SourceStream, sequences: Iterable[int]) -> None:
    """Delete messages."""
    for sequence in sequences:
        stream.api(f"STREAM.MSG.DELETE.{stream.name}", {"seq": sequence, "no_erase": True})


def purge(stream: SourceStream, below: int) -> None:
    """Delete everything below a sequence."""
    stream.api(f"STREAM.PURGE.{stream.name}", {"seq": below})


def read_all(
    stream_options: Mapping[str, str], *, names: Sequence[str] = ALL, first: int | None = None, last: int | None = None
) -> list[dict[str, Any]]:
    """Read a stream as tasks do, without Spark."""
    rows: list[dict[str, Any]] = []
    for batch in read_batches({**stream_options, "includeHeaders": "true"}, names, first, last):
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows
