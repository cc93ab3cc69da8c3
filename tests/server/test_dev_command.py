"""``jetstream-queue dev``: everything runs after one command, and nothing is left after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING

import psutil
import pytest

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.jetstream import ConnectionSettings, connect
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from testbed.airflow_client import AirflowApiError, AirflowClient
from testbed.dev_command import DevCommand
from testbed.ports import LOOPBACK
from testbed.queues import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection


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
        assert await dev.stop(signal.SIGINT) == []
        # nats-server, four of Airflow, two workers and what ends them all.
        assert dev.seen >= 8
        assert dev.process.returncode == ExitCode.INTERRUPTED
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
        assert dev.process.returncode == ExitCode.INTERRUPTED
    finally:
        dev.process.kill()


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
