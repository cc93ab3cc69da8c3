from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from spark_streams import make_stream, read_all

from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.spark_face import RowWriter, open_stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection
    from testbed.spark_face import SourceStream

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
_SCHEMA = pa.schema([("value", pa.binary()), ("subject", pa.string()), ("headers", _HEADERS), ("msg_id", pa.string())])


def _write(
    stream_options: Mapping[str, str], rows: Sequence[Mapping[str, Any]], identity: str = "write:0", together: int = 500
) -> RowWriter:
    with RowWriter(stream_options, identity) as writer:
        for start in range(0, len(rows), together):
            writer.send(pa.RecordBatch.from_pylist(list(rows[start : start + together]), _SCHEMA))
        writer.wait_for_all()
    return writer


def test_a_copy_leaves_out_what_the_server_gave_a_meaning(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    own = [{"key": "Tenant", "value": "north"}]
    expected = [{"key": "Nats-Expected-Last-Sequence", "value": "0"}]
    first = {"value": b"a", "subject": f"{stream.name}.a", "headers": own + expected, "msg_id": "first"}
    _write(stream_options, [first])
    (stored,) = read_all(stream_options)
    copy = [{**{name: stored[name] for name in ("value", "headers")}, "subject": f"{stream.name}.copy"}]
    with pytest.raises(RowsNotStoredError, match="natsHeaders=drop"):
        _write(stream_options, copy)
    for _ in range(2):
        _write({**stream_options, "natsHeaders": "drop"}, copy, "copy:0")
    (copied,) = read_all(stream_options, first=2)
    assert copied["value"] == b"a"
    assert [pair["key"] for pair in copied["headers"]] == ["Nats-Msg-Id", "Nats-Expected-Stream", "Tenant"]
    assert copied["headers"][0]["value"] != "first"


def test_every_row_that_fails_is_named(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, max_msg_size=200)
    good, other = f"{stream.name}.a", "elsewhere.a"
    rows: list[dict[str, Any]] = [{"value": b"x", "subject": good, "msg_id": f"id-{number}"} for number in range(20)]
    rows[3]["subject"] = "a b"
    rows[4]["subject"] = "a.*"
    rows[5]["subject"] = None
    rows[6]["headers"] = [{"key": "Bad", "value": "a\r\nNats-TTL: 1"}]
    rows[7]["headers"] = [{"key": "Nats-Msg-Id", "value": "x"}]
    rows[8]["value"] = rows[9]["value"] = b"x" * 300
    rows[10]["value"] = b"x" * (2 << 20)
    rows[11]["msg_id"], rows[13]["msg_id"] = "a\nb", "a "
    rows[12]["subject"] = rows[14]["subject"] = other
    with pytest.raises(RowsNotStoredError) as caught:
        _write({**stream_options, "ackTimeout": "0.5"}, rows)
    message = str(caught.value)
    assert message.startswith("12 rows of partition 0, counted from 0, aren't known to be stored; 8 others are.")
    for expected in (
        "rows 3: its subject 'a b' can't be used",
        "rows 4: its subject 'a.*' can't be used",
        "rows 5: it has no subject, and there is no option subject",
        "rows 6: its header 'Bad' can't be used",
        "rows 7: its header Nats-Msg-Id is set by the writer",
        "rows 8-9: message size exceeds maximum allowed (error 10054)",
        "rows 10: body and headers have more than the 1048576 bytes that the server takes",
        "rows 11, 13: its msg_id is empty, or has white space at its ends or more than one line",
        f"rows 12, 14: no stream stores {other}",
        f"such as {good} id-8, {good} id-9",
    ):
        assert expected in message
    stored = {
        pair["value"] for row in read_all(stream_options) for pair in row["headers"] if pair["key"] == "Nats-Msg-Id"
    }
    assert stored == {f"id-{number}" for number in (0, 1, 2, 15, 16, 17, 18, 19)}


@pytest.mark.parametrize("together", [500, 9000])
def test_the_error_names_the_rows_that_a_full_stream_refused(
    stream_options: dict[str, str], stream: SourceStream, together: int
) -> None:
    make_stream(stream, max_msgs=50, discard="new")
    rows = [{"value": b"x", "subject": f"{stream.name}.a"} for _ in range(9000)]
    with pytest.raises(RowsNotStoredError) as caught:
        _write({**stream_options, "maxInFlight": "100"}, rows, together=together)
    refused = re.search(r"rows 50-(\d+): maximum messages exceeded \(error 10077\)", str(caught.value))
    untried = re.search(r"rows from (\d+) on: not tried after so many failures", str(caught.value))
    assert refused
    assert untried
    # Each row is named.
    assert int(refused[1]) + 1 == int(untried[1]) < 2_000


def test_another_stream_with_the_subject_stores_nothing(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    with open_stream({**stream_options, "stream": f"{stream.name}x"}) as other:
        make_stream(other)
        with pytest.raises(RowsNotStoredError, match=r"rows 0: expected stream does not match \(error 10060\)"):
            _write(stream_options, [{"value": b"x", "subject": f"{other.name}.a"}])
        assert other.info().last == 0


async def test_a_row_that_another_stream_says_it_stored_is_not_stored(
    connection: NatsPyConnection, stream_options: dict[str, str], name: str
) -> None:
    async def answer_as_another_stream(message: Msg) -> None:
        await message.respond(b'{"stream":"another","seq":1}')
        await message.respond(b'{"error":{"code":400,"err_code":10060,"description":"expected stream does not match"}}')

    await connection.client.subscribe(f"{name}.outside", cb=answer_as_another_stream)
    await connection.client.flush()
    with pytest.raises(RowsNotStoredError, match="rows 0: expected stream does not match"):
        await asyncio.to_thread(_write, stream_options, [{"value": b"x", "subject": f"{name}.outside"}])


def test_rows_wait_for_a_stream_that_does_not_listen_for_a_moment(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    with open_stream(stream_options) as other:
        making = threading.Timer(0.3, make_stream, [other])
        making.start()
        publisher = _write(stream_options, [{"value": b"x", "subject": f"{stream.name}.a"}] * 3)
        making.join()
    assert publisher.stored == 3
    assert stream.info().last == 3


@pytest.mark.parametrize("window", ["2", "50", "1000"])
def test_rows_of_every_size_with_bad_ones_between_them_are_stored(
    stream_options: dict[str, str], stream: SourceStream, window: str
) -> None:
    make_stream(stream)
    rows: list[dict[str, Any]] = [
        {
            "value": str(number).encode() + b"x" * ((number * 7919) % 200_000 if number % 10 == 0 else number % 300),
            "msg_id": f"id-{number}",
        }
        for number in range(1200)
    ]
    bad = {0, 1, 250, 499, 500, 501, 1198, 1199}
    for number, row in enumerate(rows):
        row["subject"] = "a b" if number in bad else f"{stream.name}.a"
        row["headers"] = [{"key": "At", "value": str(number)}] if number % 3 == 0 else None
    with pytest.raises(RowsNotStoredError, match=r"rows 0-1, 250, 499-501, 1198-1199: its subject 'a b' can't be used"):
        _write({**stream_options, "maxInFlight": window}, rows)
    good = [row for number, row in enumerate(rows) if number not in bad]
    read = read_all(stream_options)
    assert [row["value"] for row in read] == [row["value"] for row in good]
    headers = [{pair["key"]: pair["value"] for pair in row["headers"]} for row in read]
    assert [row_headers["Nats-Msg-Id"] for row_headers in headers] == [row["msg_id"] for row in good]
    assert [row_headers.get("At") for row_headers in headers] == [
        (row["headers"] or [{}])[0].get("value") for row in good
    ]


def test_writing_continues_after_a_restart_of_the_server(own_nats: NatsServer, name: str) -> None:
    stream_options = {"servers": own_nats.url, "stream": name, "timeout": "3"}
    with open_stream(stream_options) as stream:
        make_stream(stream)
    rows = [{"value": str(number).encode() + b"x" * 2000, "subject": f"{name}.a"} for number in range(30_000)]
    restart = threading.Thread(target=_restart_during_write, args=(own_nats, stream_options))
    restart.start()
    publisher = _write(stream_options, rows)
    restart.join()
    assert publisher.stored == 30_000
    assert [row["value"] for row in read_all(stream_options)] == [row["value"] for row in rows]


def _restart_during_write(server: NatsServer, stream_options: Mapping[str, str]) -> None:
    with open_stream(stream_options) as stream:
        while stream.info().last < 3000:
            time.sleep(0.01)
    server.kill()
    server.start()


def test_rows_are_named_when_the_server_stays_away(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.PUBLISHER_PAUSE, 0.01)
    stream_options = {"servers": own_nats.url, "stream": name, "timeout": "1", "ackTimeout": "1"}
    with open_stream(stream_options) as stream:
        make_stream(stream)
    writer = RowWriter(stream_options, "w:3", "partition 3")
    rows = [{"value": b"x", "subject": f"{name}.a"} for _ in range(10)]
    own_nats.kill()
    writer.send(pa.RecordBatch.from_pylist(rows, _SCHEMA))
    with pytest.raises(RowsNotStoredError, match=r"(?s)10 rows of partition 3.*rows 0-9: no acknowledgement") as caught:
        writer.wait_for_all()
    assert "no NATS server reached" in str(caught.value)


def test_a_subject_that_may_not_be_published_to_is_named(name: str) -> None:
    user = f'{{user: u, password: p, permissions: {{publish: ["$JS.API.>", "{name}.a"], subscribe: "_INBOX.>"}}}}'
    with NatsServer(config=f"authorization {{ users: [{user}] }}") as server:
        stream_options = {"servers": server.url, "stream": name, "user": "u", "password": "p"}
        with open_stream(stream_options) as stream:
            make_stream(stream)
        rows = [{"value": b"x", "subject": f"{name}.{'ab'[number % 2]}"} for number in range(4)]
        with pytest.raises(RowsNotStoredError, match=rf"rows 1, 3: the server doesn't allow publishing to {name}\.b"):
            _write(stream_options, rows)
        assert len(read_all(stream_options)) == 2
