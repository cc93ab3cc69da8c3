"""Several streams in one batch, by the readers themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from queries import places
from spark_streams import make_stream, publish_numbers, purge

from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError
from airflow_provider_jetstream.spark.source.batch_reader import (
    JetStreamReader,
    take_snapshots,
)
from airflow_provider_jetstream.spark.source.options import read_options
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream

_PLACE = StructType([StructField("stream", StringType()), StructField("seq", LongType())])


def _load(options: dict[str, str], kind: type[JetStreamReader] = JetStreamReader) -> JetStreamReader:
    return kind(options, _PLACE, take_snapshots(options, read_options(options, "load")))


def _read(options: dict[str, str]) -> list[tuple[str, int]]:
    reader = _load(options)
    return list(places(reader, reader.partitions()))


def _per_stream(streams: list[SourceStream], *values: Any) -> str:
    return json.dumps({stream.name: value for stream, value in zip(streams, values, strict=True)})


def _numbers(stream: SourceStream, first: int, last: int) -> list[tuple[str, int]]:
    return [(stream.name, sequence) for sequence in range(first, last + 1)]


def test_every_row_has_its_stream_and_tasks_are_shared(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    make_stream(one)
    make_stream(other, retention="workqueue")
    publish_numbers(one, 900)
    publish_numbers(other, 100)
    reader = _load({**pair_options, "minPartitions": "10"})
    publish_numbers(one, 5)
    tasks: list[Any] = [partition.task for partition in reader.partitions()]  # type: ignore[attr-defined]
    assert [task.stream for task in tasks] == [one.name] * 9 + [other.name]
    assert {task.method for task in tasks[:9]} == {"consumer"}
    assert tasks[9].method != "consumer"
    assert list(places(reader, reader.partitions())) == [*_numbers(one, 1, 900), *_numbers(other, 1, 100)]
    assert other.api(f"STREAM.INFO.{other.name}")["state"]["consumer_count"] == 0


def test_each_stream_has_bounds_of_its_own(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    for stream in pair:
        make_stream(stream)
        publish_numbers(stream, 20)
    bounds = {"startingOffsets": _per_stream(pair, 18, "earliest"), "endingOffsets": _per_stream(pair, "latest", 3)}
    assert _read({**pair_options, **bounds}) == [*_numbers(one, 18, 20), *_numbers(other, 1, 2)]
    assert _read({**pair_options, "endingOffsets": "earliest"}) == []
    between = other.next_message(11)
    assert between is not None
    times = {"startingTimestamp": _per_stream(pair, "1970-01-02T00:00:00Z", between.time)}
    found = _read({**pair_options, **times})
    assert found[:20] == _numbers(one, 1, 20)
    assert found[-1] == (other.name, 20)
    with pytest.raises(SparkOptionError, match="startingOffsets: expected a sequence up to 21"):
        _load({**pair_options, "startingOffsets": _per_stream(pair, 1, 22)}).partitions()


def test_a_loss_names_its_stream_and_is_accepted_for_that_stream(
    pair: list[SourceStream], pair_options: dict[str, str]
) -> None:
    one, other = pair
    for stream in pair:
        make_stream(stream)
        publish_numbers(stream, 10)
    reader = _load(pair_options)
    partitions = reader.partitions()
    purge(other, 4)
    with pytest.raises(DataLossError) as caught:
        list(places(reader, partitions))
    assert f"{other.name} begins at 4 now, and 1 was to be read" in str(caught.value)
    accepted = _per_stream([other], "1-3")
    assert f"acceptedLoss={accepted}," in str(caught.value)
    options = {**pair_options, "acceptedLoss": accepted, "startingOffsets": _per_stream(pair, 1, 1)}
    assert _read(options) == [*_numbers(one, 1, 10), *_numbers(other, 4, 10)]
    purge(one, 4)
    with pytest.raises(DataLossError, match=f"{one.name} begins at 4, startingOffsets is 1"):
        _read(options)


def test_a_stream_that_was_recreated_after_loading_is_told_apart(
    pair: list[SourceStream], pair_options: dict[str, str]
) -> None:
    for stream in pair:
        make_stream(stream)
        publish_numbers(stream, 3)
    reader = _load(pair_options)
    pair[1].api(f"STREAM.DELETE.{pair[1].name}")
    make_stream(pair[1])
    publish_numbers(pair[1], 3)
    with pytest.raises(DataLossError, match=f"the stream {pair[1].name} that was created .* recreated while"):
        list(places(reader, reader.partitions()))


def test_a_pattern_selects_the_streams_of_the_time_of_loading(
    pair: list[SourceStream], nats: NatsServer, name: str
) -> None:
    options = {"servers": nats.url, "streamPattern": f"{name}-*"}
    with pytest.raises(NotFoundError, match=f"expected streams that match {name}-\\*, found none: check the option"):
        _load(options).partitions()
    make_stream(pair[0])
    publish_numbers(pair[0], 3)
    reader = _load(options)
    make_stream(pair[1])
    publish_numbers(pair[1], 2)
    assert list(places(reader, reader.partitions())) == _numbers(pair[0], 1, 3)
    assert _read(options) == [*_numbers(pair[0], 1, 3), *_numbers(pair[1], 1, 2)]
    assert _read({**options, "streamPattern": f"{name}-[!a]"}) == _numbers(pair[1], 1, 2)
    with pytest.raises(SparkOptionError, match=f"found none for {pair[1].name}: add it"):
        _load({**options, "startingOffsets": _per_stream(pair[:1], 2)}).partitions()


@pytest.mark.slow
def test_a_pattern_looks_at_all_pages_of_names(own_nats: NatsServer) -> None:
    options = {"servers": own_nats.url, "streamPattern": "many-10??"}
    with open_stream({**options, "stream": "many"}) as stream:
        # A page of the server has 1,024 names.
        for number in range(1050):
            config = {"name": f"many-{number}", "subjects": [f"many.{number}"], "storage": "memory"}
            stream.api(f"STREAM.CREATE.many-{number}", config)
    assert sorted(take_snapshots(options, read_options(options, "load"))) == [f"many-{n}" for n in range(1000, 1050)]
