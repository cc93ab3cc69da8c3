"""Requests over a connection whose frames a test sees and answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from airflow_provider_jetstream.jetstream.client.loop_connection import LoopConnection
from airflow_provider_jetstream.jetstream.client.streams import get_batch
from airflow_provider_jetstream.jetstream.client.wire import SentFrameReader
from airflow_provider_jetstream.jetstream.errors import DeadlineError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

END = b"NATS/1.0 204 EOB\r\n\r\n"


def answer(sequence: int) -> bytes:
    return (
        b"NATS/1.0\r\nNats-Stream: s\r\nNats-Subject: s.a\r\nNats-Sequence: %d\r\n"
        b"Nats-Time-Stamp: 2026-11-01T00:00:00Z\r\n\r\n" % sequence
    )


class _Subscribed:
    async def unsubscribe(self) -> None:
        """Do nothing: the connection is a test's."""


class SeenConnection(LoopConnection):
    """Keeps what is sent, as subject and reply."""

    timeout = 5.0
    api_level = 1

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str]] = []
        self.wrote = asyncio.Event()
        self.on_message: OnMessage = lambda *_: None
        self.connected = True

    @property
    @override
    def max_payload(self) -> int:
        return 1 << 20

    @property
    @override
    def reconnects(self) -> int:
        return 0

    @property
    @override
    def server_version(self) -> tuple[int, int, int]:
        return 2, 15, 0

    @override
    async def wait_for_room(self) -> None:
        """There is room."""

    @override
    async def drop_unsent(self) -> None:
        """Everything is sent at once."""

    @property
    @override
    def is_connected(self) -> bool:
        return self.connected

    @property
    @override
    def is_closed(self) -> bool:
        return False

    @override
    def new_inbox(self) -> str:
        return "_INBOX.x"

    @override
    def write(self, frames: bytes, messages: int = 1) -> None:
        if not self.connected:
            raise UnreachableError("lost")
        self.sent += [(frame.subject, frame.reply) for frame in SentFrameReader().feed(frames)]
        self.wrote.set()

    @override
    async def subscribe_raw(
        self,
        subject: str,
        on_message: OnMessage,
        on_denied: Callable[[PermissionDeniedError], None] | None = None,
        form: FrameForm | None = None,
    ) -> _Subscribed:
        self.on_message = on_message
        return _Subscribed()

    def arrive(self, reply: str, headers: bytes, body: bytes = b"") -> None:
        self.on_message(reply.encode(), b"", headers, body)


async def test_a_batch_is_read_anew_after_a_loss_and_no_answer_of_the_first_reading_counts() -> None:
    connection = SeenConnection()
    reading = asyncio.create_task(get_batch(connection, "s", {"seq": 1, "next_by_subj": ">", "batch": 3}))
    await connection.wrote.wait()
    (subject, first), *_ = connection.sent
    connection.arrive(first, answer(1), b"old")
    connection.repeat_reads()
    again, second = connection.sent[-1]
    assert again == subject == "$JS.API.DIRECT.GET.s"
    assert second != first
    # A server may have answered the first request while the connection was lost.
    connection.arrive(first, answer(2), b"old")
    connection.arrive(first, END)
    connection.arrive(second, answer(1), b"new")
    connection.arrive(second, answer(3), b"new")
    await asyncio.sleep(0)
    assert not reading.done()
    connection.arrive(second, END)
    assert [(message.sequence, message.data) for message in await reading] == [(1, b"new"), (3, b"new")]


async def test_what_changes_something_and_what_pulls_is_sent_once() -> None:
    connection = SeenConnection()
    for subject in ("$JS.API.STREAM.PURGE.s", "$JS.API.CONSUMER.MSG.NEXT.s.worker"):
        connection.wrote.clear()
        asking = asyncio.create_task(connection.ask(subject))
        await connection.wrote.wait()
        count = len(connection.sent)
        connection.repeat_reads()
        assert len(connection.sent) == count
        connection.arrive(connection.sent[-1][1], b"", b"{}")
        assert await asking == [(b"", b"{}")]


async def test_a_batch_without_its_last_answer_says_what_is_missing() -> None:
    connection = SeenConnection()
    connection.timeout = 0.05
    reading = asyncio.create_task(get_batch(connection, "s", {"seq": 1, "batch": 3}))
    await connection.wrote.wait()
    connection.arrive(connection.sent[0][1], answer(1))
    with pytest.raises(DeadlineError, match=r"^not all answers on \$JS\.API\.DIRECT\.GET\.s within 0\.05 s"):
        await reading
    with pytest.raises(DeadlineError, match=r"^no answer on \$JS\.API\.INFO within 0\.05 s"):
        await connection.ask("$JS.API.INFO")
