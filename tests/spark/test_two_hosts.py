"""A host reads its own blocks of a shuffle first, so that an attempt on another host has a partition's rows in another
order: what is written again is stored once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver_processes import driver_process, read_message
from shuffled_rows import HOSTS
from spark_streams import make_stream, read_all
from two_hosts_driver import ROWS

from testbed.spark_cluster import SparkCluster
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.jvm

_WRITES = ("fail_once", "speculate", "cut_off")


def test_an_attempt_on_another_host_stores_no_row_twice(nats: NatsServer, name: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    on_executors = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])}
    streams = {write: {"servers": nats.url, "stream": f"{name}-{write}"} for write in _WRITES}
    for options in streams.values():
        with open_stream(options) as stream:
            make_stream(stream)
    with SparkCluster(tmp_path / "cluster", on_executors, HOSTS) as cluster:
        arguments = (cluster.url, json.dumps({"servers": nats.url, "stream": name}), str(tmp_path))
        with driver_process("two_hosts_driver.py", *arguments, log=tmp_path / "driver.log") as driver:
            assert [read_message(driver)["written"] for _ in _WRITES] == list(_WRITES)
    other_order = []
    for write, options in streams.items():
        stored = Counter(row["value"].rstrip(b".") for row in read_all(options, names=("value",)))
        assert stored == {str(number).encode(): 1 for number in range(ROWS)}, write
        for partition in range(3):
            first = {file.read_text() for file in (tmp_path / write).glob(f"attempt-{partition}-*")}
            other_order += [(write, partition)] * (len(first) > 1)
    # Otherwise this test proves nothing.
    assert other_order
