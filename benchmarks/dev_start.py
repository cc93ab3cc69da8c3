"""How long `jetstream-queue dev` takes from its start until a dead letter has been redriven and its job is done.

The package's wheel and its extra `dev` are installed into an empty environment, from a warm cache. Each
round starts the command there as a process, and then does what a person does on the page: logs in, opens the dead
letters of `receipts`, selects the group `MailboxBusyError`, and has the page's DAG redrive it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from airflow_provider_jetstream.jetstream import ConnectionSettings, connect
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from benchmarks.report import Goal, PageWorkload
from testbed.airflow_client import AirflowClient
from testbed.dead_letters import letter_records
from testbed.dev_command import DevCommand
from testbed.environments import build_wheel, create_environment, locked
from testbed.ports import LOOPBACK
from testbed.queues import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_QUEUE, _CONSUMER, _ERROR = "receipts", "sender", "handlers.MailboxBusyError"
_API = f"/jetstream/api/queues/nats_default/{_QUEUE}"
_GOAL = 60.0
_LIMIT = 180.0
ADDRESS, ANSWERS, LISTED, REDRIVEN = (
    "the address is printed",
    "the page answers",
    "the page lists the group of letters",
    "a letter of the group is redriven and its job is completed",
)


@dataclass(frozen=True)
class PhaseTable:
    """Seconds from the start until each phase is reached, by round."""

    rounds: Sequence[dict[str, float]]
    ways: Sequence[Any] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        lines = ["| seconds from the start until | median | min | max |", "| --- | --- | --- | --- |"]
        for phase in self.rounds[0]:
            seconds = [each[phase] for each in self.rounds]
            lines.append(f"| {phase} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} |")
        return lines


def main() -> int:
    """Measure and print the times."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", action="store_true", help="run this environment's command, install nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python, installed = (Path(sys.executable), 0.0) if options.here else _install(folder)
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            (own := folder / f"round-{number}").mkdir()
            rounds.append(asyncio.run(_round(own, python)))
    workload = _section(rounds, installed)
    print("\n".join(workload.lines()))
    return 0


def _section(rounds: Sequence[dict[str, float]], installed: float) -> PageWorkload:
    where = (
        f"The wheel with the extra `dev` is installed into an empty environment, modules compiled as pip does it, in"
        f" {installed:.0f} s from a warm cache."
        if installed
        else "The command of the project's own environment."
    )
    text = (
        f"{where} Then {len(rounds)} starts of `jetstream-queue dev`. After each the program"
        " does what a person does on the page: it logs in, opens the dead letters of"
        " `receipts`, selects the group `MailboxBusyError`, and has the page's DAG redrive it. The last phase ends with"
        " the completion of a redriven job in the events stream. A person's own time isn't in it."
    )
    seconds = [each[REDRIVEN] for each in rounds]
    goals = [
        Goal(f"seconds until {REDRIVEN}, median", statistics.median(seconds), _GOAL, at_most=True),
        Goal(f"seconds until {REDRIVEN}, slowest", max(seconds), _GOAL, at_most=True),
    ]
    tables: Any = [PhaseTable(rounds)]
    return PageWorkload("dev start", "The first redrive after `jetstream-queue dev`", "dev_start", text, tables, goals)


def _install(folder: Path) -> tuple[Path, float]:
    """Install the wheel as its reader does; return the interpreter, and how long that took."""
    wheel = build_wheel()
    started = time.monotonic()
    python = create_environment(
        folder / "environment", Path(sys.executable), [f"{wheel}[dev]", locked("apache-airflow")]
    )
    # As pip does, and uv doesn't.
    subprocess.run([python, "-m", "compileall", "-q", "-j", "0", folder / "environment" / "lib"], check=False)
    return python, time.monotonic() - started


async def _round(folder: Path, python: Path) -> dict[str, float]:
    phases: dict[str, float] = {}
    started = time.monotonic()
    dev = DevCommand(folder, python=python)

    def reached(phase: str) -> None:
        phases[phase] = time.monotonic() - started

    try:
        await dev.prints("Page:")
        reached(ADDRESS)
        url = f"http://{LOOPBACK}:{dev.page_port}"
        await eventually(lambda: _answers(f"{url}/plugin/jetstream"), _LIMIT)
        reached(ANSWERS)
        client = AirflowClient(url)
        select = await eventually(lambda: asyncio.to_thread(_group, client), _LIMIT)
        reached(LISTED)
        await eventually(lambda: asyncio.to_thread(client.dag, "jetstream_redrive"), _LIMIT)
        await asyncio.to_thread(_redrive, client, select)
        async with connect(ConnectionSettings(servers=(f"nats://{LOOPBACK}:{dev.nats_port}",))) as connection:
            await eventually(lambda: _is_completed(connection), _LIMIT)
        reached(REDRIVEN)
        if left := await dev.stop(signal.SIGINT):
            raise RuntimeError(f"expected that nothing is left of the command, found {left}")
    finally:
        dev.process.kill()
    return phases


async def _answers(address: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            return (await client.get(address)).status_code == HTTPStatus.OK
    except httpx.TransportError:
        return False


def _group(client: AirflowClient) -> dict[str, Any] | None:
    """Return the selection of the group, once the page lists it."""
    answer = client.request("GET", f"{_API}/groups?group_by=error_class")
    if answer.status_code != HTTPStatus.OK:
        return None
    groups = answer.json()["groups"]
    return next((group["select"] for group in groups if group["select"].get("error_class") == _ERROR), None)


def _redrive(client: AirflowClient, select: dict[str, Any]) -> None:
    """Ask for the numbers and start the DAG, as the page does."""
    headers = {"Authorization": f"Bearer {client.token()}", "Sec-Fetch-Site": "same-origin"}
    body = {"select": select, "action": "redrive"}
    answer = httpx.post(f"{client.url}{_API}/dry-run", json=body, headers=headers, trust_env=False, timeout=60)
    answer.raise_for_status()
    client.trigger("jetstream_redrive", {**answer.json()["conf"], "rate": 20})


async def _is_completed(connection: NatsPyConnection) -> bool:
    """Return whether the job of a redriven letter has its end in the events stream."""
    queue = await discover_queue(connection, _QUEUE)
    if queue.events is None:
        raise LookupError(f"{_QUEUE} has no events")
    for record in await letter_records(connection, queue):
        subject = completion_subject(_QUEUE, _CONSUMER, record.new_sequence or 0)
        if await last_message(connection, queue.events.name, subject):
            return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
