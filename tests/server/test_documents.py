"""A document comes back as its writer stored it, or the reader is told which part is missing, whatever anybody stores.

Each story is told on a nats-server and on the simulated one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from airflow_provider_jetstream.jetstream import JobsHandle, PublishReport, take_cursor
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.documents import (
    DocumentName,
    DocumentPart,
    DocumentParts,
    DocumentWriter,
    read_parts,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, ArgumentError, QueueGoneError
from testbed.queues import make_queue
from testbed.simulated.connection import SimulatedConnection
from testbed.simulated.loop import run_simulated
from testbed.simulated.server import SimulatedServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.face import NatsPyConnection

Row = tuple[Annotated[int, Field(strict=True)], str]
ROWS: TypeAdapter[list[Row]] = TypeAdapter(list[Row])
PARTS = TypeAdapter(DocumentParts)
DIGEST = "0" * 32


def document(name: str, key: str = "a" * 32, **other: str) -> DocumentName:
    return DocumentName(**{"stream": f"{name}-events", "queue": name, "kind": "reports", "key": key} | other)


async def make_stream(connection: Connection, name: str, **config: Any) -> None:
    subjects = [f"published.{name}.*", f"published.{name}-other.*"]
    await connection.api(
        f"STREAM.CREATE.{name}-events",
        {"name": f"{name}-events", "subjects": subjects, "max_msg_size": -1, "allow_direct": True} | config,
    )


async def written(
    connection: Connection, name: DocumentName, rows: Iterable[Row], **options: int
) -> list[DocumentPart]:
    writer = DocumentWriter(connection, name, **options)
    await writer.add(rows)
    # References go through an XCom or a trigger's arguments.
    return PARTS.validate_python(json.loads(json.dumps(await writer.finish())))


async def read(connection: Connection, name: DocumentName, parts: list[DocumentPart]) -> list[list[Row] | None]:
    return [rows async for rows in read_parts(connection, name, parts, ROWS)]


async def stored(connection: Connection, subject: str, body: bytes, rows: int = 1) -> DocumentPart:
    """Store a message as anybody may who has the right to, and return a reference that is right about it."""
    return DocumentPart((await store(connection, subject, body)).sequence, rows, sha256(body).hexdigest()[:32])


class LargePayloads(SimulatedConnection):
    @property
    @override
    def max_payload(self) -> int:
        return 64 << 20


def on_simulated(
    story: Callable[[Connection, str], Awaitable[None]], connect: type[SimulatedConnection] = SimulatedConnection
) -> None:
    async def told() -> None:
        await story(connect(SimulatedServer((2, 14, 0), {"n1": 0})), "q")

    run_simulated(told, 1)


async def comes_back(connection: Connection, name: str) -> None:
    await make_stream(connection, name)
    rows: list[Row] = [(number, f"ä\n{number}\ud800") for number in range(30_000)]
    parts = await written(connection, document(name), rows)
    assert (len(parts) > 2, sum(part.rows for part in parts)) == (True, len(rows))
    found = await read(connection, document(name), parts)
    assert [row for some in found for row in some or ()] == rows
    few = await written(connection, document(name), rows[:25], part_rows=10)
    assert [part.rows for part in few] == [10, 10, 5]
    assert await written(connection, document(name), []) == []
    # An earlier document of the same name is still what its references name.
    assert await read(connection, document(name), parts[-1:]) == found[-1:]


async def is_missing(connection: Connection, name: str) -> None:
    """Whatever is at the sequence of a part, and isn't what was stored there, is a missing part."""
    await make_stream(connection, name)
    mine, theirs = document(name), document(name, "b" * 32)
    older = await written(connection, mine, [(1, "older"), (2, "older")], part_rows=1)
    parts = await written(connection, mine, [(1, "newer"), (2, "newer")], part_rows=1)
    first, second = parts
    foreign = [
        *await written(connection, theirs, [(1, "of another key")]),
        *await written(connection, document(name, kind="ids"), [(1, "of another kind")]),
        *await written(connection, document(name, queue=f"{name}-other"), [(1, "of another queue")]),
        *await written(connection, document(name, created="2026-01-01T00:00:00Z"), [(1, "of a queue before")]),
    ]
    # Their own references lead to them; from this document they lead nowhere, nor do those of both mixed.
    assert await read(connection, mine, foreign) == [None] * 4
    for other in (*foreign, *older):
        mixed = [first._replace(sequence=other.sequence), other._replace(sequence=first.sequence)]
        assert await read(connection, mine, mixed) == [None, None]
    assert await read(connection, mine, [first._replace(rows=2), first._replace(sequence=10**6)]) == [None, None]
    assert await read(connection, document(f"{name}-none"), parts) == [None, None]
    forged = await stored(connection, mine.subject, mine.heading + b'[1,"forged"]')
    assert await read(connection, mine, [first._replace(sequence=forged.sequence)]) == [None]
    await connection.api(f"STREAM.MSG.DELETE.{mine.stream}", {"seq": first.sequence})
    assert await read(connection, mine, parts) == [None, [(2, "newer")]]
    # A stream that is created anew counts from 1 again.
    await connection.api(f"STREAM.DELETE.{mine.stream}")
    assert await read(connection, mine, parts) == [None, None]
    await make_stream(connection, name)
    for _ in range(second.sequence):
        await written(connection, mine, [(1, "later")])
    assert await read(connection, mine, parts) == [None, None]


HOSTILE = {
    "nothing": b"",
    "not UTF-8": b'[1,"\xff"]',
    "no JSON": b"[1,",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "no number of JSON": b'[NaN,"a"]',
    "a long number": b"[" + b"9" * 5_000 + b',"a"]',
    "another row": b'{"sequence":1}',
    "a row as text": b'["1","a"]',
    "two rows in a line": b'[1,"a"],[2,"b"]',
    "an empty line": b'[1,"a"]\n',
    "another separator": b'[1,"a"]\r[2,"b"]',
    "a row in two lines": b'[1,\n"a"]',
    "a null byte": b'[1,"a"]\0',
    "one value too many": b"[1,2]\n[3,4]",
    "an acknowledgement": b'{"stream":"q-events","seq":1}',
}


async def is_refused(connection: Connection, name: str) -> None:
    """Whoever may publish and edit the reference makes the digest right: the part is parsed within limits."""
    await make_stream(connection, name)
    mine = document(name)
    assert await read(connection, mine, [await stored(connection, mine.subject, mine.heading + b'[1,"a"]')]) == [
        [(1, "a")]
    ]
    for what, body in HOSTILE.items():
        part = await stored(connection, mine.subject, mine.heading + body)
        assert (what, await read(connection, mine, [part])) == (what, [None])
    for body in (b'[1,"a"]', mine.heading[:-1] + b'[1,"a"]', b" " + mine.heading + b'[1,"a"]', b"\xff" * 1_000):
        assert await read(connection, mine, [await stored(connection, mine.subject, body)]) == [None]
    large = b"[1,%b]" % (b'"%b"' % (b"a" * 900_000))
    assert await read(connection, mine, [await stored(connection, mine.subject, mine.heading + large)]) == [None]


async def is_split(connection: Connection, name: str) -> None:
    """A stream with a small ``max_msg_size`` gets smaller parts; a row that no part holds is an error."""
    await make_stream(connection, name, max_msg_size=2_000)
    rows: list[Row] = [(number, "x" * 100) for number in range(500)]
    parts = await written(connection, document(name), rows)
    assert len(parts) < 100
    assert [row for some in await read(connection, document(name), parts) for row in some or ()] == rows
    with pytest.raises(ApiError, match="message size exceeds maximum allowed"):
        await written(connection, document(name), [(1, "x" * 2_000)])
    with pytest.raises(ArgumentError, match=r"expected rows of at most 260,096 bytes of JSON .*, found one of 300,006"):
        await written(connection, document(name), [(1, "x" * 300_000)])


STORIES = [comes_back, is_missing, is_refused, is_split]


@pytest.mark.parametrize("story", STORIES)
async def test_documents_on_a_server(
    connection: NatsPyConnection, name: str, story: Callable[[Connection, str], Awaitable[None]]
) -> None:
    await story(connection, name)


@pytest.mark.parametrize("story", STORIES)
def test_documents_on_a_simulated_server(story: Callable[[Connection, str], Awaitable[None]]) -> None:
    on_simulated(story)


def test_ten_megabytes_are_no_part() -> None:
    async def story(connection: Connection, name: str) -> None:
        await make_stream(connection, name)
        mine = document(name)
        body = mine.heading + b"\n".join([b'[1,"aaaaaaaaaa"]'] * 655_360)
        part = await stored(connection, mine.subject, body, 655_360)
        assert len(body) > 10 * 2**20
        with pytest.raises(ValidationError):
            PARTS.validate_python([part])
        # Not even where nobody has checked the reference.
        assert await read(connection, mine, [part]) == [None]
        rows: list[Row] = [(number, "x" * 100_000) for number in range(30)]
        parts = await written(connection, mine, rows)
        assert [part.rows for part in parts] == [2] * 15

    on_simulated(story, LargePayloads)


@pytest.mark.parametrize(
    "parts",
    [
        None,
        7,
        "parts",
        {},
        [7],
        [[1, 1]],
        [[1, 1, DIGEST, 1]],
        [[0, 1, DIGEST]],
        [[-1, 1, DIGEST]],
        [[2**64, 1, DIGEST]],
        [[True, 1, DIGEST]],
        [["1", 1, DIGEST]],
        [[1.0, 1, DIGEST]],
        [[1, 0, DIGEST]],
        [[1, 10**9, DIGEST]],
        [[1, 1, DIGEST[1:]]],
        [[1, 1, DIGEST.replace("0", "A")]],
        [[1, 1, DIGEST + "\n"]],
        [[1, 1, None]],
        [[7, 1, DIGEST]] * 2,
        [[7, 1, DIGEST], [7, 2, DIGEST]],
    ],
)
def test_what_are_no_references_to_parts_is_refused(parts: object) -> None:
    with pytest.raises(ValidationError):
        PARTS.validate_python(parts)


async def test_the_jobs_of_a_handle_are_counted_before_its_next_part_is_read(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = PublishReport()
    report.sequences.extend(range(1, 20_000, 2))
    report.handle = (await JobsHandle.take(connection, cursor, report, "key")).as_json()
    assert report.handle is not None
    handle = JobsHandle.of(report.handle)
    writer = DocumentWriter(connection, DocumentName(cursor.events, name, "handle", "key", cursor.created), part_rows=2)
    await writer.add([(1, 19_999_999), (1, 19_999_999)])
    # No such part: it isn't asked for.
    forged = [*await writer.finish(), DocumentPart(10**6, 1, "0" * 32)]
    with pytest.raises(ArgumentError, match="expected a handle on at most 20,000,000 jobs, found 39,999,998"):
        await JobsHandle.of(handle.as_json() | {"parts": forged}).report(connection)
    # The parts of another handle, and of this one where its key or its queue is another's.
    for changed in ({"key": "other"}, {"cursor": asdict(handle.cursor) | {"created": "2026-01-01T00:00:00Z"}}):
        with pytest.raises(QueueGoneError, match="isn't stored any more"):
            await JobsHandle.of(handle.as_json() | changed).report(connection)
