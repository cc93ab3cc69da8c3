"""The messages in what a client writes to a server, as a test sees them."""

from collections.abc import Iterator

from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader


def sent_messages(frames: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the subject of each message, and the message as it is on the wire."""
    for frame in SentFrameReader().feed(frames):
        if not frame.subject:
            raise ValueError(f"expected a message that is published, found {frame.data[:80]!r}")
        yield frame.subject, frame.data
