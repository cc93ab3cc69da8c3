"""The blocks of docs/spark.md run in their order, on a server without any stream."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from testbed.nats_server import NatsServer

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = ("orders", "reminders", "invoices", "backup", "KV_prices")


def test_the_blocks_of_the_page_run(spark: SparkSession, own_nats: NatsServer, tmp_path: Path) -> None:
    variables: dict[str, Any] = {}
    try:
        for language, written in BLOCK.findall(PAGE.read_text()):
            # This one needs a server of its own kind: tests/environment/test_spark_submissions.py.
            if ".remote(" in written:
                continue
            code = written.replace("nats://localhost:4222", own_nats.url).replace('"/data/', f'"{tmp_path}/')
            if language == "python":
                exec(compile(code, str(PAGE), "exec"), variables)
            else:
                for statement in code.split(";"):
                    spark.sql(statement).collect()
    finally:
        _remove_listener(spark, variables)
        spark.sql("DROP TABLE IF EXISTS jobs")
        for view in ("orders", "new_orders"):
            spark.catalog.dropTempView(view)
    assert {row["sum(order.amount AS amount)"] for row in variables["amounts"].collect()} != set()
    assert {name: _stored(own_nats, name) for name in NAMES} == {
        "orders": 3,
        "reminders": 2,
        "invoices": 2,
        "backup": 2,
        "KV_prices": 3,
    }
    assert variables["prices"].count() == 3
    # Listeners are called after a query's end too.
    assert _lags(variables["sequences"]) == {"orders": 0}
    assert [row.key for row in variables["changes"].collect()] == ["plum"]
    assert spark.read.parquet(f"{tmp_path}/orders").count() == 2
    assert spark.table("counts").collect() == [("orders", 2)]
    assert spark.read.parquet(f"{tmp_path}/nightly").count() == 3


def _remove_listener(spark: SparkSession, variables: dict[str, Any]) -> None:
    if listener := variables.get("listener"):
        spark.streams.removeListener(listener)


def _lags(gauge: Any) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while not (samples := [sample for metric in gauge.collect() for sample in metric.samples]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {sample.labels["stream"]: sample.value for sample in samples}


def _stored(server: NatsServer, name: str) -> int:
    with open_stream({"servers": server.url, "stream": name}) as stream:
        return stream.info().last
