"""What counts as a loss: messages that the reader asked for, and that nothing explains; by the readers themselves."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import BinaryType, LongType, StructField, StructType
from queries import SEQUENCE, ReaderQuery, sequences
from spark_streams import delete, make_stream, publish, purge

from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError
from airflow_provider_jetstream.spark.source.batch_reader import JetStreamReader, take_snapshots
from airflow_provider_jetstream.spark.source.options import read_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.spark_face import SourceStream

    Act = Callable[[SourceStream], None]

_MINUTE = 60 * 10**9


def _load(stream_options: dict[str, str], **options: str) -> JetStreamReader:
    settings = {**stream_options, **options}
    return JetStreamReader(settings, SEQUENCE, take_snapshots(settings, read_options(settings, "read")))


def _publish(stream: SourceStream, *keys: str) -> None:
    publish(stream, ((f"{stream.name}.{key}", None, b"x") for key in keys))


def _update(stream: SourceStream) -> None:
    _publish(stream, *"abcde" * 3)


def _delete_head(stream: SourceStream) -> None:
    delete(stream, [1])


def _purge_a(stream: SourceStream) -> None:
    stream.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.a"})


# What isn't a loss: the stream's configuration, the subjects stored first, the filter, and what then happens.
_HARMLESS = {
    "keys are updated": ({"max_msgs_per_subject": 1}, "abcdeabcde", ">", _update),
    "keys with a history are updated": ({"max_msgs_per_subject": 2}, "abcdeabcde", ">", _update),
    "the first message is deleted": ({}, "abcde", ">", _delete_head),
    "the first message is deleted, far from the limits": (
        {"max_msgs": 50, "max_age": _MINUTE},
        "ab",
        ">",
        _delete_head,
    ),
    "excluded subjects are purged": ({}, "aaabbb", "b", _purge_a),
}


@pytest.mark.parametrize(("config", "keys", "wanted", "act"), _HARMLESS.values(), ids=_HARMLESS)
def test_a_batch_reads_what_is_left(
    stream_options: dict[str, str], stream: SourceStream, config: dict[str, Any], keys: str, wanted: str, act: Act
) -> None:
    make_stream(stream, **config)
    _publish(stream, *keys)
    last = stream.info().last
    reader = _load(stream_options, filterSubjects=f"{stream.name}.{wanted}")
    partitions = reader.partitions()
    act(stream)
    info = stream.info()
    assert info.first > 1
    assert list(sequences(reader, partitions)) == list(range(info.first, last + 1))
    assert list(sequences(reader, reader.partitions())) == list(range(info.first, last + 1))
    if "max_age" not in config:
        changes = _load(stream_options, filterSubjects=f"{stream.name}.{wanted}", startingOffsets="1")
        assert max(sequences(changes, changes.partitions())) == info.last


def _expire(stream: SourceStream) -> None:
    _publish(stream, *"bbbbbbbb")


def _purge_all(stream: SourceStream) -> None:
    purge(stream, 5)


_LOSSES = {
    "a limit on messages removed them": ({"max_msgs": 6}, "aabbab", "a", _expire, "max_msgs"),
    "a limit on bytes removed them": ({"max_bytes": 600}, "aabbab", "a", _expire, "max_bytes"),
    "they were purged": ({}, "aabbab", "a", _purge_all, "purged"),
    "the whole stream was purged": ({}, "aabbab", ">", _purge_all, "purged"),
    "keys were purged": ({"max_msgs_per_subject": 1}, "abcdef", ">", _purge_all, "purged"),
}


@pytest.mark.parametrize(("config", "keys", "wanted", "act", "cause"), _LOSSES.values(), ids=_LOSSES)
def test_a_batch_names_what_it_lost(
    stream_options: dict[str, str],
    stream: SourceStream,
    config: dict[str, Any],
    keys: str,
    wanted: str,
    act: Act,
    cause: str,
) -> None:
    make_stream(stream, **config)
    _publish(stream, *keys)
    filters = {"filterSubjects": f"{stream.name}.{wanted}"}
    reader = _load(stream_options, **filters)
    partitions = reader.partitions()
    act(stream)
    info = stream.info()
    with pytest.raises(DataLossError) as caught:
        list(sequences(reader, partitions))
    message = str(caught.value)
    assert f"begins at {info.first} now, and 1 was to be read" in message
    assert cause in message
    assert f"acceptedLoss=1-{min(info.first - 1, 6)}," in message
    accepting = _load(stream_options, **filters, acceptedLoss=f"1-{info.first - 1}", startingOffsets="1")
    assert all(sequence >= info.first for sequence in sequences(accepting, accepting.partitions()))


@pytest.mark.parametrize(
    ("config", "act", "cause"), [({"max_msgs": 6}, _expire, "max_msgs"), ({}, _purge_all, "purged")]
)
def test_a_query_names_what_it_lost_until_exactly_that_is_accepted(
    stream_options: dict[str, str], stream: SourceStream, config: dict[str, Any], act: Act, cause: str
) -> None:
    make_stream(stream, **config)
    query = ReaderQuery(stream_options)
    _publish(stream, *"abcdef")
    act(stream)
    info = stream.info()
    with closing(query):
        with pytest.raises(DataLossError, match=f"begins at {info.first}, and 1 wasn't read") as caught:
            query.batch()
        assert cause in str(caught.value)
        query.restart(stream_options, acceptedLoss=f"1-{info.first - 2}")
        with pytest.raises(DataLossError, match=f"acceptedLoss=1-{info.first - 1}"):
            query.batch()
        query.restart(stream_options, acceptedLoss=f"1-{info.first - 1}")
        assert query.batch() == list(range(info.first, info.last + 1))


@pytest.mark.parametrize(("wanted", "is_lost"), [("a", True), ("b", False)])
def test_a_purge_under_a_reader_is_lost_to_those_who_asked_for_it(
    stream_options: dict[str, str], stream: SourceStream, wanted: str, *, is_lost: bool
) -> None:
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 20_000) for _ in range(1500)))
    _publish(stream, *"b" * 50)
    settings = {**stream_options, "filterSubjects": f"{stream.name}.{wanted},{stream.name}.c", "fetchBatch": "50"}
    # With the bodies, which aren't all received before the purge.
    schema = StructType([StructField("seq", LongType()), StructField("value", BinaryType())])
    reader = JetStreamReader(settings, schema, take_snapshots(settings, read_options(settings, "read")))
    batches = sequences(reader, reader.partitions())
    assert next(batches) == (1 if is_lost else 1501)
    purge(stream, 1400)
    if is_lost:
        with pytest.raises(DataLossError, match=r"begins at 1400 now, and .* was being read: .* purged"):
            list(batches)
    else:
        assert list(batches) == list(range(1502, 1551))


@pytest.mark.slow
def test_expired_messages_are_lost(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, max_age=1_000_000_000, max_msgs_per_subject=1, duplicate_window=100_000_000)
    query = ReaderQuery(stream_options)
    _publish(stream, "a", "b")
    reader = _load(stream_options)
    partitions = reader.partitions()
    while stream.info().first < 3:
        pass
    _publish(stream, "a")
    with closing(query):
        with pytest.raises(DataLossError, match="max_age"):
            list(sequences(reader, partitions))
        with pytest.raises(DataLossError, match="max_age"):
            query.batch()


def _ahead(offset: dict[str, Any], sequence: int) -> dict[str, Any]:
    return {"streams": {name: position | {"seq": sequence} for name, position in offset["streams"].items()}}


def test_a_checkpoint_ahead_of_its_stream_is_refused_and_a_new_stream_is_told_apart(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    _publish(stream, "a", "b")
    query = ReaderQuery(stream_options)
    assert query.batch() == [1, 2]
    read = query.offset
    query.offset = _ahead(read, 9)
    with closing(query):
        with pytest.raises(SparkOptionError, match=r"the checkpoint is at 9, and .* ends at 2"):
            query.batch()
        query.restart(stream_options, failOnDataLoss="false")
        query.offset = _ahead(read, 9)
        assert query.batch() == []
        _publish(stream, "c")
        assert query.batch() == [3]
        stream.api(f"STREAM.DELETE.{stream.name}")
        make_stream(stream)
        _publish(stream, "a")
        query.restart(stream_options)
        with pytest.raises(DataLossError, match="deleted and recreated"):
            query.batch()
