"""A client of a shared Spark Connect server: what it may do, what its queries try, and what became of that.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark import register, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame


def attempt(action: Callable[[], Any]) -> str:
    """Return the error of an action, or ``done``."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (what fails is printed)
        return str(error)
    return "done"


def ways(session: SparkSession, options: Mapping[str, str], number: int) -> dict[str, Callable[[], Any]]:
    """Return the ways in which a user gives options to the format."""
    listed = ", ".join(f"{name} '{value}'" for name, value in options.items())
    rows = session.sql("SELECT CAST('x' AS BINARY) AS value, 'shared.x' AS subject")
    frame = session.read.format("jetstream").options(**options)
    return {
        "frame": lambda: frame.load().collect(),
        "schema": lambda: frame.schema("seq BIGINT").load().collect(),
        "write": lambda: rows.write.format("jetstream").options(**options).mode("append").save(),
        "view": lambda: session.sql(f"CREATE TEMPORARY VIEW v{number} USING jetstream OPTIONS ({listed})"),
        "table": lambda: session.sql(f"SELECT * FROM shared_table WITH ({listed})").collect(),
        "insert": lambda: session.sql(f"INSERT INTO shared_table WITH ({listed}) VALUES (X'78', 'shared.x')"),
        "stream": lambda: (
            session.readStream.format("jetstream").options(**options).load().writeStream.format("noop").start().stop()
        ),
    }


def read_file(_: int) -> str:
    """Do what isn't the format's."""
    return Path("/etc/hostname").read_text()


def refusals(session: SparkSession, forbidden: Mapping[str, Mapping[str, str]], *, all_ways: bool) -> dict[str, str]:
    """Try all that is forbidden in one way, and the first of it in all ways."""
    found = {}
    for number, (name, options) in enumerate(forbidden.items()):
        for way, action in ways(session, options, number).items():
            if way == "frame" or (all_ways and not number):
                found[f"{name} {way}"] = attempt(action)
    return found


def stored(session: SparkSession, options: Mapping[str, str]) -> list[str]:
    """Read the bodies of a stream."""
    frame: DataFrame = session.read.format("jetstream").options(**options).load()
    return sorted(row[0] for row in frame.selectExpr("string(value)").collect())


def main() -> None:
    """Run as: ADDRESS PACKAGE FOLDER ALLOWED FORBIDDEN, the last two as JSON."""
    address, package, folder, allowed, forbidden = sys.argv[1:]
    options, attempts = json.loads(allowed), json.loads(forbidden)
    session = SparkSession.builder.remote(address).getOrCreate()
    session.addArtifact(package, pyfile=True)
    register(session)
    session.sql("CREATE TABLE shared_table (value BINARY, subject STRING) USING jetstream")
    try:
        rows = session.range(3).select(
            f.col("id").cast("string").alias("value"),
            f.when(f.col("id") == 1, "a b").otherwise("shared.x").alias("subject"),
        )
        refused = write_rows(rows, options, f"{folder}/refused").count()
        result: dict[str, Any] = {"refused rows": refused, "stored": stored(session, options)}
        result["before"] = refusals(session, attempts, all_ways=True)
        for name in ("Files", "Providers", "Servers"):
            session.sql(f"SET spark.jetstream.allowed{name}={'/' if name == 'Files' else 'os:mkdir'}")
        session.conf.set("spark.jetstream.allowedServers", "")
        result["set"] = refusals(session, attempts, all_ways=False)
        register(session)
        result["set and registered"] = refusals(session, attempts, all_ways=False)
        session.sql("SET spark.jetstream.allowedServers=nats://elsewhere:1")
        register(session)
        result["again"] = stored(session, options)
        result["own file"] = attempt(lambda: session.range(1).select(f.udf(read_file)("id")).collect())
    finally:
        session.sql("DROP TABLE shared_table")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
