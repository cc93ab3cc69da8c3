"""An API server with two worker processes: both show the same numbers."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import ROOT

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.api_workers import ApiServer, answers_by_worker
from testbed.many_letters import NAK, ManyJob, let_die, make_dead_queue
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LETTERS, PENDING = 700, 30
API = "/jetstream/api/queues/nats_default/broken"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
def airflow(server: NatsServer, tmp_path: Path, migrated_databases: Path) -> Iterator[ApiServer]:
    (tmp_path / "dags").mkdir()
    instance = ApiServer(
        tmp_path / "home",
        tmp_path / "dags",
        connections={"nats_default": json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": server.port})},
        env={
            "AIRFLOW__API__WORKERS": "2",
            "AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": "0.5",
            "PYTHONPATH": str(ROOT),
        },
        template_db=migrated_databases,
    )
    with instance:
        yield instance


async def test_both_workers_of_an_api_server_show_the_same_numbers(server: NatsServer, airflow: ApiServer) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        broken = await make_dead_queue(connection, "broken")
        jobs = (ManyJob(f"broken.jobs.s{n % 3}", b"{}", f"job-{n}", NAK) for n in range(LETTERS))
        await let_die(connection, broken, jobs)
        await publish_jobs(connection, await make_queue(connection, "waiting"), map(str, range(PENDING)))
    first, second = both(airflow, "/jetstream/api/snapshot", all_counted)
    assert numbers(first) == numbers(second) == {"broken": (0, LETTERS), "waiting": (PENDING, 0)}
    for path in ("/groups?group_by=subject", "/letters?sort=-died_at&limit=20", "/letters?job_id=job-77", "/letters/9"):
        first, second = both(airflow, f"{API}{path}", lambda _: True)
        for answer in (first, second):
            # Each has its own scan, at a time of its own.
            answer.pop("scan", None)
        assert first == second
    assert len(first["attempts"]) > 0


def both(airflow: ApiServer, path: str, is_complete: Any) -> list[dict[str, Any]]:
    """Return the answers of both workers, once they are complete."""
    deadline = time.monotonic() + 120
    while True:
        pids = airflow.worker_pids()
        if len(pids) == 2 and all(map(is_complete, (found := answers_by_worker(airflow, pids, path)).values())):
            return list(found.values())
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: expected complete answers of two workers, found {pids}")
        time.sleep(0.2)


def all_counted(snapshot: Mapping[str, Any]) -> bool:
    """Return whether a snapshot has the numbers of both queues."""
    queues = snapshot["connections"][0]["queues"]
    return len(queues) == 2 and all(queue["letters"] for queue in queues)


def numbers(snapshot: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return by queue how many jobs are pending, and how many letters there are."""
    queues = snapshot["connections"][0]["queues"]
    return {queue["queue"]: (queue["pending"], queue["letters"]["certain"]) for queue in queues}
