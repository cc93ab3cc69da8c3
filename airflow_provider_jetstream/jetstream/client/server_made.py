"""Messages on a subject of evidence that the server made, and no program published there.

A client chooses the reply subject of what it publishes, and permissions don't apply to it: whoever may publish a job
can have the PubAck of it stored on any subject that a stream of the account captures, and whoever may send a request
the answer. Whoever stores a schedule chooses the subject of its jobs, as far as the same stream captures it. Such a
message proves nothing about its subject.

Protocol: PubAcks and answers in "JetStream API Reference" of the NATS documentation; ``Nats-Scheduler`` in NATS ADR-51.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# The server adds it to each message that it makes of a schedule.
_SCHEDULER: Final = "Nats-Scheduler"
_API_ANSWER: Final = "io.nats.jetstream.api."
# As the server writes them; what begins otherwise needn't be decoded.
_BEGINNINGS: Final = (b'{"stream":', b'{"error":', b'{"seq":', b'{"type":"io.nats.jetstream.api.')
_PUB_ACK: Final = frozenset({"error", "stream", "seq", "domain", "duplicate", "val", "batch", "count"})


def is_server_made(message: StoredMessage) -> bool:
    """Return whether a message is an answer of the server that a client directed to its subject, or of a schedule."""
    if message.headers:
        return message.header(_SCHEDULER) is not None
    return is_answer(message.data)


def is_answer(data: bytes) -> bool:
    """Return whether a body is a PubAck, a stream's refusal, or an answer of JetStream's API."""
    if not data.startswith(_BEGINNINGS):
        return False
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    return str(answer.get("type", "")).startswith(_API_ANSWER) or answer.keys() <= _PUB_ACK
