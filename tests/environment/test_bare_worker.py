"""Workers in an environment without Airflow, started by their command as in a container."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import yaml

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import Job, WorkQueue, cancel, provision
from testbed.dead_letters import dead_letter_records, stream_messages
from testbed.face import PreparedJobs, publish_prepared
from testbed.queues import eventually, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

pytestmark = pytest.mark.group("environment without Airflow")

_HANDLERS = """
import asyncio
import importlib.util
import os
import sys

from pydantic import BaseModel

from airflow_provider_jetstream.worker import Delivery, GiveUpError


class Order(BaseModel):
    item: str


def process(order: Order, job: Delivery) -> dict:
    if order.item == "nothing":
        raise GiveUpError("there is nothing to send")
    return {"item": order.item, "process": os.getpid()}


async def find_extras(job: Delivery) -> list:
    if job.body == b"slow":
        await asyncio.sleep(3600)
    extras = ("airflow", "pyspark", "prometheus_client")
    return [name for name in extras if importlib.util.find_spec(name) or name in sys.modules]
"""


class WorkerContainer:
    """A queue on the server, and a folder in which workers of another interpreter are started."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue, folder: Path, python: Path, url: str) -> None:
        self.connection = connection
        self.queue = queue
        self._folder = folder
        self._python = python
        self._url = url

    @contextmanager
    def worker(self, consumer: str, handler: str, *options: str) -> Iterator[Process]:
        command: list[str | Path] = [
            *(self._python.parent / "jetstream-worker", "run", "--queue", "queue.yaml", "--consumer", consumer),
            *("--handler", f"handlers:{handler}", "--id", consumer, "--log-format", "json", *options),
        ]
        # The worker gets nothing of this process's environment, least of all its import paths.
        process = Process.start(
            command, env={"NATS_URL": self._url}, log_file=self._folder / f"{consumer}.log", cwd=self._folder
        )
        try:
            yield process
        finally:
            process.kill()

    async def publish(self, *jobs: Job) -> None:
        prepared = PreparedJobs(
            jobs, subject=f"{self.queue.name}.jobs", origin=None, batch=uuid4().hex, queue=self.queue
        )
        (await publish_prepared(self.connection, prepared)).raise_for_failures()

    async def ends(self) -> dict[str, dict[str, Any]]:
        """Return the end of each job by its id."""
        messages = await stream_messages(self.connection, f"{self.queue.name}-events", f"completed.{self.queue.name}.>")
        return {event["job_id"]: event for event in [json.loads(message.data) for message in messages]}


@pytest.fixture
async def container(
    connection: NatsPyConnection, nats: NatsServer, name: str, bare: Path, tmp_path: Path
) -> WorkerContainer:
    declared: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.>"],
        "dead_letters": f"{name}-dead",
        "events": f"{name}-events",
        "consumers": [
            {"name": "plain", "filter_subject": f"{name}.jobs", "max_deliver": 2, "ack_wait": "30s"},
            {
                "name": "divided",
                "filter_subject": f"{name}.customers.{{partition}}",
                "partitions": 2,
                "max_deliver": 2,
                "ack_wait": "30s",
            },
        ],
    }
    (tmp_path / "queue.yaml").write_text(yaml.safe_dump(declared), encoding="utf-8")
    (tmp_path / "handlers.py").write_text(_HANDLERS, encoding="utf-8")
    queue = WorkQueue(**declared)
    await provision(connection, queue)
    return WorkerContainer(connection, queue, tmp_path, bare, nats.url)


@pytest.mark.smoke
async def test_a_worker_completes_jobs_gives_up_bad_ones_and_stops_on_sigterm(container: WorkerContainer) -> None:
    bodies = [{"item": "pear"}, {"item": "plum"}, {"item": "nothing"}, {"pear": 1}]
    await container.publish(*(Job(body, id=str(number)) for number, body in enumerate(bodies)))
    with container.worker("plain", "process", "--processes", "--concurrency", "2") as process:

        async def settled() -> bool:
            return await stored_count(container.connection, container.queue.name) == 0

        await eventually(settled, within=30)
        ends = await container.ends()
        results = {job_id: end["result"] for job_id, end in ends.items()}
        assert {job_id: result["item"] for job_id, result in results.items()} == {"0": "pear", "1": "plum"}
        assert process.pid not in {result["process"] for result in results.values()}
        records = {
            job.header("Job-Id"): death
            for death, job in await dead_letter_records(container.connection, container.queue)
        }
        assert (records["2"].explanation, records["3"].error_class) == (
            "there is nothing to send",
            "airflow_provider_jetstream.worker.errors.InvalidBodyError",
        )
        assert (records["2"].error_place or "").startswith("handlers:process:")
        process.signal(signal.SIGTERM)
        await eventually(lambda: process.returncode is not None, within=20)
    assert process.returncode == 0
    logged = [json.loads(line) for line in process.output().splitlines()]
    assert sorted(line["outcome"] for line in logged if "outcome" in line) == ["completed"] * 2 + ["given_up"] * 2


async def test_a_worker_cancels_jobs_and_runs_without_airflow_and_spark(container: WorkerContainer) -> None:
    await container.publish(Job("slow", id="slow"), Job("later", id="later"))
    await cancel(container.connection, container.queue, "later", why="not wanted")
    with container.worker("plain", "find_extras", "--concurrency", "2") as process:
        await eventually(lambda: "takes jobs of" in process.output(), within=20)
        await container.publish(Job("quick", id="quick"))

        async def two_ended() -> bool:
            return set(await container.ends()) == {"later", "quick"}

        await eventually(two_ended, within=20)
        await cancel(container.connection, container.queue, "slow", why="too slow", by="somebody")

        async def all_ended() -> bool:
            return "slow" in await container.ends()

        await eventually(all_ended)
    ends = await container.ends()
    slow, later, quick = ends["slow"], ends["later"], ends["quick"]
    kinds = [end["type"].rpartition(".")[2] for end in (slow, later, quick)]
    assert kinds == ["cancelled", "cancelled", "completion"]
    assert (slow["why"], later["why"], quick["result"]) == ("too slow", "not wanted", [])


async def test_metrics_without_their_extra_are_refused_with_a_remedy(container: WorkerContainer) -> None:
    with container.worker("plain", "find_extras", "--metrics-port", "0") as process:
        await eventually(lambda: process.returncode is not None, within=20)
    assert process.returncode == 2
    assert "expected prometheus-client to serve metrics, found none" in process.output()
    assert "its extra metrics" in process.output()
