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
_ONCE = ("latestPerSubject", "endingOffsets", "endingTimestamp", "pushFilters")
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
}
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
    if name.lower().startswith(_KAFKA):
        return (
            f"expected known options, found {name!r}, which is Kafka's: the connection's are"
            f" {', '.join(sorted((*VARIABLES, *NAMED_CONNECTION)))}"
        )
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"{purpose} takes {', '.join(sorted(known.values()))}"
    return f"expected known options, found {name!r}: {hint}"
