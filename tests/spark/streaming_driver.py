"""A driver whose streaming query copies a stream, until it is killed or until all that is there is copied."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from local_cluster import local_session, send_message
from pyspark.errors import StreamingQueryException

from airflow_provider_jetstream.spark import register

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def into_stream(rows: DataFrame, copy: Mapping[str, str], _: Path) -> DataStreamWriter:
    """Write by the format's own sink, which makes the ids."""
    return rows.select("value").writeStream.format("jetstream").options(**copy)


def by_batches(rows: DataFrame, copy: Mapping[str, str], folder: Path) -> DataStreamWriter:
    """Write files by the batch's number, and the rows into a stream, by ids of their own."""

    def store(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(folder / f"batch={number}"))
        messages = batch.selectExpr("value", "string(seq) AS msg_id")
        messages.write.format("jetstream").options(**copy).mode("append").save()

    return rows.writeStream.foreachBatch(store)


SINKS: dict[str, Callable[[DataFrame, Mapping[str, str], Path], DataStreamWriter]] = {
    "format": into_stream,
    "foreachBatch": by_batches,
}


def main() -> None:
    stream_options: dict[str, str] = json.loads(sys.argv[1])
    sink, folder, most, finishes = sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5] == "finish"
    spark = local_session()
    register(spark)
    options = {**stream_options, "startingOffsets": "earliest", "minPartitions": "2", "maxOffsetsPerTrigger": most}
    rows = spark.readStream.format("jetstream").options(**options).load().select("seq", "value")
    name = f"{stream_options['stream']}out"
    copy = {**stream_options, "stream": name, "subject": f"{name}.a"}
    written = SINKS[sink](rows, copy, folder / "rows").option("checkpointLocation", str(folder / "checkpoint"))
    if finishes:
        written = written.trigger(availableNow=True)
    query = written.start()
    send_message({"started": True})
    while not _has_ended(query):
        query = written.start()
    send_message({"finished": True})
    spark.stop()


def _has_ended(query: StreamingQuery) -> bool:
    """Wait for a query's end; returns whether it was its own, not that of a machine too busy for Spark."""
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        # Spark gives a new Python process ten seconds, whatever else the machine does.
        if "failed to connect back" not in str(error):
            raise
        return False
    return True


if __name__ == "__main__":
    main()
