"""``jetstream-worker conform`` tries workers in any language, and says which lines of the contract they keep."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from conforming import LINES, broken, conform

from airflow_provider_jetstream.dev.process import Process
from testbed.certificates import make_tls
from testbed.nats_server import NatsServer
from testbed.queues import eventually

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.mjs"
TRIALS = 5
HANDLER = """
import time
from airflow_provider_jetstream.worker import GiveUpError

def handle(job):
    word, _, seconds = job.body.decode().partition(" ")
    if word == "sleep":
        time.sleep(float(seconds))
    if word == "fail":
        raise ValueError("the job says so")
    if job.body == b"give up":
        raise GiveUpError("the job says so")
    return {"length": len(job.body)}
"""


@pytest.mark.slow
def test_the_javascript_worker_keeps_all_lines_also_where_it_is_killed_or_cut_off(
    nats: NatsServer, node_folder: Path
) -> None:
    script = node_folder / "conforming.mjs"
    script.write_bytes(WORKER.read_bytes())
    found = conform(nats, "--json", "--", "node", str(script))
    assert broken(found) == {}
    assert found.returncode == 0


@pytest.mark.slow
def test_an_end_with_another_id_after_each_restart_is_found_where_the_worker_is_killed(
    nats: NatsServer, node_folder: Path
) -> None:
    right = "`done:${queue}:${place.sequence}:${place.stored}`"
    source = WORKER.read_text(encoding="utf-8")
    assert source.count(right) == 1
    script = node_folder / "restarted.mjs"
    script.write_text(source.replace(right, f"{right} + process.pid"), encoding="utf-8")
    found = conform(nats, "--json", "--", "node", str(script))
    problems = broken(found)
    assert found.returncode == 1
    assert problems["killed-after-completion"] == "expected one stored end, found 2"
    assert set(problems) <= {"id-in-nanoseconds", "killed-after-completion", "killed-before-acknowledgement"}
    assert "What the workers printed is in " in found.stderr


@pytest.mark.slow
def test_this_packages_own_worker_keeps_all_lines(nats: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "conform_handler.py").write_text(HANDLER)
    program = f"{sys.executable} -m airflow_provider_jetstream.worker.cli run --consumer worker"
    command = ["sh", "-c", f'exec {program} --queue "$JOB_QUEUE" --handler conform_handler:handle']
    found = conform(nats, "--", *command, environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert found.returncode == 0, found.stdout
    assert found.stdout.splitlines()[-1] == f"{LINES} of 37 lines kept"
    assert found.stderr == ""


@pytest.mark.slow
def test_a_program_that_cant_be_run_or_ends_by_itself_is_named(nats: NatsServer) -> None:
    absent = conform(nats, "--", "no-such-program")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "expected a program that can be run, found 'no-such-program': No such file or directory" in absent.stderr
    ended = conform(nats, "--", "sh", "-c", "echo no modules; exit 7")
    assert ended.returncode == 2
    assert "ends by itself with status 7; it printed last: no modules" in ended.stderr


@pytest.mark.slow
def test_a_worker_that_does_nothing_keeps_no_line_but_that_of_what_is_optional(nats: NatsServer) -> None:
    found = conform(nats, "--json", "--limit", "1", "--", "sleep", "60")
    problems = broken(found)
    assert len(problems) == LINES - 1
    assert "attempt-form" not in problems
    assert found.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interruption_leaves_neither_streams_nor_workers(
    own_nats: NatsServer, tmp_path: Path, number: signal.Signals
) -> None:
    mark = f"60.{os.getpid()}"
    command = [sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "conform", "--", "sleep", mark]
    env = {**os.environ, "NATS_URL": own_nats.url}
    process = Process.start(command, env=env, log_file=tmp_path / "conform.log")
    try:
        await eventually(lambda: len(sleeping(mark)) == TRIALS)
        os.kill(process.pid, number)
        await eventually(lambda: not process.alive)
    finally:
        process.kill()
    assert (process.returncode, sleeping(mark)) == (130, [])
    assert "Traceback" not in process.output()
    assert own_nats.api("STREAM.NAMES")["total"] == 0


def sleeping(mark: str) -> list[int]:
    return [found.pid for found in psutil.process_iter(["cmdline"]) if found.info["cmdline"] == ["sleep", mark]]


@pytest.mark.slow
def test_no_stream_is_left(own_nats: NatsServer) -> None:
    conform(own_nats, "--", "no-such-program")
    assert own_nats.api("STREAM.NAMES")["total"] == 0


@pytest.mark.slow
def test_a_server_that_a_proxy_cant_read_is_refused(tmp_path: Path) -> None:
    with NatsServer(tls=make_tls(tmp_path)) as server:
        found = conform(server, "--", "true")
    assert found.returncode == 2
    assert "expected one nats-server without TLS" in found.stderr
