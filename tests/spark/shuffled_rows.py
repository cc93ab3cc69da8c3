"""Steps of a frame for writes that run again after a shuffle; executors import them."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

HOSTS = ("127.0.0.2", "127.0.0.3")

_FEW = 100
_WRONG_HOST = "to be tried again on the other host"


def in_any_order(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass the rows of a partition on in an order that is another one in each attempt."""
    rows = [batch for batch in batches if batch.num_rows]
    if rows:
        whole = pa.Table.from_batches(rows).combine_chunks()
        order = random.SystemRandom().sample(range(whole.num_rows), whole.num_rows)
        yield from whole.take(order).to_batches(_FEW)


@dataclass(frozen=True)
class FirstAttempt:
    """A step whose first attempt for each partition ends early, and whose next one runs on another host.

    :param folder: shared by all executors; gets a file for each attempt that passes on rows, with the first one
    :param options: of the stream into which the rows are written
    :param rows: that the first attempt passes on
    :param partitions: for which the first attempt ends early
    :param fails: whether it raises; else it lasts until another attempt has passed on all rows, or Spark ends it
    """

    folder: Path
    options: Mapping[str, str]
    rows: int
    partitions: Sequence[int]
    fails: bool

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition, host = context.partitionId(), os.environ["SPARK_LOCAL_IP"]
        marker = self.folder / f"host-{partition}"
        is_first = not marker.exists()
        if is_first:
            marker.write_text(host)
        elif partition in self.partitions and marker.read_text() == host:
            raise RuntimeError(_WRONG_HOST)
        passed = 0
        for batch in batches:
            if not passed:
                first = repr(batch.column("value")[0].as_py())[:20]
                (self.folder / f"attempt-{partition}-{host}").write_text(first)
            yield batch
            passed += batch.num_rows
            if is_first and partition in self.partitions and passed >= self.rows:
                self._end()
        (self.folder / f"done-{partition}").touch()

    def _end(self) -> None:
        with open_stream(self.options) as stream:
            while stream.info().last < self.rows // 2:
                time.sleep(0.1)
        (self.folder / "early").touch()
        if self.fails:
            raise RuntimeError("after some rows are stored")
        while not all((self.folder / f"done-{partition}").exists() for partition in self.partitions):
            time.sleep(0.1)


def on_its_host(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on, for every second partition on the first host, and for the others on the second one."""
    context = TaskContext.get()
    assert context is not None
    if os.environ["SPARK_LOCAL_IP"] != HOSTS[context.partitionId() % 2]:
        raise RuntimeError(_WRONG_HOST)
    yield from batches
