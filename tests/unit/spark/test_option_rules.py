"""Option rules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.options import (
    Bound,
    SessionDefaults,
    option_names,
    read_options,
    write_options,
)
from airflow_provider_jetstream.spark.source.partition_planner import plan_ranges, range_starts, with_share
from airflow_provider_jetstream.spark.source.source_stream import StreamInfo

if TYPE_CHECKING:
    from airflow_provider_jetstream.spark.source.options import Purpose

_STREAM = {"stream": "orders"}


_SEVERAL = {"streams": "orders, payments"}


_INFO = StreamInfo("then", "limits", allow_direct=True, duplicate_window=120, first=1, last=100)


@pytest.mark.parametrize(
    ("purpose", "stream_options", "message"),
    [
        ("read", {"startingOffset": "1"}, "found 'startingOffset': did you mean startingOffsets?"),
        ("read", {"encoding": "x"}, "found 'encoding': read takes acceptedLoss"),
        ("read", {"kafka.bootstrap.servers": "x"}, "found 'kafka.bootstrap.servers', which is Kafka's: give servers"),
        ("readStream", {"subscribe": "x"}, "found 'subscribe', which is Kafka's: name the stream with the option"),
        ("readStream", {"kafka.group.id": "x"}, "which is Kafka's: drop it: there is no consumer group"),
        ("read", {"startingOffsetsByTimestamp": "{}"}, "which is Kafka's: give startingTimestamp"),
        ("write", {"topic": "x"}, "which is Kafka's: name the stream with the option stream, and give subject"),
        (
            "read",
            {"nats.host": "x"},
            "found 'nats.host', which is nats-spark-connector's: its page in the",
        ),
        ("read", {"kafka.security.protocol": "x"}, "which is Kafka's: the connection's are apiPrefix, connection,"),
        ("read", {"maxOffsetsPerTrigger": "1"}, "the option maxOffsetsPerTrigger is for readStream, not for read"),
        ("read", {"maxBytesPerTrigger": "1"}, "the option maxBytesPerTrigger is for readStream, not for read: drop it"),
        ("readStream", {"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: expected a whole number from 1"),
        ("readStream", {"maxBytesPerTrigger": "-1"}, "maxBytesPerTrigger: expected a size such as \"4MB\", found '-1'"),
        ("readStream", {"maxBytesPerTrigger": "4 apples"}, "maxBytesPerTrigger: expected a size"),
        ("readStream", {"minOffsetsPerTrigger": "few"}, "minOffsetsPerTrigger: expected a whole number from 1"),
        (
            "readStream",
            {"minOffsetsPerTrigger": "2", "maxTriggerDelay": "0"},
            "maxTriggerDelay: expected a duration above 0",
        ),
        ("readStream", {"minOffsetsPerTrigger": "2", "maxTriggerDelay": "x"}, "maxTriggerDelay: expected a duration"),
        ("readStream", {"maxTriggerDelay": "30s"}, "expected minOffsetsPerTrigger with maxTriggerDelay, which limits"),
        (
            "readStream",
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "expected minOffsetsPerTrigger up to maxOffsetsPerTrigger, found 9 and 8: lower the first",
        ),
        ("readStream", {"endingOffsets": "1"}, "the option endingOffsets is for read, not for readStream"),
        ("write", {"minPartitions": "1"}, "the option minPartitions is for read and readStream, not for write"),
        ("read", {"path": "orders"}, "name the stream with the option stream"),
        (
            "read",
            {"startingOffsets": "0"},
            "startingOffsets: expected earliest, latest or a sequence from 1, found '0'",
        ),
        (
            "read",
            {"startingOffsets": "1", "startingTimestamp": "1"},
            "startingOffsets or startingTimestamp, found both",
        ),
        ("read", {"startingTimestamp": "2026-11-21"}, "startingTimestamp: expected milliseconds since 1970, or a time"),
        ("read", {"minPartitions": "-1"}, "minPartitions: expected a whole number from 1"),
        ("read", {"failOnDataLoss": "maybe"}, "failOnDataLoss: expected true or false, found 'maybe'"),
        ("read", {"acceptedLoss": "9-8"}, "acceptedLoss: expected ranges of sequences such as 101-150,200-210, found"),
        ("read", {"fetchMethod": "push"}, "fetchMethod: expected one of auto, consumer, direct, api, found 'push'"),
        ("read", {"payloadCompression": "lz4"}, "payloadCompression: expected one of none, zlib, found 'lz4'"),
        ("read", {"fetchBatch": "10001"}, "fetchBatch: expected a whole number from 1 to 10000"),
        ("read", {"fetchMaxBytes": "much"}, "fetchMaxBytes: expected a size"),
        ("read", {"filterSubjects": "a..b"}, "filterSubjects: expected subjects with commas between them (it has an"),
        ("read", {"filterSubjects": "a.>,a.b"}, "found that a.> and a.b do: keep a.>"),
        ("read", {"filterSubjects": "a.*,*.b"}, "do: filter after reading"),
        ("read", {"stream": "a.b"}, "stream: expected a stream's name"),
        ("read", {"jsDomain": "a", "apiPrefix": "b"}, "expected jsDomain or apiPrefix, found both"),
        (
            "read",
            {"startingOffsets": "9", "endingOffsets": "8"},
            "expected endingOffsets at or after startingOffsets, fou",
        ),
        ("read", {"startingTimestamp": "9", "endingTimestamp": "8"}, "expected endingTimestamp at or after starting"),
        ("read", {"startingOffsets": "latest", "endingOffsets": "earliest"}, "found latest to earliest"),
        ("write", {"nullValue": "skip"}, "nullValue: expected one of error, empty, found 'skip'"),
        ("write", {"natsHeaders": "copy"}, "natsHeaders: expected one of keep, drop, found 'copy'"),
        ("write", {"subject": "a.*"}, "subject: expected a subject without wildcards"),
        ("write", {"maxInFlight": "0"}, "maxInFlight: expected a whole number from 1 to 10000"),
        ("write", {"ackTimeout": "soon"}, "ackTimeout: expected a"),
        ("write", {"msgIdPrefix": "a\nb"}, "msgIdPrefix: expected printable text"),
    ],
)
def test_an_unknown_or_invalid_option_is_refused(
    purpose: Purpose, stream_options: dict[str, str], message: str
) -> None:
    read = write_options if purpose.startswith("write") else read_options
    with pytest.raises(SparkOptionError) as caught:
        read({**_STREAM, **stream_options}, purpose)
    assert message in str(caught.value)


# As the guides of Spark's Kafka source and sink write them.
_KAFKAS_OPTIONS = """
    kafka.bootstrap.servers kafka.group.id kafka.security.protocol subscribe subscribePattern assign
    startingTimestamp startingOffsetsByTimestamp startingOffsets endingTimestamp endingOffsetsByTimestamp endingOffsets
    failOnDataLoss kafkaConsumer.pollTimeoutMs fetchOffset.numRetries fetchOffset.retryIntervalMs maxOffsetsPerTrigger
    minOffsetsPerTrigger maxTriggerDelay minPartitions maxRecordsPerPartition groupIdPrefix includeHeaders
    startingOffsetsByTimestampStrategy useDeprecatedOffsetFetching topic
"""


@pytest.mark.parametrize("purpose", ["load", "read", "readStream", "write", "writeStream"])
@pytest.mark.parametrize("option", _KAFKAS_OPTIONS.split())
def test_an_option_of_kafkas_source_is_known_or_answered_with_a_hint(purpose: Purpose, option: str) -> None:
    if option in option_names(purpose):
        return
    # Nothing else is given, as by somebody who has copied a job and changed its format.
    parse = write_options if purpose.startswith("write") else read_options
    with pytest.raises(SparkOptionError) as caught:
        parse({option: "x"}, purpose)
    hint = str(caught.value).rpartition(f"found {option!r}, which is Kafka's: ")[2]
    if hint == str(caught.value):
        assert f"the option {option} is for " in hint
        return
    # What a hint tells to give is an option.
    given = re.match(r"(?:name the stream with the option|give|the connection's are) (\w+)", hint)
    known = {*option_names("load"), *option_names("write")}
    assert (given and given[1] in known) or hint.startswith("drop it")


@pytest.mark.parametrize(
    ("purpose", "stream_options", "message"),
    [
        ("read", {"streams": ""}, "streams: expected names of streams with commas between them, found '' among them"),
        ("read", {"streams": "orders,"}, "found '' among them"),
        ("read", {"streams": "orders,a.b"}, "found 'a.b' among them"),
        ("read", {"streams": "orders,orders"}, "streams: expected each stream once, found orders twice: drop one"),
        ("read", {**_SEVERAL, "stream": "orders"}, "expected stream or streams, found both: keep one"),
        ("read", {**_SEVERAL, "bucket": "prices"}, "expected streams or bucket, found both: keep one"),
        ("read", {**_SEVERAL, "streamPattern": "*"}, "expected streams or streamPattern, found both: keep one"),
        ("write", _SEVERAL, "the option streams is for read and readStream, not for write: drop it"),
        (
            "read",
            {"streamPattern": "orders-.*"},
            "streamPattern: expected a pattern such as orders-* with the wildcards",
        ),
        ("read", {"streamPattern": ""}, "streamPattern: expected a pattern such as orders-*"),
        ("readStream", {"subscribePattern": "o.*"}, "which is Kafka's: give streamPattern, such as orders-*"),
        (
            "read",
            {**_SEVERAL, "startingOffsets": "17"},
            'startingOffsets: expected sequences with the name of their stream, such as {"orders": 17}, found none',
        ),
        ("read", {"streamPattern": "*", "endingOffsets": "17"}, "endingOffsets: expected sequences with the name of"),
        ("read", {**_SEVERAL, "acceptedLoss": "1-2"}, "acceptedLoss: expected sequences with the name of their stream"),
        (
            "read",
            {**_SEVERAL, "startingOffsets": '{"orders": 17}'},
            "startingOffsets: expected a value for every stream, found none for payments: add it",
        ),
        (
            "read",
            {**_SEVERAL, "startingOffsets": '{"orders": 1, "payments": 1, "others": 1}'},
            "startingOffsets: expected values for orders, payments, found one for 'others': drop it",
        ),
        (
            "read",
            {"streamPattern": "o*", "acceptedLoss": '{"payments": "1"}'},
            "acceptedLoss: expected values for streams that match o*, found one for 'payments': drop it",
        ),
        ("read", {**_SEVERAL, "startingOffsets": '{"orders": 17'}, "startingOffsets: expected a JSON object such as"),
        ("read", {**_SEVERAL, "startingOffsets": '{"orders": 1, "orders": 2}'}, "each stream once, found orders twice"),
        ("read", {**_SEVERAL, "startingOffsets": '{"orders": 0}'}, "orders: expected earliest, latest or a sequence"),
        ("read", {**_SEVERAL, "startingOffsets": '{"orders": {}}'}, "expected a text or a number for orders, found []"),
        (
            "read",
            {**_SEVERAL, "startingOffsets": '{"orders": true}'},
            "expected a text or a number for orders, found T",
        ),
        ("read", {**_SEVERAL, "acceptedLoss": '{"orders": "2-1"}'}, "orders: expected ranges of sequences such as"),
        (
            "read",
            {
                **_SEVERAL,
                "startingOffsets": '{"orders": 1, "payments": 9}',
                "endingOffsets": '{"orders": 2, "payments": 8}',
            },
            "expected endingOffsets at or after startingOffsets, found 8 before 9",
        ),
    ],
)
def test_wrong_values_for_several_streams_are_refused(
    purpose: Purpose, stream_options: dict[str, str], message: str
) -> None:
    read = write_options if purpose.startswith("write") else read_options
    with pytest.raises(SparkOptionError) as caught:
        read(stream_options, purpose)
    assert message in str(caught.value)


def test_defaults_equal_those_of_sparks_kafka_source() -> None:
    assert read_options(_STREAM, "read").start == Bound(extreme="earliest")
    assert read_options(_STREAM, "readStream").start == Bound(extreme="latest")
    assert read_options(_STREAM, "read").fail_on_data_loss
    assert not read_options(_STREAM, "read").include_headers


@pytest.mark.parametrize("text", ["1795273811609", "2026-11-21T15:10:11.609Z", "2026-11-21T16:10:11.609+01:00"])
def test_times_are_milliseconds_or_have_a_zone(text: str) -> None:
    assert read_options({**_STREAM, "startingTimestamp": text}, "read").start == Bound(time=1795273811609000000)


def test_a_time_without_a_zone_is_in_the_sessions() -> None:
    session = SessionDefaults(zone="Europe/Berlin")
    for text in ("2026-11-21T16:10:11.609", "2026-11-21T15:10:11.609Z"):
        options = read_options({**_STREAM, "startingTimestamp": text}, "read", session)
        assert options.start == Bound(time=1795273811609000000)
    for zone in ("nowhere/at all", "../../etc/passwd", ""):
        with pytest.raises(SparkOptionError, match="or a time with its zone"):
            read_options({**_STREAM, "startingTimestamp": "2026-11-21T16:10:11"}, "read", SessionDefaults(zone=zone))
    named = {**_SEVERAL, "startingTimestamp": '{"orders": "2026-11-21T16:10:11.609", "payments": 1}'}
    assert read_options(named, "read", session).of("orders").start == Bound(time=1795273811609000000)


def test_names_of_options_may_be_in_any_case() -> None:
    options = read_options({"STREAM": "orders", "minpartitions": "3", "StartingOFFSETS": "Latest"}, "read")
    assert (options.stream, options.min_partitions, options.start) == ("orders", 3, Bound(extreme="latest"))
    with pytest.raises(SparkOptionError, match="minPartitions: expected a whole number from 1"):
        read_options({"stream": "orders", "MINPARTITIONS": "few"}, "read")
    assert write_options({"Stream": "orders", "MSGIDPREFIX": "a"}, "write").msg_id_prefix == "a"


@pytest.mark.parametrize(
    ("purpose", "given", "total", "tasks"),
    [
        ("read", {}, 99_999, 1),
        ("read", {}, 250_000, 3),
        ("read", {}, 10_000_000, 8),
        ("read", {"minPartitions": "2"}, 10_000_000, 2),
        ("readStream", {}, 10_000_000, 1),
        ("readStream", {"minPartitions": "4"}, 10, 4),
    ],
)
def test_tasks_of_a_batch_follow_the_cluster_and_those_of_a_query_dont(
    purpose: Purpose, given: dict[str, str], total: int, tasks: int
) -> None:
    options = read_options({**_STREAM, **given}, purpose, SessionDefaults(parallelism=8))
    assert len(range_starts(1, total, with_share(options, total, total))) == tasks


def test_a_task_that_reads_millions_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for given, named in (({}, True), ({"minPartitions": "3"}, False)):
        caplog.clear()
        plan_ranges(1, 3_000_000, read_options({**_STREAM, **given}, "readStream"), _INFO, "api", ())
        assert ("One task reads 3000000 sequences of orders: raise minPartitions" in caplog.text) == named


@pytest.mark.parametrize(
    ("stream_options", "count"), [({}, 1), ({"minPartitions": "7"}, 7), ({"maxRecordsPerPartition": "30"}, 4)]
)
def test_ranges_follow_each_other(stream_options: dict[str, str], count: int) -> None:
    ranges = plan_ranges(1, 100, read_options({**_STREAM, **stream_options}, "read"), _INFO, "api", ())
    assert len(ranges) == count
    assert [sequence for task in ranges for sequence in range(task.first, task.last + 1)] == list(range(1, 101))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket": "a.b"}, "bucket: expected a bucket's name"),
        ({"bucket": "a", "stream": "b"}, "expected stream or bucket, found both"),
        (
            {"stream": "a", "latestPerSubject": "true", "startingOffsets": "7"},
            "expected no startingOffsets with latest",
        ),
    ],
)
def test_options_of_buckets_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(SparkOptionError, match=message):
        read_options(options, "read")


def test_the_stream_must_be_named() -> None:
    with pytest.raises(SparkOptionError, match="expected the option stream, found none"):
        read_options({"servers": "host"}, "read")
    with pytest.raises(SparkOptionError, match="found no options: Spark passes"):
        read_options({}, "read")


def test_a_domain_holds_for_a_named_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_ORDERS_URL", "host")
    monkeypatch.setenv("NATS_ORDERS_JS_DOMAIN", "leaf")
    assert socket_settings({**_STREAM, "connection": "orders"}).jetstream_api == "$JS.leaf.API"
    assert socket_settings({**_STREAM, "connection": "orders", "apiPrefix": "hub.api"}).jetstream_api == "hub.api"
