"""What no face shows of reading."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
from spark_streams import ALL, METHODS, make_stream, publish

from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import plan_ranges

if TYPE_CHECKING:
    from testbed.spark_face import SourceStream

_IN_A_NEW_PROCESS = """
import json, sys
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.partition_planner import Range
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.options import read_options

raw, names, task = map(json.loads, sys.argv[1:])
columns = RequestedColumns(tuple(names), (False,) * len(names))
task["subjects"] = tuple(task["subjects"])
rows = sum(batch.num_rows for batch in read_range(raw, read_options(raw, "read"), columns, Range(**task)))
print(rows, "pandas" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[:2])
def test_a_new_process_reads_without_pandas_whose_import_takes_longer_than_the_read(
    stream_options: dict[str, str], stream: SourceStream, method: str
) -> None:
    make_stream(stream)
    headers = {"Key": "value"}
    publish(stream, ((f"{stream.name}.a", headers, b"x" * (number % 7)) for number in range(3_000)))
    options = {**stream_options, "includeHeaders": "true"}
    (task,) = plan_ranges(1, 3_000, read_options(options, "read"), stream.info(), method, ())
    arguments = (options, ALL, asdict(replace(task, planned=None)))
    command = [sys.executable, "-c", _IN_A_NEW_PROCESS, *map(json.dumps, arguments)]
    read = subprocess.run(command, check=True, capture_output=True, text=True)
    assert read.stdout.split() == ["3000", "False"], read.stderr
