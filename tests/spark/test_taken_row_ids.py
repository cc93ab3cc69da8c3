"""A row is stored whoever has used its message id: a duplicate is believed only if it is the row."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, BinaryType, LongType, StringType, StructField, StructType
from spark_streams import delete, make_stream, publish, publish_numbers, purge, read_all

from airflow_provider_jetstream.spark.errors import RowsNotStoredError
from testbed.nats_server import NatsServer
from testbed.spark_face import JetStreamDataSource, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream

    Message = tuple[str, Mapping[str, str] | None, bytes]

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
_PAIRS = ArrayType(StructType([StructField("key", StringType()), StructField("value", StringType())]))
_SCHEMA = pa.schema([("value", pa.binary()), ("subject", pa.string()), ("headers", _HEADERS), ("msg_id", pa.string())])
_ROW = {"value": b"mine", "headers": [{"key": "Kind", "value": "a"}], "msg_id": "row-1"}


class _Write:
    """One write of rows, whose only task may run again, as Spark runs it."""

    def __init__(self, options: Mapping[str, str], rows: Sequence[Mapping[str, Any]], **columns: pa.DataType) -> None:
        schema = _SCHEMA
        for name, kind in columns.items():
            schema = schema.append(pa.field(name, kind))
        names = [name for name in schema.names if any(name in row for row in rows)]
        self._batch = pa.RecordBatch.from_pylist([dict(row) for row in rows], schema).select(names)
        kinds = {"value": BinaryType(), "headers": _PAIRS, "expected_last_subject_sequence": LongType()}
        fields = [StructField(name, kinds.get(name, StringType())) for name in names]
        spark_schema = StructType(fields)
        options = {"subject": f"{options['stream']}.rows", **options}
        self.writer: Any = JetStreamDataSource(options).writer(spark_schema, overwrite=False)

    def run(self) -> tuple[int, int]:
        """Return how many rows are stored, and how many of them were before."""
        written = self.writer.write(iter([self._batch]))
        self.writer.commit([written])
        return written.rows, written.duplicates


def _stored(options: Mapping[str, str]) -> Counter[bytes]:
    return Counter(row["value"] for row in read_all(options, names=("value",)))


def _ids(options: Mapping[str, str]) -> list[str]:
    rows = read_all(options, names=("headers",))
    return [pair["value"] for row in rows for pair in row["headers"] if pair["key"] == "Nats-Msg-Id"]


def _headers(options: Mapping[str, str], **others: str) -> dict[str, str]:
    return {"Nats-Msg-Id": "row-1", "Nats-Expected-Stream": options["stream"], **others}


@pytest.mark.slow
@pytest.mark.parametrize(
    "foreign",
    [
        lambda options, subject: (subject, _headers(options, Kind="a"), b"other"),
        lambda options, subject: (f"{subject}.b", _headers(options, Kind="a"), b"mine"),
        lambda options, subject: (subject, _headers(options, Kind="b"), b"mine"),
        lambda options, subject: (subject, _headers(options), b"mine"),
        lambda options, subject: (subject, _headers(options, Kind="a", More="1"), b"mine"),
        lambda options, subject: (subject, {"Nats-Msg-Id": "row-1"}, b""),
        lambda options, subject: (subject, _headers(options, Kind="\udcff"), b"mine"),
    ],
)
def test_a_row_whose_id_is_taken_is_stored_once(
    stream_options: dict[str, str],
    stream: SourceStream,
    foreign: Callable[[Mapping[str, str], str], Message],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_stream(stream)
    subject, headers, body = foreign(stream_options, f"{stream.name}.rows")
    _publish_raw(stream, subject, headers or {}, body)
    for expected in ((1, 0), (1, 1)):
        # Another write of the row, and another attempt of each.
        write = _Write(stream_options, [_ROW])
        assert write.run() == expected
        assert write.run() == (1, 1)
    assert stream.info().last == 2
    mine = read_all(stream_options, first=2)[0]
    assert (mine["value"], mine["subject"]) == (b"mine", f"{stream.name}.rows")
    assert (
        "1 rows of partition 0 have message ids that somebody else has taken, such as that of sequence 1" in caplog.text
    )


def _publish_raw(stream: SourceStream, subject: str, headers: Mapping[str, str], body: bytes) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    block = f"NATS/1.0\r\n{lines}\r\n".encode(errors="surrogateescape")
    frame = b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), len(block), len(block) + len(body), block, body)
    before = stream.info().last
    stream.socket.send(frame)
    while stream.info().last == before:
        pass


@pytest.mark.slow
def test_a_row_is_stored_where_its_next_ids_are_taken_too(stream_options: dict[str, str], stream: SourceStream) -> None:
    taken = ["row-1"]
    for number in range(10):
        make_stream(stream)
        # As somebody who knows the ids, and is first.
        for message_id in taken:
            _publish_raw(stream, f"{stream.name}.x", {"Nats-Msg-Id": message_id}, b"other")
        write = _Write(stream_options, [_ROW])
        assert write.run() == (1, 0)
        taken.append(_ids(stream_options)[-1])
        # An id that nobody can take isn't made again either.
        assert write.run() == (1, int(number < 8))
        stream.api(f"STREAM.DELETE.{stream.name}")
    assert len({*taken}) == len(taken)
    assert all(len(message_id) < 50 for message_id in taken)


@pytest.mark.slow
@pytest.mark.parametrize("is_purged", [False, True])
def test_a_task_that_runs_again_after_its_jobs_were_done_stores_nothing(
    stream_options: dict[str, str], stream: SourceStream, *, is_purged: bool
) -> None:
    make_stream(stream, retention="workqueue")
    write = _Write(stream_options, [{"value": b"%d" % (number % 900)} for number in range(1000)])
    assert write.run() == (1000, 0)
    purge(stream, 1001 if is_purged else 500)
    # The task's ids are made with a secret of the write: nobody else can have used them.
    assert write.run() == (1000, 1000)
    assert stream.info().last == 1000


@pytest.mark.parametrize("prefix", [{}, {"msgIdPrefix": "nightly"}])
def test_what_a_gone_message_was_is_not_known_with_ids_that_others_can_compute(
    stream_options: dict[str, str], stream: SourceStream, prefix: dict[str, str]
) -> None:
    make_stream(stream)
    rows = [{"value": b"%d" % number, **({} if prefix else {"msg_id": f"row-{number}"})} for number in range(5)]
    assert _Write({**stream_options, **prefix}, rows).run() == (5, 0)
    delete(stream, [2, 4])
    with pytest.raises(RowsNotStoredError, match=r"rows 1, 3: .* nothing tells what it was: it is gone"):
        _Write({**stream_options, **prefix}, rows).run()
    assert stream.info().last == 5


def test_the_archive_tells_what_a_job_was_that_is_done(stream_options: dict[str, str], stream: SourceStream) -> None:
    name = stream.name
    make_stream(stream, retention="workqueue", republish={"src": ">", "dest": f"archive.{name}.>"})
    archive = {"name": f"{name}-copies", "subjects": [f"archive.{name}.>"]}
    stream.api(f"STREAM.CREATE.{name}-copies", archive)
    _publish_raw(stream, f"{name}.rows", {"Nats-Msg-Id": "row-3"}, b"other")
    rows = [{"value": b"%d" % number, "msg_id": f"row-{number}"} for number in range(6)]
    assert _Write(stream_options, rows).run() == (6, 0)
    purge(stream, stream.info().last + 1)
    # Also what somebody else has had done.
    assert _Write(stream_options, rows).run() == (6, 6)
    assert stream.info().last == 7


_RIGHTS = '["$JS.API.STREAM.INFO.*", "$JS.API.STREAM.CREATE.*", "$JS.API.STREAM.PURGE.*", "rows.>", "_INBOX.>"%s]'


@pytest.mark.parametrize("may_read", [False, True])
def test_who_may_not_read_can_retry_a_write_with_ids_that_nobody_can_compute(name: str, *, may_read: bool) -> None:
    rights = _RIGHTS % (', "$JS.API.STREAM.MSG.GET.*"' if may_read else "")
    users = f'authorization {{ users: [{{user: u, password: p, permissions: {{publish: {rights}, subscribe: ">"}}}}] }}'
    with NatsServer(config=users) as server:
        options = {"servers": server.url, "stream": name, "user": "u", "password": "p", "subject": "rows.a"}
        with open_stream(options) as stream:
            make_stream(stream, subjects=["rows.>"])
            write = _Write(options, [{"value": b"a"}, {"value": b"b"}])
            assert write.run() == (2, 0)
            assert write.run() == (2, 2)
            write = _Write(options, [{"value": b"a", "msg_id": "a"}])
            assert write.run() == (1, 0)
            if may_read:
                assert write.run() == (1, 1)
            else:
                permission = rf"may not publish to \$JS\.API\.STREAM\.MSG\.GET\.{name}"
                with pytest.raises(RowsNotStoredError, match=permission):
                    write.run()
            assert stream.info().last == 3


@pytest.mark.since_server("2.12", "schedules")
def test_what_the_server_adds_to_a_row_or_changes_of_it_makes_no_other_one(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    transform = {"src": f"{stream.name}.*", "dest": f"{stream.name}.moved.{{{{wildcard(1)}}}}"}
    make_stream(stream, allow_msg_schedules=True, subject_transform=transform)
    schedule = {"schedule": "@at 2130-01-01T00:00:00Z", "schedule_target": f"{stream.name}.target"}
    trace = [{"key": "Nats-Trace-Dest", "value": "somewhere"}]
    rows = [
        {"value": b"later", "msg_id": "a", "subject": f"{stream.name}.later.a", **schedule},
        {"value": b"traced", "msg_id": "b", "headers": trace, "subject": f"{stream.name}.t"},
    ]
    columns = dict.fromkeys(schedule, pa.string())
    assert _Write(stream_options, rows[:1], **columns).run() == (1, 0)
    assert _Write(stream_options, rows[:1], **columns).run() == (1, 1)
    assert _Write(stream_options, rows[1:]).run() == (1, 0)
    assert _Write(stream_options, rows[1:]).run() == (1, 1)


def test_a_row_is_not_taken_for_the_next_message_of_its_id(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    row = {**_ROW, "expected_last_subject_sequence": 0}
    _publish_raw(stream, f"{stream.name}.rows", {"Nats-Msg-Id": "row-1"}, b"other")
    with pytest.raises(RowsNotStoredError, match="wrong last sequence"):
        _Write(stream_options, [row], expected_last_subject_sequence=pa.int64()).run()
    purge(stream, 2)
    other = {**row, "msg_id": "row-2"}
    for duplicates in (0, 1):
        write = _Write(stream_options, [other], expected_last_subject_sequence=pa.int64())
        assert write.run() == (1, duplicates)


def test_a_querys_rows_are_stored_whoever_has_used_their_ids(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, tmp_path: Path
) -> None:
    make_stream(stream)
    publish_numbers(stream, 300)
    copies = {**stream_options, "stream": f"{stream.name}c"}
    with open_stream(copies) as copied:
        make_stream(copied)
        source = {**stream_options, "startingOffsets": "earliest", "minPartitions": "2"}
        frame = spark.readStream.format("jetstream").options(**source).load().select("value")

        def run() -> None:
            writer = frame.writeStream.format("jetstream").options(**copies, subject=f"{copied.name}.a")
            query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
            query.awaitTermination(120)

        run()
        ids = _ids(copies)
        assert len({*ids}) == 300
        copied.api(f"STREAM.DELETE.{copied.name}")
        make_stream(copied)
        publish(copied, ((f"{copied.name}.b", {"Nats-Msg-Id": message_id}, b"other") for message_id in ids[::2]))
        (tmp_path / "commits" / "0").unlink()
        (tmp_path / "commits" / ".0.crc").unlink()
        run()
        run()
        assert _stored(copies) == {b"other": 150, **{str(number).encode(): 1 for number in range(300)}}
