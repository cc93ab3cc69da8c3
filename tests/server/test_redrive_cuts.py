"""A redrive of many letters that is cut off before, within or after any of its requests loses and repeats nothing."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, UnreachableError
from testbed import seams
from testbed.dead_letters import letter_records, stream_messages
from testbed.face import NatsPyConnection
from testbed.queues import eventually, make_dead_letters, make_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue

LETTERS = 60
BATCH = 20
# Parts of what a request group holds that still leave this process.
PARTS = (0.0, 0.5, 1.0)
# Two batches of two parts each under way at once; so many more cuts than requests end a redrive.
MOST_REQUESTS = 60


class Cut:
    """Lets the redrive's requests out until a number of them, then only those that give the lease and a pause back."""

    def __init__(self, number: int, part: float) -> None:
        self.left = number
        self.part = part
        self.has_begun = False
        self.is_cut = False
        self.task: asyncio.Task[object] | None = None

    def allowed(self, frames: bytes) -> bytes | None:
        """Return what is sent of encoded messages; ``None`` for nothing, as from a process that isn't there."""
        if self.is_cut:
            return frames if b".lease" in frames or b"CONSUMER.PAUSE" in frames else None
        self.has_begun |= b".intents." in frames or b"CONSUMER.PAUSE" in frames
        if not self.has_begun or self.task is None:
            return frames
        self.left -= 1
        if self.left >= 0:
            return frames
        self.is_cut = True
        self.task.cancel()
        whole = [*split(frames)]
        return b"".join(whole[: int(len(whole) * self.part)])


def split(frames: bytes) -> Iterator[bytes]:
    """Return encoded messages one by one."""
    start = 0
    while start < len(frames):
        line = frames.index(b"\r\n", start) + 2
        end = line + int(frames[start:line].split()[-1]) + 2
        yield frames[start:end]
        start = end


async def redrive_until_cut(connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest, cut: Cut) -> None:
    write = NatsPyConnection.write

    def write_or_cut(self: NatsPyConnection, frames: bytes, messages: int = 1) -> None:
        if (sent := cut.allowed(frames)) is None:
            raise UnreachableError("the process is gone")
        if sent:
            write(self, sent, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NatsPyConnection, "write", write_or_cut)
        cut.task = asyncio.create_task(redrive_dead_letters(connection, queue, request))
        with suppress(asyncio.CancelledError, JetStreamProviderError):
            await cut.task


def cases() -> list[tuple[Protocol, int]]:
    """Return the protocol with the turn of the parts that the first request leaves."""
    turns = range(len(PARTS)) if os.environ.get("FAULTS") == "full" else [1]
    return [(Protocol.COPY, turn) for turn in turns]


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "turn"), cases())
async def test_a_redrive_that_is_cut_off_at_any_request_is_finished_by_the_next_one(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, protocol: Protocol, turn: int
) -> None:
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, BATCH)
    monkeypatch.setattr(seams.STEPS_LEAST_OVERLAPPED, 1)
    bodies = [str(number) for number in range(LETTERS)]
    cuts = 0

    async def cut_at(number: int) -> bool:
        """Cut a redrive off; return whether it had so many requests."""
        queue = await make_queue(connection, f"{name}{number}", archive=None)
        await make_dead_letters(connection, queue, bodies)
        request = RedriveRequest(protocol=protocol, run="r")
        cut = Cut(number, PARTS[(number + turn) % len(PARTS)])
        await redrive_until_cut(connection, queue, request, cut)
        what = f"{protocol.value}, cut at request {number}, {cut.part} of it sent"

        async def is_finished() -> bool:
            report = await redrive_dead_letters(connection, queue, request)
            return not report.failures

        await eventually(is_finished)
        stored = Counter(message.data.decode() for message in await stream_messages(connection, queue.name))
        assert stored == Counter(bodies), what
        consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
        assert (consumer["num_pending"], consumer["num_ack_pending"]) == (LETTERS, 0), what
        assert not await stream_messages(connection, f"{queue.name}-dead"), what
        recorded = Counter(record.sequence for record in await letter_records(connection, queue))
        assert set(recorded) == set(range(1, LETTERS + 1)), what
        for stream in (queue.name, f"{queue.name}-dead", f"{queue.name}-audit", f"{queue.name}-events"):
            with suppress(JetStreamProviderError):
                await connection.api(f"STREAM.DELETE.{stream}")
        return cut.is_cut

    for number in range(MOST_REQUESTS):
        if not await cut_at(number):
            break
        cuts += 1
    print(f"{protocol.value}: cut off at {cuts} requests")
    assert 5 <= cuts < MOST_REQUESTS
