"""Streaming queries whose driver is killed again and again go on from their checkpoint, and store every row once.

The short form kills one driver at a random time and one whose batch is planned and not committed, ``FAULTS=full`` five
of each, with both ways to write.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from driver_processes import driver_process, read_message
from process_killer import kill_driver
from spark_streams import make_stream, publish_numbers, read_all

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from testbed.spark_face import SourceStream

pytestmark = pytest.mark.jvm

_FULL = os.environ.get("FAULTS") == "full"
_SINKS = ["format", "foreachBatch"] if _FULL else ["foreachBatch"]
_KILLS = ["at random", "planned"] * (5 if _FULL else 1)
# Before each start as many as fill more batches than a driver has time for.
_PUBLISHED, _BATCH = 6000, 200
# Seconds from the query's start; its first batch takes some of them.
_LATEST = 8.0
# Seconds in a batch.
_LATEST_IN_BATCH = 0.2


class _Checkpoint:
    """A query's checkpoint, in which each batch has a file of what it is to read, and one once it is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def planned(self) -> int:
        """Return the number of the last batch that was planned; -1 for none."""
        return self._last("offsets")

    def uncommitted(self) -> bool:
        """Return whether that batch isn't committed."""
        return self.planned() > self._last("commits")

    def _last(self, log: str) -> int:
        files = (self._folder / log).iterdir() if (self._folder / log).exists() else ()
        return max((int(file.name) for file in files if file.name.isdigit()), default=-1)


def _at_random(dice: random.Random) -> Callable[[], bool]:
    moment = time.monotonic() + dice.uniform(0, _LATEST)
    return lambda: time.monotonic() > moment


def _within_a_new_batch(checkpoint: _Checkpoint, dice: random.Random) -> Callable[[], bool]:
    """Return a predicate: whether a batch that was planned since now is some time old and isn't committed."""
    seen, moment = checkpoint.planned(), float("inf")

    def is_time() -> bool:
        nonlocal seen, moment
        if (planned := checkpoint.planned()) != seen:
            seen, moment = planned, time.monotonic() + dice.uniform(0, _LATEST_IN_BATCH)
        return time.monotonic() >= moment and checkpoint.uncommitted()

    return is_time


@pytest.mark.parametrize("sink", _SINKS)
def test_every_row_is_stored_once_where_drivers_are_killed(
    stream_options: dict[str, str], stream: SourceStream, tmp_path: Path, sink: str
) -> None:
    make_stream(stream)
    copy = {**stream_options, "stream": f"{stream.name}out"}
    with open_stream(copy) as out:
        # A start takes long on a busy machine, and the batch before it is repeated within the window.
        make_stream(out, duplicate_window=600 * 10**9)
    dice = random.Random(sink)  # noqa: S311 - dice
    checkpoint = _Checkpoint(tmp_path / "checkpoint")
    repeated = []
    for number, kind in enumerate(_KILLS):
        publish_numbers(stream, _PUBLISHED, number * _PUBLISHED)
        arguments = (json.dumps(stream_options), sink, str(tmp_path), str(_BATCH), "follow")
        with driver_process("streaming_driver.py", *arguments, log=tmp_path / f"driver{number}.log") as driver:
            assert read_message(driver) == {"started": True}
            is_time = _at_random(dice) if kind == "at random" else _within_a_new_batch(checkpoint, dice)
            kill_driver(driver.pid, is_time)
        repeated.append(checkpoint.uncommitted())
        print(f"kill {number + 1}, {kind}: batch {checkpoint.planned()}, uncommitted: {repeated[-1]}")
    assert sum(repeated) >= _KILLS.count("planned")
    count = len(_KILLS) * _PUBLISHED
    arguments = (json.dumps(stream_options), sink, str(tmp_path), str(_PUBLISHED), "finish")
    with driver_process("streaming_driver.py", *arguments, log=tmp_path / "last.log") as driver:
        assert read_message(driver) == {"started": True}
        assert read_message(driver) == {"finished": True}
    assert sorted(int(row["value"]) for row in read_all(copy, names=["value"])) == list(range(count))
    if sink == "foreachBatch":
        stored = pq.read_table(tmp_path / "rows", columns=["seq", "value"])
        assert sorted(stored.column("seq").to_pylist()) == list(range(1, count + 1))
        assert sorted(int(value) for value in stored.column("value").to_pylist()) == list(range(count))
