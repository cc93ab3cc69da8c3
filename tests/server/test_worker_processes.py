"""Real worker processes: what becomes of jobs when they are killed, stopped or many."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.dev.worker_processes import start_worker
from testbed.dead_letters import dead_letter_records, stream_messages
from testbed.face import consumer_info
from testbed.ledger import read_ledger
from testbed.queues import eventually, make_queue, publish_jobs, stored_count, until_stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

ROOT = Path(__file__).resolve().parents[2]

HANDLERS = """
import json, logging, os, signal, time
from pathlib import Path
from nats.aio.client import Client
from airflow_provider_jetstream.worker import GiveUpError
from testbed.face import NatsPyConnection

FOLDER = Path(os.environ["FOLDER"])

def record(event, job):
    with (FOLDER / "ledger").open("a") as ledger:
        ledger.write(json.dumps([event, job.sequence, job.attempt, os.getpid()]) + "\\n")

def quick(job):
    time.sleep(0.01)
    record("done", job)

def gated(job):
    record("start", job)
    while not (FOLDER / "released").exists():
        time.sleep(0.01)
    record("done", job)

def die_before_sending(acknowledgement):
    request, write = Client.request, NatsPyConnection.write

    def die_writing(connection, frames, messages=1):
        if b"\\r\\n" + acknowledgement in frames:
            os.kill(os.getpid(), signal.SIGKILL)
        write(connection, frames, messages)

    NatsPyConnection.write = die_writing

    async def die(client, subject, payload=b"", **options):
        if payload.startswith(acknowledgement):
            os.kill(os.getpid(), signal.SIGKILL)
        return await request(client, subject, payload, **options)

    Client.request = die

def dies_before_its_acknowledgement(job):
    record("done", job)
    die_before_sending(b"+ACK")

def gives_up(job):
    record("given up", job)
    raise GiveUpError("bad printer") from ValueError(f"order {job.sequence} has no paper")

def given_up_or_failed(job):
    logging.getLogger("shop").info("working on %s", job.id)
    if job.sequence == 1:
        raise GiveUpError("bad printer")
    if job.attempt == 1:
        raise ValueError("no paper")

def dies_before_its_termination(job):
    die_before_sending(b"+TERM")
    gives_up(job)
"""


class Workers:
    """Worker processes of one test, and what their handlers have recorded."""

    def __init__(self, nats: NatsServer, folder: Path) -> None:
        self.folder = folder
        (folder / "handlers.py").write_text(HANDLERS)
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.env = {**os.environ, "NATS_URL": nats.url, "FOLDER": str(folder), "PYTHONPATH": path}
        self.started: list[Process] = []

    def start(self, queue: WorkQueue, handler: str, concurrency: int = 1) -> Process:
        process = start_worker(
            f"worker-{len(self.started)}",
            queue=self.declare(queue),
            consumer="worker",
            handler=f"handlers:{handler}",
            env=self.env,
            logs=self.folder,
            concurrency=concurrency,
        )
        self.started.append(process)
        return process

    def run(self, queue: WorkQueue, handler: str, *arguments: str) -> Process:
        command = [sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "run", "--consumer", "worker"]
        command += ["--queue", str(self.declare(queue)), "--handler", f"handlers:{handler}", *arguments]
        process = Process.start(command, env=self.env, log_file=self.folder / f"worker-{len(self.started)}.log")
        self.started.append(process)
        return process

    def declare(self, queue: WorkQueue) -> Path:
        file = self.folder / "queue.yaml"
        file.write_text(yaml.safe_dump(queue.model_dump(mode="json", exclude_unset=True)))
        return file

    def records(self, event: str) -> list[tuple[int, int, int]]:
        """Return sequence, attempt and process id of each recorded event of a kind."""
        ledger = self.folder / "ledger"
        return [
            (sequence, attempt, process)
            for recorded, sequence, attempt, process in read_ledger(ledger)
            if recorded == event
        ]

    def release(self) -> None:
        (self.folder / "released").touch()


@pytest.fixture
def workers(nats: NatsServer, tmp_path: Path) -> Iterator[Workers]:
    running_workers = Workers(nats, tmp_path)
    yield running_workers
    for process in running_workers.started:
        process.kill()


async def wait_until_empty(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await until_stored(connection, queue.name, 0, within=30)


async def exit_status(process: Process, within: float) -> int | None:
    await eventually(lambda: not process.alive, within=within)
    return process.returncode


async def completions(connection: NatsPyConnection, queue: WorkQueue) -> Counter[int]:
    messages = await stream_messages(connection, f"{queue.name}-events", f"completed.{queue.name}.>")
    return Counter(json.loads(message.data)["stream_seq"] for message in messages)


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_job_whose_worker_is_killed_before_it_acknowledges_runs_again_and_is_completed_once(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 3}, jobs=["a"])
    first = workers.start(queue, "dies_before_its_acknowledgement")
    assert await exit_status(first, 20) == -signal.SIGKILL
    assert await completions(connection, queue) == {1: 1}
    assert await stored_count(connection, name) == 1
    second = workers.start(queue, "quick")
    await wait_until_empty(connection, queue)
    assert workers.records("done") == [(1, 1, first.pid), (1, 2, second.pid)]
    assert await completions(connection, queue) == {1: 1}


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_job_whose_worker_is_killed_between_its_copy_and_its_termination_is_one_dead_letter(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 5})
    await publish_jobs(connection, queue, ["a"], headers={"Job-Id": "order-1"})
    first = workers.start(queue, "dies_before_its_termination")
    assert await exit_status(first, 20) == -signal.SIGKILL
    assert await stored_count(connection, name) == 1
    ((death, job),) = await dead_letter_records(connection, queue)
    assert (death.sequence, death.deliveries, job.data) == (1, 1, b"a")
    second = workers.start(queue, "gives_up")
    await wait_until_empty(connection, queue)
    assert workers.records("given up") == [(1, 1, first.pid), (1, 2, second.pid)]
    records = await dead_letter_records(connection, queue)
    assert [(death.sequence, death.deliveries) for death, _ in records] == [(1, 1), (1, 2)]
    assert (
        len({(death.created, death.explanation, death.error_message, death.fingerprint) for death, _ in records}) == 1
    )
    assert len({(job.time, job.subject, job.headers, job.data) for _, job in records}) == 1
    # Two copies and one termination.
    assert await stored_count(connection, f"{name}-dead") == 3
    assert await completions(connection, queue) == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_stopped_worker_finishes_its_jobs_and_pulls_no_more(
    connection: NatsPyConnection, name: str, workers: Workers, number: signal.Signals
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3}, jobs=map(str, range(8)))
    worker = workers.start(queue, "gated", concurrency=5)
    await eventually(lambda: len(workers.records("start")) == 5, within=20)
    worker.signal(number)
    await eventually(lambda: "finishes 5 running jobs" in worker.output())
    workers.release()
    assert await exit_status(worker, 5) == 0
    assert sorted(workers.records("done")) == [(sequence, 1, worker.pid) for sequence in range(1, 6)]
    assert await completions(connection, queue) == dict.fromkeys(range(1, 6), 1)
    info = await consumer_info(connection, name, "worker")
    assert (info["num_ack_pending"], info["num_pending"], info["delivered"]["consumer_seq"]) == (0, 3, 5)


@pytest.mark.slow
async def test_fifty_jobs_in_flight_run_once_more_after_a_kill_and_not_after_a_graceful_stop(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s", "max_deliver": 3}, jobs=map(str, range(50)))
    killed = workers.start(queue, "gated", concurrency=50)
    await eventually(lambda: len(workers.records("start")) == 50, within=20)
    # Longer than the ack wait: the jobs stay in flight because the worker signals progress.
    await asyncio.sleep(3)
    assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 50
    killed.kill()
    stopped = workers.start(queue, "gated", concurrency=50)
    await eventually(lambda: len(workers.records("start")) == 100, within=20)
    assert Counter(sequence for sequence, _, _ in workers.records("start")) == dict.fromkeys(range(1, 51), 2)
    stopped.signal(signal.SIGTERM)
    await eventually(lambda: "finishes 50 running jobs" in stopped.output())
    workers.release()
    assert await exit_status(stopped, 10) == 0
    assert sorted(workers.records("done")) == [(sequence, 2, stopped.pid) for sequence in range(1, 51)]
    assert await completions(connection, queue) == dict.fromkeys(range(1, 51), 1)
    info = await consumer_info(connection, name, "worker")
    assert (info["num_ack_pending"], info["num_pending"], info["delivered"]["consumer_seq"]) == (0, 0, 100)


@pytest.mark.slow
async def test_no_job_is_lost_or_completed_twice_when_one_of_two_workers_is_killed_among_many(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 5}, jobs=map(str, range(200)))
    first, second = (workers.start(queue, "quick", concurrency=4) for _ in range(2))
    await eventually(lambda: any(pid == first.pid for _, _, pid in workers.records("done")), within=20)
    first.kill()
    await wait_until_empty(connection, queue)
    assert second.alive
    assert {sequence for sequence, _, _ in workers.records("done")} == set(range(1, 201))
    assert await completions(connection, queue) == dict.fromkeys(range(1, 201), 1)
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_a_handler_that_hangs_does_not_keep_its_worker_beyond_the_grace_time(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 3}, jobs=["a"])
    worker = workers.run(queue, "gated", "--grace", "0.5")
    await eventually(lambda: workers.records("start"), within=20)
    worker.signal(signal.SIGTERM)
    assert await exit_status(worker, 10) == 0
    workers.start(queue, "quick")
    await wait_until_empty(connection, queue)
    assert await completions(connection, queue) == {1: 1}


@pytest.mark.slow
async def test_a_worker_whose_handlers_hang_ends_with_status_three_so_that_another_process_takes_over(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1}, jobs=map(str, range(12)))
    worker = workers.run(queue, "gated", "--deadline", "100ms", "--concurrency", "4")
    assert await exit_status(worker, 20) == 3
    assert "jetstream-worker: expected at most 10 handlers to go on past their deadline, found" in worker.output()
    assert "Traceback" not in worker.output()


@pytest.mark.slow
async def test_the_end_of_each_job_is_one_line_of_json(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2})
    await publish_jobs(connection, queue, ["a", "b"], headers={"Job-Id": "größe 7"})
    worker = workers.run(queue, "given_up_or_failed", "--log-format", "json", "--id", "3", "--processes")
    await eventually(lambda: worker.output().count("job ended") == 3, within=20)
    worker.signal(signal.SIGTERM)
    assert await exit_status(worker, 10) == 0
    lines = [json.loads(line) for line in worker.output().splitlines()]
    ends = {(line["sequence"], line["attempt"]): line for line in lines if line["message"].startswith("job ended")}
    assert {key: (line["outcome"], line["level"], line.get("error")) for key, line in ends.items()} == {
        (1, 1): ("given_up", "WARNING", "GiveUpError"),
        (2, 1): ("retried", "WARNING", "ValueError"),
        (2, 2): ("completed", "INFO", None),
    }
    for line in ends.values():
        assert (line["worker"], line["stream"], line["consumer"], line["job_id"]) == ("3", name, "worker", "größe 7")
        assert 0 < line["seconds"] < 30
    assert "no paper" in ends[2, 1]["exception"]
    # The log lines of the handler in its own process.
    assert [line["message"] for line in lines if line["logger"] == "shop"] == ["working on größe 7"] * 3


@pytest.mark.slow
async def test_the_processes_of_a_killed_worker_end_by_themselves(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2}, jobs=["a"])
    worker = workers.run(queue, "quick", "--processes")
    await wait_until_empty(connection, queue)
    assert len(worker.pids()) >= 2
    assert [process for _, _, process in workers.records("done")] != [worker.pid]
    worker.signal(signal.SIGKILL)
    await eventually(lambda: not worker.pids())


@pytest.mark.slow
async def test_metrics_are_served_for_prometheus(connection: NatsPyConnection, name: str, workers: Workers) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2}, jobs=map(str, range(3)))
    worker = workers.run(queue, "gated", "--metrics-port", "0", "--concurrency", "2", "--id", "3")
    await eventually(lambda: len(workers.records("start")) == 2, within=20)
    port = worker.output().partition("serves metrics on port ")[2].split()[0]
    labels = f'consumer="worker",stream="{name}",worker="3"'

    async def number(line: str) -> float:
        async with httpx.AsyncClient(timeout=5) as client:
            page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        samples = [sample for sample in page.splitlines() if sample.startswith(line)]
        return float(samples[0].split()[-1]) if samples else 0.0

    assert await number(f"jetstream_worker_running_jobs{{{labels}}}") == 2
    workers.release()
    await wait_until_empty(connection, queue)
    ended = f'jetstream_worker_jobs_total{{consumer="worker",outcome="completed",stream="{name}",worker="3"}}'

    async def counted() -> bool:
        return await number(ended) == 3

    await eventually(counted)
    assert await number(f"jetstream_worker_job_seconds_count{{{labels}}}") == 3
    assert await number(f"jetstream_worker_abandoned_jobs{{{labels}}}") == 0


@pytest.mark.slow
async def test_a_worker_without_its_consumer_ends_with_status_two_and_says_why(
    connection: NatsPyConnection, name: str, workers: Workers
) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"CONSUMER.DELETE.{name}.worker")
    worker = workers.start(queue, "quick")
    assert await exit_status(worker, 20) == 2
    started = (
        f"jetstream-worker: expected consumer worker of stream {name} on the server, found none: provision the queue"
    )
    assert started in worker.output()
    assert "Traceback" not in worker.output()
