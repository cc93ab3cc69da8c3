"""A shared Spark Connect server whose Python may read, start and reach only what is listed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.environments import build_wheel
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.spark_connect import SparkConnectServer, connect_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nightly

_HERE = Path(__file__).parent
_SECRET = "pl4nted-s3cret-of-a-file"
_ZIP = "airflow_provider_jetstream.zip"


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a name that is short enough for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="spark-") as path:
        yield Path(path)


def test_a_query_gets_no_further_than_what_the_server_was_started_with(tmp_path: Path, sockets: Path) -> None:
    shutil.copy(build_wheel(), tmp_path / _ZIP)
    (tmp_path / "readable").mkdir()
    (tmp_path / "readable" / "password").write_text(_SECRET)
    (tmp_path / "other").write_text(_SECRET)
    python = connect_environment(tmp_path / "venv", Path(sys.executable), version("pyspark"))
    log = tmp_path / "refused.log"
    with NatsServer(user="u", password=_SECRET) as nats, socket.create_server((LOOPBACK, 0)) as elsewhere:
        elsewhere.setblocking(False)  # noqa: FBT003 (the socket's own signature)
        nats_port, other_url = nats.port, f"nats://{LOOPBACK}:{elsewhere.getsockname()[1]}"
        file = str(tmp_path / "readable" / "password")
        allowed = {"servers": nats.url, "stream": "shared", "user": "u", "passwordFile": file}
        forbidden = {
            "another file": {**allowed, "passwordFile": str(tmp_path / "other")},
            "a file by a detour": {**allowed, "passwordFile": f"{tmp_path}/readable/../other"},
            "a file as a certificate": {**allowed, "tlsCaFile": "/etc/hostname"},
            "another server": {**allowed, "servers": other_url},
            "another server beside": {**allowed, "servers": f"{nats.url},{other_url}"},
            "a function": {"stream": "shared", "connection": "made", "connectionProvider": "os:mkdir"},
        }
        asyncio.run(_make_stream(nats))
        properties = {
            "spark.jetstream.allowedFiles": str(tmp_path / "readable"),
            "spark.jetstream.allowedServers": nats.url,
            # By loopback ports of TCP, the JVM couldn't be told from other servers.
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.python.unix.domain.socket.dir": str(sockets),
        }
        readable = [sys.base_prefix, "/usr/share/zoneinfo", str(python.parents[1]), str(tmp_path / "server")]
        readable.append(str(_HERE / "isolated_python"))
        variables = {
            "PYTHONPATH": str(_HERE / "isolated_python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ISOLATED_SOCKETS": str(sockets),
            "ISOLATED_READABLE": os.pathsep.join([*readable, str(tmp_path / "readable")]),
            "ISOLATED_ADDRESSES": f"{LOOPBACK}:{nats_port}",
            "ISOLATED_LOG": str(log),
        }
        with SparkConnectServer(python, tmp_path / "server", properties, variables) as server:
            done = subprocess.run(
                [
                    *(str(python), str(_HERE / "spark_isolated_client.py"), server.address, str(tmp_path / _ZIP)),
                    *(str(tmp_path), json.dumps(allowed), json.dumps(forbidden)),
                ],
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / _ZIP)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            output = server.log()
        assert done.returncode == 0, _without_jvm(done.stderr) + _without_jvm(output)
        result = json.loads(done.stdout)
        assert (result["refused rows"], result["stored"], result["again"]) == (1, ["0", "2"], ["0", "2"])
        for when in ("before", "set", "set and registered"):
            let_in = {name: text for name, text in result[when].items() if "spark.jetstream.allowed" not in text}
            assert let_in == {}, when
        assert not _was_reached(elsewhere)
    assert not list(tmp_path.rglob("made"))
    assert "not on this cluster" in result["own file"]
    # The source of the client is looked for to show it with an error.
    opened = {line.split("'")[1] for line in log.read_text().splitlines()} - {str(_HERE / "spark_isolated_client.py")}
    assert opened == {"/etc/hostname"}


def test_withheld_servers_do_not_count_as_any_server(tmp_path: Path) -> None:
    shutil.copy(build_wheel(), tmp_path / _ZIP)
    python = connect_environment(tmp_path / "venv", Path(sys.executable), version("pyspark"))
    program = (
        "import sys; from pyspark.sql import SparkSession; from airflow_provider_jetstream.spark import register;"
        " session = SparkSession.builder.remote(sys.argv[1]).getOrCreate();"
        " session.conf.unset('spark.jetstream.allowedServers'); register(session)"
    )
    # Spark takes the address for a secret, by its name.
    properties = {"spark.jetstream.allowedServers": "nats://token-service:4222"}
    with SparkConnectServer(python, tmp_path / "server", properties) as server:
        done = subprocess.run(
            [str(python), "-c", program, server.address],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / _ZIP)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert "expected a value of spark.jetstream.allowedServers that Spark Connect shows" in done.stderr


def _without_jvm(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("at "))


async def _make_stream(nats: NatsServer) -> None:
    settings = connection_settings({"servers": (nats.url,), "user": "u", "password": _SECRET})
    async with connect(settings) as connection:
        await connection.api("STREAM.CREATE.shared", {"name": "shared", "subjects": ["shared.>"]})


def _was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True
