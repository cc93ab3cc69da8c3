from __future__ import annotations

import gzip
import threading
import time
import tracemalloc
import zlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from spark_streams import METHODS, make_stream, publish, publish_numbers, read_all

from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed import seams
from testbed.spark_face import JetStreamDataSource, NatsSocket, open_stream

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream

_SPOOF = b"x\r\nNATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 1500\r\n\r\n"


def _numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["value"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_fetch_method_reads_the_same_messages(
    stream_options: dict[str, str], stream: SourceStream, method: str
) -> None:
    make_stream(stream)
    sent: list[tuple[str, dict[str, str] | None, bytes]] = [
        (f"{stream.name}.plain", None, b"body"),
        (f"{stream.name}.empty", None, b""),
        (f"{stream.name}.header", {"Key": "value", "Other": "a: b"}, b"body"),
        (f"{stream.name}.header.empty", {"Key": ""}, b""),
        (f"{stream.name}.nasty", {"Spaces": "  around  ", "Umlaut": "grün"}, b"\r\n\r\nMSG a b 5\r\nPING\r\n"),
        (f"{stream.name}.grün", {"Nats-Subject": "spoofed", "Nats-Sequence": "77"}, b"\x00\xff" * 50),
        (f"{stream.name}.big", None, b"x" * (1 << 20)),
        (f"{stream.name}.status", {"Status": "404"}, _SPOOF),
    ]
    publish(stream, sent * 3)
    rows = read_all({**stream_options, "fetchMethod": method})
    expected = [
        (subject, [{"key": key, "value": value.strip()} for key, value in (headers or {}).items()], body)
        for subject, headers, body in sent * 3
    ]
    assert [(row["subject"], row["headers"], row["value"]) for row in rows] == expected
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["stream"] for row in rows} == {stream.name}
    for row in rows:
        stored = stream.next_message(row["seq"])
        assert stored is not None
        assert row["timestamp"].timestamp() == stored.stored_at.timestamp()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("first", "last"), [(1, 1), (3, 7), (10, 10), (1, 6)])
def test_a_range_is_read_exactly(
    stream_options: dict[str, str], stream: SourceStream, method: str, first: int, last: int
) -> None:
    make_stream(stream)
    publish_numbers(stream, 10)
    rows = read_all({**stream_options, "fetchMethod": method, "fetchBatch": "4"}, first=first, last=last)
    assert [row["seq"] for row in rows] == list(range(first, last + 1))


@pytest.mark.parametrize("method", METHODS)
def test_subjects_are_filtered_by_the_server(stream_options: dict[str, str], stream: SourceStream, method: str) -> None:
    make_stream(stream)
    publish_numbers(stream, 70)
    filters = f"{stream.name}.1,{stream.name}.5"
    rows = read_all({**stream_options, "fetchMethod": method, "filterSubjects": filters})
    assert sorted(_numbers(rows)) == [number for number in range(70) if number % 7 in (1, 5)]


@pytest.mark.parametrize("names", [("seq",), ("subject", "timestamp"), ("headers", "value"), ()])
def test_only_requested_columns_are_read(
    stream_options: dict[str, str], stream: SourceStream, names: tuple[str, ...]
) -> None:
    make_stream(stream)
    publish_numbers(stream, 20)
    for method in METHODS:
        rows = read_all({**stream_options, "fetchMethod": method}, names=names)
        assert [tuple(row) for row in rows] == [names] * 20


@pytest.mark.slow
def test_messages_beyond_the_servers_limit_of_today_are_read(own_nats: NatsServer, name: str) -> None:
    own_nats.stop()
    own_nats.config = "max_payload: 32MB"
    own_nats.start()
    bodies = [b"1", b"x" * (12 << 20), b"2", b"y" * (30 << 20), b"3"]
    with open_stream(options := {"servers": own_nats.url, "stream": name}) as stream:
        make_stream(stream)
        publish(stream, [(f"{name}.a", {"Key": "value"}, body) for body in bodies])
    own_nats.stop()
    own_nats.config = "max_payload: 64KB"
    own_nats.start()
    for method in METHODS:
        rows = read_all({**options, "fetchMethod": method})
        assert [row["value"] for row in rows] == bodies


def test_bodies_are_not_sent_where_they_are_not_requested(
    stream_options: dict[str, str], stream: SourceStream, nats: NatsServer
) -> None:
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 100_000) for _ in range(100)))
    before = nats.monitor("varz")["out_bytes"]
    assert len(read_all(stream_options, names=["seq", "subject"])) == 100
    assert nats.monitor("varz")["out_bytes"] - before < 100_000


@pytest.mark.parametrize("method", METHODS)
def test_compressed_bodies_are_decompressed(stream_options: dict[str, str], stream: SourceStream, method: str) -> None:
    make_stream(stream)
    body, zeros = b"body " * 1000, zlib.compress(bytes(17 << 20))
    sent = [zlib.compress(body), gzip.compress(body), b"plain", b"", zlib.compress(body)[:-1], zeros]
    publish(stream, ((f"{stream.name}.a", None, body) for body in sent))
    stream_options = {**stream_options, "fetchMethod": method, "payloadCompression": "zlib"}
    assert [row["value"] for row in read_all(stream_options)] == [body, body, *sent[2:]]
    assert [row["value"] for row in read_all({**stream_options, "payloadCompression": "none"})] == sent


@pytest.mark.parametrize("options", [*({"fetchMethod": method} for method in METHODS), {"latestPerSubject": "true"}])
def test_what_is_decompressed_at_a_time_is_bounded_and_nothing_is_left_out(
    stream_options: dict[str, str], stream: SourceStream, options: dict[str, str]
) -> None:
    make_stream(stream)
    sizes = [16 << 20, 10, 0, 1 << 20] * 6
    publish(stream, ((f"{stream.name}.{row}", None, zlib.compress(bytes(size))) for row, size in enumerate(sizes)))
    source = JetStreamDataSource({**stream_options, **options, "payloadCompression": "zlib"})
    # All of it arrives with one read of the socket.
    reader = source.reader(source.schema())
    read: list[int] = []
    tracemalloc.start()
    try:
        for partition in reader.partitions():
            for batch in reader.read(partition):
                assert isinstance(batch, pa.RecordBatch)
                assert batch.nbytes < 21 << 20
                read += pc.binary_length(batch.column("value")).to_pylist()
        # In all they have 102 MiB.
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert read == sizes


@pytest.mark.slow
def test_a_read_continues_after_a_restart_of_the_server(own_nats: NatsServer, name: str) -> None:
    stream_options = {"servers": own_nats.url, "stream": name, "fetchBatch": "50", "timeout": "3"}
    with open_stream(stream_options) as stream:
        make_stream(stream)
        publish(stream, ((f"{name}.a", None, b"x" * 20_000) for _ in range(3000)))
    for method in METHODS:
        restart = threading.Thread(target=_restart_soon, args=(own_nats,))
        restart.start()
        rows = read_all({**stream_options, "fetchMethod": method}, names=["seq", "value"])
        restart.join()
        assert [row["seq"] for row in rows] == list(range(1, 3001)), method


def _restart_soon(server: NatsServer) -> None:
    time.sleep(0.05)
    server.kill()
    server.start()


def test_reading_a_work_queue_does_not_affect_its_workers(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, retention="workqueue")
    config = {"name": "w", "durable_name": "w", "ack_policy": "explicit", "ack_wait": 30_000_000_000, "max_deliver": 3}
    stream.api(f"CONSUMER.CREATE.{stream.name}.w", {"stream_name": stream.name, "config": config})
    publish_numbers(stream, 1000)
    reply = stream.socket.new_reply_subject()
    stream.socket.send(f"PUB $JS.API.CONSUMER.MSG.NEXT.{stream.name}.w {reply} 3\r\n100\r\n".encode())
    stream.socket.receive(lambda buffer, filled: buffer[:filled].count(b"$JS.ACK.") == 100)
    acks = [
        word for word in bytes(stream.socket.buffer[: stream.socket.filled]).split() if word.startswith(b"$JS.ACK.")
    ]
    stream.socket.send(b"".join(b"PUB %b 4\r\n+ACK\r\n" % ack for ack in acks[10:60]))
    stream.socket.consume(stream.socket.filled)
    before = _settled_info(stream)
    for method in ("direct", "api"):
        rows = read_all({**stream_options, "fetchMethod": method})
        assert _numbers(rows) == [*range(10), *range(60, 1000)]
    assert read_all(stream_options) == rows
    after = _settled_info(stream)
    assert after == before
    assert before["num_ack_pending"] == 50
    assert stream.api(f"CONSUMER.NAMES.{stream.name}")["consumers"] == ["w"]
    with pytest.raises(SparkOptionError, match="takes messages from its workers"):
        read_all({**stream_options, "fetchMethod": "consumer"})


def _settled_info(stream: SourceStream) -> dict[str, Any]:
    info = stream.api(f"CONSUMER.INFO.{stream.name}.w")
    while info["num_ack_pending"] != 50:
        info = stream.api(f"CONSUMER.INFO.{stream.name}.w")
    del info["ts"]
    return info


def test_direct_gets_need_the_streams_permission(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, retention="workqueue", allow_direct=False)
    publish_numbers(stream, 500)
    assert _numbers(read_all(stream_options)) == list(range(500))
    with pytest.raises(SparkOptionError, match="allow_direct"):
        read_all({**stream_options, "fetchMethod": "direct"})


@pytest.mark.slow
def test_a_message_that_ends_like_an_answer_is_detected(
    stream_options: dict[str, str], stream: SourceStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stream(stream)
    publish(stream, [(f"{stream.name}.a", None, _SPOOF)] * 2000)
    held: list[bytes] = []
    original = NatsSocket.receive

    def receive(nats_socket: NatsSocket, enough: Any, timeout: float | None = None) -> None:
        if nats_socket.__dict__.get("rest"):
            # The held bytes arrive now.
            rest = nats_socket.__dict__.pop("rest")
            nats_socket.buffer[nats_socket.filled : nats_socket.filled + len(rest)] = rest
            nats_socket.filled += len(rest)
            return
        original(nats_socket, enough, timeout)
        end = nats_socket.buffer.find(_SPOOF + b"\r\n", 0, nats_socket.filled)
        if end >= 0 and not held and (end := end + len(_SPOOF) + 2) < nats_socket.filled:
            # Make the received bytes end with a body.
            held.append(bytes(nats_socket.buffer[end : nats_socket.filled]))
            nats_socket.__dict__["rest"] = held[0]
            nats_socket.filled = end

    monkeypatch.setattr(seams.NATS_SOCKET_RECEIVE, receive)
    rows = read_all({**stream_options, "fetchMethod": "direct"}, names=["seq"])
    assert [row["seq"] for row in rows] == list(range(1, 2001))
    assert len(held) == 1
    assert len(held[0]) > 0
