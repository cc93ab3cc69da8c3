"""What each option of the data source takes, and what it does; docs/reference/spark-options.md is made of it."""

from __future__ import annotations

from typing import Final, NamedTuple


class OptionText(NamedTuple):
    """What an option is.

    :param form: what it takes, with its unit
    :param default: its value where it is absent, as it could be given; empty where none is the same as its absence
    :param text: what it does
    """

    form: str
    default: str
    text: str


_METHODS = (
    "how messages are read: ``consumer`` by an ephemeral consumer in memory without acknowledgements, ``direct`` by"
    " direct gets of many messages, ``api`` by a request for each message. ``auto`` takes ``consumer`` for a limits"
    " stream, ``direct`` for others with ``allow_direct`` (nats-server 2.11), else ``api``"
)


OPTION_TEXTS: Final = {
    "stream": OptionText("name", "", "the stream to read or to write; only this one may store the rows"),
    "streams": OptionText("names, separated by commas", "", "read several streams, in place of ``stream``"),
    "streamPattern": OptionText(
        "pattern with ``*``, ``?`` and ``[…]``",
        "",
        "read the streams whose names match, in place of ``stream``; a query looks for new ones at each batch",
    ),
    "bucket": OptionText(
        "name", "", "a key-value bucket in place of a stream; adds the columns ``key`` and ``rowKind``"
    ),
    "latestPerSubject": OptionText(
        "boolean", "false", "read the last message of each subject at the time of the action, in one task"
    ),
    "filterSubjects": OptionText(
        "subjects, separated by commas", "", "read these subjects only, which may not overlap; all where absent"
    ),
    "startingOffsets": OptionText(
        "``earliest``, ``latest`` or a sequence",
        "",
        "the first sequence that is read; ``earliest`` where absent, for a streaming query ``latest``. A query with a"
        " checkpoint resumes from there",
    ),
    "endingOffsets": OptionText(
        "``earliest``, ``latest`` or a sequence", "latest", "the first sequence that is not read any more"
    ),
    "startingTimestamp": OptionText(
        "milliseconds since 1970, or a time with a zone", "", "read what was stored from then on, instead of an offset"
    ),
    "endingTimestamp": OptionText(
        "milliseconds since 1970, or a time with a zone", "", "read what was stored before then, instead of an offset"
    ),
    "minPartitions": OptionText("number of tasks", "1", "divide the sequences evenly among so many tasks"),
    "maxRecordsPerPartition": OptionText("number of sequences", "", "make more tasks where one would have more"),
    "maxOffsetsPerTrigger": OptionText(
        "number of sequences", "", "so many at most in a batch of a query; gaps at its start don't count; Spark 4.2"
    ),
    "maxBytesPerTrigger": OptionText(
        "bytes, or a size such as ``64MB``",
        "",
        "so many bytes of subjects, headers and bodies at most in a batch of a query; a larger message is a batch of"
        " its own; Spark 4.2",
    ),
    "minOffsetsPerTrigger": OptionText(
        "number of sequences",
        "",
        "a batch waits until there are so many; the first one after a start doesn't wait, nor does a query with"
        " ``availableNow``; Spark 4.2",
    ),
    "maxTriggerDelay": OptionText(
        "seconds, or a duration such as ``30s``",
        "",
        "time since the last batch after which it waits no longer, 15 minutes where absent; with"
        " ``minOffsetsPerTrigger``",
    ),
    "failOnDataLoss": OptionText(
        "boolean",
        "true",
        "fail where messages that the filters match were lost before they were read, or the stream was made anew",
    ),
    "acceptedLoss": OptionText(
        "ranges such as ``101-150,200``", "", "sequences whose loss is accepted, as the error about a loss names them"
    ),
    "includeHeaders": OptionText("boolean", "false", "add the column ``headers``"),
    "fetchMethod": OptionText("``auto``, ``consumer``, ``direct`` or ``api``", "auto", _METHODS),
    "fetchBatch": OptionText(
        "number of messages, 1 to 10,000", "", "messages of a request; 10,000 by consumer and 256 by direct get"
    ),
    "fetchMaxBytes": OptionText(
        "bytes, or a size such as ``4MB``", "", "bytes of a request; 8 MiB by consumer, else 4 MiB"
    ),
    "payloadCompression": OptionText(
        "``none`` or ``zlib``", "none", "decompress bodies in the format of zlib or gzip, up to 16 MiB each"
    ),
    "subject": OptionText("subject", "", "the subject of rows that have none"),
    "maxInFlight": OptionText(
        "number of rows, 1 to 10,000", "1000", "rows of a task that are sent and not acknowledged yet, 32 MiB at most"
    ),
    "ackTimeout": OptionText("seconds", "10", "time without any acknowledgement after which a task reconnects"),
    "minDuplicateWindow": OptionText("seconds", "120", "refuse a stream with a shorter ``duplicate_window``"),
    "msgIdPrefix": OptionText("text", "", "what ids of messages begin with, in place of the write's own identity"),
    "nullValue": OptionText(
        "``error`` or ``empty``", "error", "refuse a row whose ``value`` is null, or store a message without a body"
    ),
    "natsHeaders": OptionText(
        "``keep`` or ``drop``",
        "keep",
        "whether headers that begin with ``Nats-`` are left out of the column ``headers``",
    ),
    "connection": OptionText(
        "name",
        "",
        "the connection whose settings are in ``NATS_<NAME>_URL``, ``NATS_<NAME>_USER``… of the environment of the"
        " driver and of the executors",
    ),
    "connectionProvider": OptionText(
        "``package.module:function``",
        "",
        "a function that is called with ``connection`` wherever a connection is opened, and returns its options; needs"
        " ``spark.jetstream.allowedProviders``",
    ),
}
