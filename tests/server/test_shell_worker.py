"""example_workers/worker.sh keeps docs/worker-contract.md, from which it was written."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from conforming import broken, conform

from airflow_provider_jetstream.dev.process import Process
from testbed.face import last_message
from testbed.queues import eventually, make_queue, publish_jobs, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.sh"
LACKING = [program for program in ("bash", "jq", "setsid") if shutil.which(program) is None]
LONG = 60.0

pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"{', '.join(LACKING)} can't be found on PATH")


@contextmanager
def shell_worker(nats: NatsServer, queue: str, folder: Path) -> Iterator[Process]:
    (folder / "temporary").mkdir()
    environment = {
        **os.environ,
        "NATS_URL": nats.url,
        "JOB_STREAM": queue,
        "JOB_CONSUMER": "worker",
        "TMPDIR": str(folder / "temporary"),
    }
    process = Process.start(["bash", WORKER], env=environment, log_file=folder / "worker.log")
    try:
        yield process
    finally:
        process.terminate()


@pytest.mark.slow
def test_the_shell_worker_keeps_all_lines_also_where_it_is_killed_or_cut_off(nats: NatsServer, tmp_path: Path) -> None:
    # A worker that is killed leaves its folder.
    found = conform(nats, "--json", "--", "bash", str(WORKER), environment={"TMPDIR": str(tmp_path)})
    assert broken(found) == {}
    assert found.returncode == 0


@pytest.mark.slow
async def test_the_record_of_a_job_has_its_bytes_and_headers(
    connection: NatsPyConnection, nats: NatsServer, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "10s"})
    body = b"give up\x00\r\nMSG a 1 5\r\n" + bytes(range(256)) * 300
    await publish_jobs(connection, queue, [body], headers={"Tenant": "grün", "Dead-Letter-Reason": "mine"})
    with shell_worker(nats, name, tmp_path):
        subject = f"dead.{name}.worker.1"
        record = await eventually(lambda: last_message(connection, f"{name}-dead", subject), within=LONG)
    assert record.data == body
    found = [record.header(header) for header in ("Tenant", "Dead-Letter-Reason", "Dead-Letter-Explanation")]
    assert found == ["grün", "terminated", "the job says so"]


@pytest.mark.slow
async def test_a_worker_that_is_stopped_leaves_no_process_no_file_and_its_job(
    connection: NatsPyConnection, nats: NatsServer, name: str, tmp_path: Path
) -> None:
    await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs=["sleep 60"])
    with shell_worker(nats, name, tmp_path) as process:
        await eventually(lambda: "job sleep 60, delivery 1" in process.output(), within=LONG)
        started = psutil.Process(process.pid).children(recursive=True)
        process.signal(signal.SIGTERM)
        await eventually(lambda: not process.alive, within=LONG)
        assert process.returncode == 128 + signal.SIGTERM
        assert started
        assert psutil.wait_procs(started, timeout=LONG)[1] == []
    assert list((tmp_path / "temporary").iterdir()) == []
    assert await stored_count(connection, name) == 1
