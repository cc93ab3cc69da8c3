"""What an SQL user's options can't do: choose code, read files, send secrets to another server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish_numbers

from airflow_provider_jetstream.spark.connection_options import (
    ALLOWED_FILES,
    ALLOWED_PROVIDERS,
)
from testbed.nats_server import NatsServer
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECRET = "pl4nted-s3cret-of-a-file"


def _created_view(spark: SparkSession, name: str, **options: str) -> None:
    listed = ", ".join(f"{option} '{value}'" for option, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} USING jetstream OPTIONS ({listed}, stream 'any')")


def test_sql_chooses_neither_code_nor_files(spark: SparkSession, name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "token").write_text(_SECRET)
    spark.sql(f"SET {ALLOWED_PROVIDERS}=os:system,shutil:rmtree")
    spark.sql(f"SET {ALLOWED_FILES}={tmp_path}")
    view = f"v{name.replace('-', '_')}"
    # A name of a connection can be a command; what it would print shows that it hasn't run.
    for provider, argument in (("os:system", "true"), ("shutil:rmtree", "folder")):
        with pytest.raises(PySparkException, match="expected connectionProvider to be one of"):
            _created_view(spark, view, connection=argument, connectionProvider=provider)
    with NatsServer(token=_SECRET) as server:
        for option in ("tokenFile", "tokenfile", "tlsCaFile", "credentialsFile"):
            with pytest.raises(PySparkException, match="expected a file below one of"):
                _created_view(spark, view, servers=server.url, **{option: str(tmp_path / "token")})


_APPLICATION = """
import os
import sys
from pyspark.sql import SparkSession
from airflow_provider_jetstream.spark import register

url, stream, folder = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
builder = builder.config("spark.jetstream.allowedFiles", folder).config("spark.jetstream.allowedServers", url)
session = builder.config("spark.jetstream.allowedProviders", "providing:find").getOrCreate()
register(session)
reader = session.read.format("jetstream").option("stream", stream)
by_file = reader.options(servers=url, user="u", passwordFile=f"{folder}/password").load()
reader = session.read.format("jetstream").option("stream", stream)
by_provider = reader.options(connection="u", connectionProvider="providing:find").load()
print("read", by_file.count(), by_provider.count())
"""
_PROVIDER = """
import os

def find(name):
    return {"servers": os.environ["PROVIDED"], "user": name, "passwordFile": os.environ["PROVIDED_FILE"]}
"""


@pytest.mark.jvm
def test_the_application_allows_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(_SECRET)
    (tmp_path / "providing.py").write_text(_PROVIDER)
    with NatsServer(user="u", password=_SECRET) as server:
        with open_stream({"servers": server.url, "stream": name, "user": "u", "password": _SECRET}) as stream:
            make_stream(stream)
            publish_numbers(stream, 10)
        root = str(Path(__file__).parents[2])
        run = subprocess.run(
            [sys.executable, "-c", _APPLICATION, server.url, name, str(tmp_path)],
            env={
                "PATH": str(Path(shutil.which("java") or "").parent) + ":/usr/bin:/bin",
                "PYTHONPATH": f"{root}:{tmp_path}",
                "PYSPARK_PYTHON": sys.executable,
                "PROVIDED": server.url,
                "PROVIDED_FILE": str(tmp_path / "password"),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert "read 10 10" in run.stdout, run.stderr[-3000:]
