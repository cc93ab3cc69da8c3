from __future__ import annotations

import json
import traceback
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from spark_streams import make_stream, publish_numbers

from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.connection_options import ConnectionPolicy
from testbed.authentication import make_pair, operator_mode
from testbed.nats_server import NatsServer
from testbed.planted_secrets import places_of_secrets, planted, planted_seed_bytes
from testbed.spark_face import JetStreamDataSource, open_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

_SECRET = planted("spark", plain=True)
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _rest(spark: SparkSession) -> str:
    address = str(spark.sparkContext.uiWebUrl)
    base = f"http://127.0.0.1:{urlsplit(address).port}/api/v1/applications/{spark.sparkContext.applicationId}"
    pages = ["/sql?details=true&planDescription=true&length=10000", "/environment", "/jobs", "/stages"]
    return "".join(_direct.open(base + page, timeout=30).read().decode() for page in pages)


def _event_log(spark: SparkSession) -> str:
    folder = Path(unquote(urlsplit(spark.conf.get("spark.eventLog.dir") or "").path))
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def test_no_secret_is_visible(
    spark: SparkSession, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "password"
    file.write_text(_SECRET)
    with NatsServer(user="u", password=_SECRET) as server:

        class _AllowedDataSource(JetStreamDataSource):
            policy = ConnectionPolicy(files=(tmp_path,), servers=frozenset({server.url}))

        spark.dataSource.register(_AllowedDataSource)
        for number, secret_option in enumerate(({"password": _SECRET}, {"passwordFile": str(file)})):
            stream_options = {"servers": server.url, "stream": name, "user": "u", **secret_option}
            with open_stream(stream_options) as stream:
                if number == 0:
                    make_stream(stream)
                    publish_numbers(stream, 10)
            loaded = spark.read.format("jetstream").options(**stream_options).load()
            loaded.explain(extended=True)
            rows = loaded.select("value", f.lit(f"{name}.x").alias("subject"))
            rows.write.format("jetstream").options(**stream_options).mode("append").save()
            growing = spark.readStream.format("jetstream").options(**stream_options, startingOffsets="earliest").load()
            writer = growing.writeStream.format("memory").queryName(f"m{name}{number}")
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination(60)
            query.explain(extended=True)
            progress_json = json.dumps([dict(progress) for progress in query.recentProgress], default=str)
            assert _SECRET not in progress_json
        wrong = {**stream_options, "password": _SECRET + "x"}
        del wrong["passwordFile"]
        with pytest.raises(PySparkException) as caught:
            spark.read.format("jetstream").options(**wrong).load()
        assert "refused the credentials" in str(caught.value)
        assert _SECRET not in str(caught.value)
    register(spark)
    printed = capsys.readouterr()
    assert "jetstream" in printed.out.lower()
    log, rest = _event_log(spark), _rest(spark)
    # The event log and the REST API do contain this write.
    assert name in log
    assert name in rest
    for output in (printed.out, printed.err, log, rest):
        assert places_of_secrets(output.encode()) == []


def _wrong_options() -> dict[str, dict[str, str]]:
    """Return options with a secret in every field, which the server refuses or which can't be used."""
    credentials = operator_mode(user=make_pair(key=planted_seed_bytes())).credentials
    return {
        "password": {"user": "u", "password": planted("password")},
        "token": {"token": planted("token")},
        "seed": {"nkeySeedSecret": make_pair(key=planted_seed_bytes()).seed},
        "credentials": {"credentialsSecret": credentials},
        "two ways": {"token": planted("token"), "user": "u", "password": planted("password")},
        "no seed": {"nkeySeedSecret": planted("no-seed")},
    }


def test_a_secret_in_an_option_is_shown_by_no_part_of_spark_that_fails(
    spark: SparkSession, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def failing(action: Callable[[], object]) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (Spark's and Python's errors alike are looked at)
            action()
        shown.extend([str(caught.value), repr(caught.value), "".join(traceback.format_exception(caught.value))])

    with NatsServer(user="u", password=planted("of-the-server", plain=True)) as server:
        rows = spark.range(2).select(f.lit(b"x").alias("value"), f.lit(f"{name}.x").alias("subject"))
        for number, wrong in enumerate(_wrong_options().values()):
            options = {"servers": server.url, "stream": name, **wrong}
            failing(spark.read.format("jetstream").options(**options).load)
            failing(rows.write.format("jetstream").options(**options).mode("append").save)
            listed = ", ".join(f"{option} '{_in_sql(value)}'" for option, value in options.items())
            failing(lambda: spark.sql(f"CREATE TEMPORARY VIEW {name} USING jetstream OPTIONS ({listed})"))  # noqa: B023
            if number == 0:
                failing(spark.readStream.format("jetstream").options(**options).load)
    printed = capfd.readouterr()
    for output in (*shown, printed.out, printed.err, _event_log(spark), _rest(spark)):
        assert places_of_secrets(output.encode(errors="replace")) == []


def _in_sql(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def test_a_connection_may_be_named(spark: SparkSession, nats: NatsServer, name: str) -> None:
    with open_stream({"servers": nats.url, "stream": name}) as stream:
        make_stream(stream)
        publish_numbers(stream, 10)
    # conftest.py sets NATS_SHARED_URL before Spark starts.
    options: dict[str, Any] = {"connection": "shared", "stream": name}
    assert spark.read.format("jetstream").options(**options).load().count() == 10
