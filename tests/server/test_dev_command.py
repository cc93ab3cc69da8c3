"""``jetstream-queue dev``: everything runs after one command, and nothing is left after Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import psutil
import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Selection,
    connect,
    diagnose_dead_letters,
    discover_queue,
    list_redrives,
)
from testbed.airflow_client import AirflowApiError, AirflowClient
from testbed.code_blocks import sections
from testbed.dev_command import DevCommand
from testbed.face import inspect_all_queues, stream_info
from testbed.ports import LOOPBACK
from testbed.queues import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.face import NatsPyConnection


@pytest.mark.slow
async def test_the_command_starts_a_page_with_busy_queues_and_leaves_nothing_after_ctrl_c(tmp_path: Path) -> None:
    dev = DevCommand(tmp_path)
    try:
        await dev.prints("Ctrl-C stops everything")
        lines = dev.output().splitlines()
        assert lines[0].startswith(f"Page:  http://{LOOPBACK}:{dev.page_port}/plugin/jetstream   user admin, password")
        assert lines[1] == f"NATS:  nats://{LOOPBACK}:{dev.nats_port}"
        assert lines[3] == "Click next:"
        await _page_answers_who_is_logged_in(f"http://{LOOPBACK}:{dev.page_port}")
        settings = ConnectionSettings(servers=(f"nats://{LOOPBACK}:{dev.nats_port}",))
        async with connect(settings) as connection:
            await _queues_are_busy(connection)
            await _the_page_can_redrive(f"http://{LOOPBACK}:{dev.page_port}", connection)
            # Its jobs wait until the task is deferred, however late a loaded machine begins its run.
            until = datetime.now(UTC) + timedelta(minutes=5)
            await connection.api("CONSUMER.PAUSE.receipts.sender", {"pause_until": until.isoformat()})
            await asyncio.to_thread(_a_task_that_waits_has_its_log, f"http://{LOOPBACK}:{dev.page_port}")
        assert await dev.stop(signal.SIGINT) == []
        # nats-server, five of Airflow, two workers and what ends them all.
        assert dev.seen >= 9
        assert dev.process.returncode == 130
    finally:
        dev.process.kill()


async def _page_answers_who_is_logged_in(url: str) -> None:
    client = AirflowClient(url, "admin", "admin")
    assert client.request("GET", "/plugin/jetstream", anonymous=True).status_code == HTTPStatus.OK
    assert client.request("GET", "/jetstream/api/me", anonymous=True).status_code == HTTPStatus.UNAUTHORIZED
    with pytest.raises(AirflowApiError):
        AirflowClient(url, "admin", "wrong").token()

    async def shows_the_queues() -> bool:
        snapshot = client.request("GET", "/jetstream/api/snapshot").json()
        queues = {queue["queue"] for each in snapshot["connections"] for queue in each["queues"]}
        return queues == {"receipts", "thumbnails", "reminders"}

    await eventually(shows_the_queues, 30)


async def _queues_are_busy(connection: NatsPyConnection) -> None:
    async def busy() -> bool:
        overviews = {overview.name: overview for overview in await inspect_all_queues(connection)}
        receipts, thumbnails, reminders = (overviews[name] for name in ("receipts", "thumbnails", "reminders"))
        assert receipts.health
        assert thumbnails.health
        assert reminders.health
        return bool(
            (await stream_info(connection, "receipts_events"))["state"]["messages"] > 20
            and receipts.left_over
            and receipts.left_over.dead > 5
            and thumbnails.health.pending > 10
            and thumbnails.health.in_flight > 0
            and reminders.health.pending == 150
        )

    await eventually(busy, 60)


async def _the_page_can_redrive(url: str, connection: NatsPyConnection) -> None:
    """Trigger the DAG that the page triggers, for the letters that the printed text names."""
    client = AirflowClient(url, "admin", "admin")
    await eventually(lambda: client.dag("jetstream_redrive"), 90)
    assert client.import_errors() == []
    select = {"error_class": "handlers.MailboxBusyError"}
    # What the printed text advises, the diagnosis advises too.
    queue = await discover_queue(connection, "receipts")

    async def advises_to_try() -> bool:
        diagnosis = await diagnose_dead_letters(connection, queue, Selection(error_class=select["error_class"]))
        return bool(diagnosis.action == "try_a_few")

    await eventually(advises_to_try, 120)
    run_id = client.trigger("jetstream_redrive", {"queue": "receipts", "select": select, "rate": 50})
    run = await asyncio.to_thread(client.wait_for_run, "jetstream_redrive", run_id, 120)
    assert run["state"] == "success"
    (redrive,) = await list_redrives(connection, queue)
    assert redrive.redriven > 0
    assert client.runs("send_receipts")


def _a_task_that_waits_has_its_log(url: str) -> None:
    """Read the log of a task while it runs and while it is deferred; one that its schedule began comes first."""
    client = AirflowClient(url, "admin", "admin")
    client.trigger("send_receipts", {})
    until, seen = time.monotonic() + 120, set[str]()
    while time.monotonic() < until:
        for run in client.runs("send_receipts"):
            run_id = run["dag_run_id"]
            for task in client.task_instances("send_receipts", run_id) if run["state"] == "running" else ():
                if task["state"] not in ("running", "deferred"):
                    continue
                seen.add(task["state"])
                path = f"/api/v2/dags/send_receipts/dagRuns/{run_id}/taskInstances/{task['task_id']}/logs/1"
                answer = client.request("GET", path)
                assert "Could not read served logs" not in answer.text, answer.text
        if "deferred" in seen:
            return
        time.sleep(0.2)
    raise AssertionError(f"expected the task to be deferred, found {client.runs('send_receipts')}")


@pytest.mark.slow
async def test_own_dags_take_the_place_of_the_examples_as_the_tutorial_begins(tmp_path: Path) -> None:
    start, *lesson = sections("docs/tutorial.md")
    command, shown = start.blocks
    install, make_folder, run = map(shlex.split, command.code.splitlines())
    assert (install[:2], run[:2]) == (["pip", "install"], ["jetstream-queue", "dev"])
    assert await (await asyncio.create_subprocess_exec(*make_folder, cwd=tmp_path)).wait() == 0
    dev = DevCommand(tmp_path, *run[2:])
    url = f"http://{LOOPBACK}:{dev.page_port}"
    try:
        await dev.prints("Ctrl-C stops everything")
        printed = dev.output().replace(str(dev.page_port), "8080").replace(str(dev.nats_port), "4222")
        assert shown.is_printed_in(printed.replace(str(dev.temporary), "/tmp")), printed
        async with connect(ConnectionSettings(servers=(f"nats://{LOOPBACK}:{dev.nats_port}",))) as connection:
            assert await inspect_all_queues(connection) == []
        for block in (block for section in lesson for block in section.blocks):
            if block.file and block.file.startswith("dags/"):
                (tmp_path / block.file).write_text(block.code)
        client = AirflowClient(url, "admin", "admin")
        for dag_id in ("convert_sales", "jetstream_redrive"):
            dag = await eventually(partial(client.dag, dag_id), 120)
            assert not dag["is_paused"]
        assert client.import_errors() == []
        assert client.dag("send_receipts") is None
        # The connections of the terminal are the user's own.
        (scheduler,) = (each for each in dev.running if "scheduler" in each.cmdline())
        assert scheduler.environ()["AIRFLOW_CONN_WAREHOUSE"] == "sqlite://"
        assert str(dev.nats_port) in scheduler.environ()["AIRFLOW_CONN_NATS_DEFAULT"]
        assert await dev.stop(signal.SIGINT) == []
    finally:
        dev.process.kill()


@pytest.mark.slow
def test_a_folder_of_dags_that_is_missing_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "dev", "--dags", "absent"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"expected a folder for --dags, found none at {tmp_path / 'absent'}" in done.stderr


@pytest.mark.slow
async def test_sigterm_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    dev = DevCommand(tmp_path, "--json")
    try:
        await dev.prints("\n")
        told = json.loads(dev.output())
        assert told["page"] == f"http://{LOOPBACK}:{dev.page_port}/plugin/jetstream"
        assert told["user"] == "admin"

        async def has_started_airflow() -> bool:
            return any(
                "api_server" in " ".join(child.cmdline()) for child in psutil.Process(dev.process.pid).children()
            )

        await eventually(has_started_airflow, 30)
        assert await dev.stop(signal.SIGTERM) == []
        assert dev.seen >= 2
        assert dev.process.returncode == 130
    finally:
        dev.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--port", "--nats-port"])
def test_a_port_that_is_taken_is_refused_with_the_process_that_has_it(option: str, tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "dev", "--no-browser"]
        ports = ["--port", "0", "--nats-port", "0", option, str(taken)]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run([*command, *ports], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"expected port {taken} to be free" in done.stderr
    assert f"found {psutil.Process().name()} (process {os.getpid()}) listening there" in done.stderr
    assert f"choose another port with {option}" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
