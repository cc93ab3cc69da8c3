"""How many requests and messages an operation sends to the server."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from airflow_provider_jetstream.jetstream.client.connection import Connection


@contextmanager
def published_subjects(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the subject of everything that the client publishes until the block ends, requests included."""
    subjects: list[str] = []
    publish = connection.client._send_publish  # noqa: SLF001

    async def record(subject: str, *args: Any, **kwargs: Any) -> None:
        subjects.append(subject)
        await publish(subject, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(connection.client, "_send_publish", record)
        yield subjects


async def test_finding_two_dead_letters_takes_at_most_ten_requests(
    connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a", "b"])
    with published_subjects(connection, monkeypatch) as subjects:
        found = await find_dead_letters(connection, queue)
    assert [letter.body for letter in found.letters] == [b"a", b"b"]
    print("\n".join(subjects), len(subjects))
    assert len(subjects) <= 10


async def test_redriving_two_dead_letters_takes_at_most_eighteen_requests(
    connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a", "b"])
    with published_subjects(connection, monkeypatch) as subjects:
        report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {1: 3, 2: 4}
    print("\n".join(subjects), len(subjects))
    assert len(subjects) <= 18
