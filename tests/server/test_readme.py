"""The code of the README and of docs runs as it stands there; tests/unit has parsed and resolved all of it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_provider_jetstream.command.program import command_parser
from airflow_provider_jetstream.dev import guide
from airflow_provider_jetstream.dev.example_load import DAG_ID
from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    RedriveRequest,
    WorkQueue,
    connect,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.code_blocks import FIRST_STEPS, ROOT, code_blocks, write_readme_queue
from testbed.queues import eventually, make_queue, process_all, running_worker
from testbed.terminal import terminal_env

if TYPE_CHECKING:
    from airflow.sdk import DAG

    from testbed.code_blocks import CodeBlock
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

QUEUE = {
    "name": "orders",
    "subjects": ["orders.>"],
    "dead_letters": "orders-dead",
    "events": "orders-events",
    "consumers": [
        {"name": "sender", "filter_subject": "orders.new", "max_deliver": 2, "ack_wait": "30s"},
        {"name": "high", "filter_subject": "orders.high", "max_deliver": 2, "ack_wait": "30s"},
        {"name": "low", "filter_subject": "orders.low", "max_deliver": 2, "ack_wait": "30s"},
    ],
}
BULK = {
    "name": "bulk",
    "subjects": ["bulk.>"],
    "dead_letters": "bulk-dead",
    "events": "bulk-events",
    "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}],
}
# Queues that pages name by their files alone.
NAMED: list[dict[str, Any]] = [
    {
        "name": name,
        "subjects": subjects,
        "dead_letters": f"{name}-dead",
        "events": f"{name}-events",
        "consumers": [{"name": "worker", "max_deliver": 2}],
    }
    for name, subjects in {"bills": ["bills.>"], "emails": ["emails.>"], "images": ["images.>", "IMAGES.>"]}.items()
]


def _needs_spark(block: CodeBlock) -> bool:
    """Return whether a block uses a Spark session, or what one made; tests/spark makes the same calls."""
    return block.page == "docs/spark.md" or any(
        isinstance(node, ast.Name) and node.id == "spark" for node in ast.walk(ast.parse(block.code))
    )


RUNNABLE = [block for block in code_blocks("python") if not _needs_spark(block)]
# The tutorial's files belong together: tests/ui runs it as one lesson.
PAGES = sorted({block.page for block in RUNNABLE} - {"README.md", FIRST_STEPS, "docs/tutorial.md"})


def _block_below(heading: str, page: str = FIRST_STEPS) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    start = text[: text.index(f"\n## {heading}\n")].count("\n") + 1
    return next(block.code for block in RUNNABLE if block.page == page and block.line > start)


def _commands(program: str) -> list[str]:
    """Return the lines of command blocks that run a program: the README's, then those of the first steps."""
    blocks = [block for page in ("README.md", FIRST_STEPS) for block in code_blocks("console") if block.page == page]
    lines = [line for block in blocks for line in block.code.splitlines()]
    return [line for line in lines if re.search(rf"(^| ){program}", line)]


async def _run(block: CodeBlock, names: dict[str, Any]) -> None:
    code = compile(block.numbered_code, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = FunctionType(code, names)()
    if inspect.isawaitable(result):
        await result


@pytest.fixture
def dag_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "docs").mkdir()
    for folder in (tmp_path, tmp_path / "docs"):
        write_readme_queue(folder)
    (tmp_path / "mailer.py").write_text(_block_below("A worker"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(_block_below("A DAG", "README.md"), "README.md", "exec"), names)
    return names


def test_the_dag_has_its_two_tasks_in_a_row(dag_block: dict[str, Any]) -> None:
    dag: DAG = dag_block["dag"]
    assert [task.task_id for task in dag.topological_sort()] == ["send", "retry_dead_letters"]
    assert all(task.deferrable and task.wait_for_completion for task in (dag_block["send"], dag_block["retry"]))
    assert len(_block_below("A DAG", "README.md").split("\n\n")[-1].splitlines()) <= 10


@pytest.mark.slow
async def test_the_dag_of_dead_letters_repairs_the_letters_it_selects(
    dag_block: dict[str, Any], connection: NatsPyConnection, name: str
) -> None:
    names: dict[str, Any] = {}
    exec(compile(_block_below("Dead letters"), FIRST_STEPS, "exec"), names)
    dag: DAG = names["dag"]
    assert [task.task_id for task in dag.topological_sort()] == ["found", "repair"]
    # Its fields may be templates too; these are none.
    operator: Any = dag.get_task("repair")
    queue = await make_queue(connection, name, dead=['{"to": "ADA@EXAMPLE.ORG"}'])
    request = RedriveRequest(transform=operator.transform, rate=operator.rate, max_redrives=operator.max_redrives)
    assert (await redrive_dead_letters(connection, queue, request)).redriven == {1: 2}
    assert await process_all(connection, queue) == {'{"to":"ada@example.org"}': 1}


@pytest.mark.slow
async def test_the_commands_in_their_order_create_the_queue_and_do_the_jobs_of_the_dag(
    dag_block: dict[str, Any], own_nats: NatsServer, tmp_path: Path
) -> None:
    env = terminal_env(own_nats.url)
    (apply,), (work,) = _commands("jetstream-queue queue"), _commands("jetstream-worker")

    def command(line: str) -> list[str]:
        return ["bash", "-c", f"exec env {line.replace('nats://127.0.0.1:4222', own_nats.url)}"]

    applied = Process.start(command(apply), env=env, log_file=tmp_path / "apply.log", cwd=tmp_path)
    await eventually(lambda: not applied.alive, 30)
    assert applied.returncode == 0, applied.output()
    worker = Process.start(command(work), env=env, log_file=tmp_path / "worker.log", cwd=tmp_path)
    queue = WorkQueue.load(tmp_path / "emails.yaml")
    try:
        async with connect(ConnectionSettings(servers=(own_nats.url,))) as connection:
            task = dag_block["send"]
            cursor = await take_cursor(connection, queue)
            report = await publish(connection, queue, list(task.jobs), subject=task.subject)
            async with asyncio.timeout(30):
                ended = await wait(connection, cursor, report.sequences)
    finally:
        worker.terminate()
    assert len(ended.completed) == 2
    assert "to ada@example.org, attempt 1" in worker.output()


def test_the_command_that_shows_everything_prints_what_the_readme_says() -> None:
    assert _commands("jetstream-queue dev$") == ["jetstream-queue dev"]
    shown = next(block.code for block in code_blocks("text") if block.page == "README.md")
    ports = vars(command_parser().parse_args(["dev"]))
    airflow_url, nats_url = f"http://127.0.0.1:{ports['port']}", f"nats://127.0.0.1:{ports['nats_port']}"
    folder = re.search(r"/tmp/jetstream-dev-\w+", shown)
    assert folder
    addresses = guide.addresses(airflow_url, nats_url)
    steps = guide.next_steps(airflow_url, nats_url, DAG_ID, Path(folder[0]))
    assert re.sub(r", \d+ s after", ", 14 s after", shown) == (
        f"{addresses}\nThe page answers, 14 s after the start.\n{steps}\n"
    )


@pytest.mark.slow
def test_the_session_without_airflow_prints_what_it_did(nats: NatsServer) -> None:
    program = _block_below("Without Airflow").replace("nats://127.0.0.1:4222", nats.url)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "orders_stream/processor" in done.stdout
    assert "0 dead letters" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
async def test_the_code_of_a_page_runs(
    page: str, own_nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queues").mkdir()
    (tmp_path / "example_dags").symlink_to(ROOT / "example_dags")
    shutil.copy(ROOT / "example_dags" / "queues" / "tasks.yaml", tmp_path / "queues")
    declarations = {"queue.yaml": QUEUE, "bulk.yaml": BULK, "queues/orders.yaml": QUEUE}
    for file, declared in (declarations | {f"queues/{queue['name']}.yaml": queue for queue in NAMED}).items():
        (tmp_path / file).write_text(yaml.safe_dump(declared))
    monkeypatch.setenv("NATS_URL", own_nats.url)
    monkeypatch.chdir(tmp_path)
    # A worker that runs until a signal arrives is stopped at once.
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_signal_handler", lambda _, stop: loop.call_later(0.1, stop))
    queue = WorkQueue(**QUEUE)
    settings = ConnectionSettings(servers=(own_nats.url,))

    async def process(job: Delivery) -> None:
        """Do the jobs that a page publishes and waits for."""

    async with asyncio.timeout(30), connect(settings) as connection:
        await provision(connection, queue)
        async with running_worker(Worker(queue, "sender", process, settings)):
            names: dict[str, Any] = {"connection": connection, "queue": queue, "__name__": page}
            for block in RUNNABLE:
                if block.page == page:
                    await _run(block, names)
