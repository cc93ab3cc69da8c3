"""A driver that repairs a queue's letters, tells the test, and hangs in the middle of a second repair."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from local_cluster import local_session, send_message
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.spark import read_letters, repair, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame


def mended(letters: DataFrame) -> DataFrame:
    """Mend the even letters' bodies, and one header of two of a name."""
    body = f.when(f.col("sequence") % 2 == 0, f.concat(f.lit(b"mended "), "body")).otherwise(f.col("body"))
    tag = f.transform(
        "headers",
        lambda pair: f.struct(
            pair["key"], f.when(pair["value"] == "wrong", "right").otherwise(pair["value"]).alias("value")
        ),
    )
    return letters.select("sequence", body.alias("body"), tag.alias("headers"))


def main() -> None:
    stream_options: dict[str, str] = json.loads(sys.argv[1])
    queue, folder = WorkQueue.load(json.loads(sys.argv[2])), Path(sys.argv[3])
    spark = local_session()
    letters = snapshot(read_letters(spark, queue, stream_options), str(folder / "letters"))
    repair(letters, mended, str(folder / "repaired"))
    send_message({"letters": letters.count()})

    def hanging(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        (folder / "half").touch()
        time.sleep(600)

    repair(letters, lambda frame: frame.mapInArrow(hanging, frame.schema), str(folder / "unfinished"))


if __name__ == "__main__":
    main()
