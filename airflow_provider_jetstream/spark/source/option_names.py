"""The names of the data source's options, and what to say about a name that isn't one of them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from airflow_provider_jetstream.spark.connection_options import NAMED_CONNECTION, VARIABLES
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

Purpose: TypeAlias = Literal["load", "read", "readStream", "write", "writeStream"]

# What bounds the batches of a query.
PER_TRIGGER: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")

_ALWAYS = (*VARIABLES, *NAMED_CONNECTION, "stream")
_READING = (
    "streams",
    "streamPattern",
    "bucket",
    "filterSubjects",
    "startingOffsets",
    "startingTimestamp",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "acceptedLoss",
    "includeHeaders",
    "fetchMethod",
    "fetchBatch",
    "fetchMaxBytes",
    "payloadCompression",
)
_WRITING = ("subject", "maxInFlight", "ackTimeout", "minDuplicateWindow", "msgIdPrefix", "nullValue", "natsHeaders")
_ONCE = ("latestPerSubject", "endingOffsets", "endingTimestamp")
OPTION_NAMES: dict[Purpose, tuple[str, ...]] = {
    # Spark requests the schema before the data source learns which of the next two it is.
    "load": (*_ALWAYS, *_READING, *_ONCE, *PER_TRIGGER),
    "read": (*_ALWAYS, *_READING, *_ONCE),
    "readStream": (*_ALWAYS, *_READING, *PER_TRIGGER),
    "write": (*_ALWAYS, *_WRITING),
    # Spark passes its own options to the sink.
    "writeStream": (*_ALWAYS, *_WRITING, "checkpointLocation", "queryName"),
}
# A table's properties, and what SQL adds to its options: Spark passes them where it infers a table's columns.
_OF_TABLES = ("provider", "owner", "location", "is_managed_location", "external", "comment", "collation")
_TABLE_OPTION = "option."
# What Spark's Kafka source and sink call it, by whose names people look first.
_OF_KAFKA = {
    "subscribe": "name the stream with the option stream, or several with streams",
    "subscribepattern": "give streamPattern, such as orders-*, which is no regular expression",
    "assign": "name the stream with the option stream, or several with streams, and subjects with filterSubjects",
    "topic": "name the stream with the option stream, and give subject, or a column subject",
    "startingoffsetsbytimestamp": "give startingTimestamp",
    "endingoffsetsbytimestamp": "give endingTimestamp",
    "startingoffsetsbytimestampstrategy": "drop it: a startingTimestamp after the last message begins at the next one",
    "kafka.bootstrap.servers": "give servers",
    "kafka.group.id": "drop it: there is no consumer group, Spark's checkpoint holds the offset",
    "groupidprefix": "drop it: there is no consumer group, Spark's checkpoint holds the offset",
    "kafkaconsumer.polltimeoutms": "give timeout",
    "fetchoffset.numretries": "drop it: a broken connection is reopened within timeout",
    "fetchoffset.retryintervalms": "drop it: a broken connection is reopened within timeout",
    "usedeprecatedoffsetfetching": "drop it: there is no consumer group, Spark's checkpoint holds the offset",
}
_NO_CONSUMER = "drop it: reads keep no position in the stream, and acknowledge nothing"
_MADE_ELSEWHERE = "drop it: the stream has to be there already"
_CERTIFICATES = "give tlsCaFile, and tlsCertFile with tlsKeyFile, which are PEM files"
_WITHIN_TIMEOUT = "give timeout, within which a broken connection is reopened"
# What nats-spark-connector calls it, in any of its versions.
_OF_CONNECTOR = {
    "nats.host": "give servers, such as nats://host:4222",
    "nats.port": "give servers, such as nats://host:4222",
    "nats.credential.file": "give credentialsFile",
    "nats.connection.user.name": "give user",
    "nats.connection.user.password": "give password, or passwordFile",
    "nats.js.api.prefix": "give apiPrefix, or jsDomain",
    "nats.js.api-prefix": "give apiPrefix, or jsDomain",
    "nats.js.define-stream": _MADE_ELSEWHERE,
    "nats.js.define-consumer": _NO_CONSUMER,
    "nats.stream.name": "name the stream with the option stream",
    "nats.pull.subscription.stream.name": "name the stream with the option stream",
    "nats.stream.subjects": "give filterSubjects",
    "nats.storage.payload-compression": "give payloadCompression",
    "nats.storage.replicas": _MADE_ELSEWHERE,
    "nats.storage.type": _MADE_ELSEWHERE,
    "nats.durable.name": _NO_CONSUMER,
    "nats.pull.subscription.durable.name": _NO_CONSUMER,
    "nats.pull.consumer.create": _NO_CONSUMER,
    "nats.pull.consumer.ack.wait": _NO_CONSUMER,
    "nats.pull.consumer.max.ack.pending": _NO_CONSUMER,
    "nats.msg.ack.wait.secs": _NO_CONSUMER,
    "nats.ack.none": _NO_CONSUMER,
    "nats.pull.consumer.max.batch": "give maxOffsetsPerTrigger",
    "nats.pull.batch.size": "give fetchBatch for a request, or maxOffsetsPerTrigger for a batch of the query",
    "nats.msg.fetch.batch.size": "give fetchBatch for a request, or maxOffsetsPerTrigger for a batch of the query",
    "nats.pull.batcher.initial.delay": "drop it, and set the query's trigger",
    "nats.pull.batcher.frequency.secs": "drop it, and set the query's trigger",
    "nats.pull.wait.time": "give timeout",
    "nats.msg.receive.wait.millis": "give timeout",
    "nats.num.listeners": "give minPartitions",
    "nats.num.partitions": "give minPartitions",
    "nats.reset.on.restart": "give startingOffsets, and the query a new checkpoint",
    "nats.datetime.format": "drop it: timestamp is a timestamp, for date_format",
    "nats.idle-timeout.minutes": "drop it, and give the query the trigger availableNow",
    "nats.connection.timeout": _WITHIN_TIMEOUT,
    "nats.ping.interval.secs": _WITHIN_TIMEOUT,
    "nats.reconnect.wait.secs": _WITHIN_TIMEOUT,
    "nats.allow.reconnect": _WITHIN_TIMEOUT,
    "nats.flush.wait.millis": "give ackTimeout",
    "nats.connection.outgoingqueue.maxmessages": "give maxInFlight",
    "nats.ssl.context.factory.class": "give connectionProvider, or the tls options",
    "nats.tls.algorithm": "drop it: TLS is used with tls:// in servers, or with tlsCaFile",
    **{
        f"nats.{kind}{joint}store.{part}": _CERTIFICATES
        for kind in ("key", "trust")
        for joint in ".-"
        for part in ("path", "password")
    },
}
_CONNECTOR = "nats."
_KAFKA = "kafka."


def require_known(names: Iterable[str], purpose: Purpose) -> None:
    """Refuse a name that isn't an option's; it may be in any case.

    :raises SparkOptionError: naming it, and what may have been meant
    """
    known = {name.lower(): name for name in OPTION_NAMES[purpose]}
    for name in names:
        if name.lower() not in (*known, *_OF_TABLES) and not name.lower().startswith(_TABLE_OPTION):
            raise SparkOptionError(_unknown(name, purpose, known))


def _unknown(name: str, purpose: Purpose, known: dict[str, str]) -> str:
    elsewhere = [
        other for other, names in OPTION_NAMES.items() if other != "load" and name.lower() in map(str.lower, names)
    ]
    if elsewhere:
        return f"the option {name} is for {' and '.join(elsewhere)}, not for {purpose}: drop it"
    if name.lower() == "path":
        return "expected no path: name the stream with the option stream"
    if hint := _OF_KAFKA.get(name.lower()):
        return f"expected known options, found {name!r}, which is Kafka's: {hint}"
    if hint := _OF_CONNECTOR.get(name.lower()):
        return f"expected known options, found {name!r}, which is nats-spark-connector's: {hint}"
    for prefix, owner in ((_KAFKA, "Kafka's"), (_CONNECTOR, "nats-spark-connector's")):
        if name.lower().startswith(prefix):
            return (
                f"expected known options, found {name!r}, which is {owner}: the connection's are"
                f" {', '.join(sorted((*VARIABLES, *NAMED_CONNECTION)))}"
            )
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"{purpose} takes {', '.join(sorted(known.values()))}"
    return f"expected known options, found {name!r}: {hint}"
