"""The lowest and the newest nats-py: its client over the package's connection does the same."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed.environments import ROOT, build_wheel, create_environment

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer

_PROGRAM = """
import asyncio
import sys
from importlib.metadata import version

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.publishing.outbox import Outbox
from airflow_provider_jetstream.jetstream.publishing.report import Destination

url, name = sys.argv[1:]


async def main():
    settings = connection_settings({"servers": (url,), "timeout": 30})
    async with connect(settings), connect(settings) as connection:
        await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        jobs = PreparedJobs(map(str, range(3_000)), subject=f"{name}.a", origin=None, batch="b")
        report = await Outbox(connection, destination=Destination(name)).send(jobs)
        report.raise_for_failures()
        assert sorted(report.sequences) == list(range(1, 3_001))
        reads = [(f"$JS.API.STREAM.MSG.GET.{name}", b'{"seq":%d}' % number) for number in range(1, 1_501)]
        answers = await connection.request_many(reads)
        assert all(b'"seq":%d,' % (place + 1) in answer for place, answer in enumerate(answers)), answers[:1]
        received, of_nats_py = [], asyncio.Queue()
        subscription = await connection.subscribe_raw("x.*", lambda *fields: received.append(fields))
        client = connection.client
        await client.subscribe("y", cb=of_nats_py.put)
        await client.flush()
        before = client.stats["in_msgs"]
        connection.write(b"".join(encode_message(b"x.%d" % number, b"body", b"", b"r") for number in range(1_000)))
        await client.publish("y", b"last", headers={"A": "1"})
        message = await of_nats_py.get()
        assert (message.data, message.headers) == (b"last", {"A": "1"})
        while len(received) < 1_000:
            await asyncio.sleep(0.001)
        assert received == [(b"x.%d" % number, b"r", None, b"body") for number in range(1_000)]
        assert client.stats["in_msgs"] - before == 1_001
        await subscription.unsubscribe()
        assert (await client.jetstream().publish(f"{name}.a", b"x")).seq == 3_001
        # After a loss nats-py's subscriptions are there again, as this package's are.
        connection.link.abort()
        while connection.reconnects == 0:
            await asyncio.sleep(0.01)
        assert b'"messages":3001' in await connection.request(f"$JS.API.STREAM.INFO.{name}")
        while of_nats_py.empty():
            await connection.publish("y", b"again")
            await asyncio.sleep(0.05)
        await connection.drop_unsent()
    print(version("nats-py"))


asyncio.run(asyncio.wait_for(main(), 60))
"""


def lowest_version() -> str:
    """Return the lowest nats-py that this package declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (line for line in project["dependencies"] if line.startswith("nats-py"))
    return str(requirement.partition(">=")[2])


@pytest.mark.parametrize("is_lowest", [True, False], ids=["lowest", "newest"])
def test_the_data_path_works_with_each_supported_nats_py(
    nats: NatsServer, name: str, tmp_path: Path, *, is_lowest: bool
) -> None:
    lowest = lowest_version()
    requirement = f"nats-py[nkeys]=={lowest}" if is_lowest else "nats-py[nkeys]"
    python = create_environment(tmp_path / "venv", Path(sys.executable), [str(build_wheel()), requirement])
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ended = subprocess.run(
        [python, program, nats.url, name],
        env={},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = ended.stdout.strip()
    assert found.startswith(lowest) if is_lowest else found > lowest
