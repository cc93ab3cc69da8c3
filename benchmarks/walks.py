"""The walks of ``docs/architecture.md``, traced: modules that an operation enters, and moves between them.

A move is counted whenever a function of this package starts or resumes in another module than the one before. All walks
run twice, on new servers; the second run counts, so that imports don't. The counts need no quiet machine; those of the
page vary by a few, since its server poller works in a thread of its own.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import airflow_provider_jetstream
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Selection,
    WorkQueue,
    connect,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
from airflow_provider_jetstream.plugins.monitor.service import MonitorService
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, make_queue
from testbed.text_table import text_table

CONNECTION = "nats_walks"
_PACKAGE = str(Path(airflow_provider_jetstream.__file__).parent)
_TOOL = 3
# Python 3.12 has it; the package itself supports 3.11, for which types are checked.
monitoring: Any = vars(sys)["monitoring"]


@dataclass
class Walk:
    """What an operation passed through.

    :param modules: the files that it entered
    :param moves: how often it went from one to another
    """

    modules: set[str] = field(default_factory=set)
    moves: int = 0
    current: str = ""

    def enter(self, code: CodeType, _: int) -> object:
        """Count a start or a continuation of a function."""
        if not code.co_filename.startswith(_PACKAGE):
            return monitoring.DISABLE
        self.modules.add(code.co_filename)
        self.moves += code.co_filename != self.current
        self.current = code.co_filename
        return None


@contextmanager
def traced() -> Iterator[Walk]:
    """Trace the package until the block ends."""
    walk, events = Walk(), monitoring.events
    monitoring.use_tool_id(_TOOL, "walks")
    for event in (events.PY_START, events.PY_RESUME):
        monitoring.register_callback(_TOOL, event, walk.enter)
    monitoring.set_events(_TOOL, events.PY_START | events.PY_RESUME)
    try:
        yield walk
    finally:
        monitoring.set_events(_TOOL, 0)
        monitoring.free_tool_id(_TOOL)


def main() -> int:
    """Trace the walks and print what they pass through."""
    for _ in range(2):
        with _server() as (_, queue):
            rows = [_publish(queue)]
        with _server() as (nats, queue):
            rows += asyncio.run(_letters(nats, queue))
    print(text_table(("walk", "modules", "moves"), rows))
    return 0


@contextmanager
def _server() -> Iterator[tuple[NatsServer, WorkQueue]]:
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder) / "nats") as nats:
        os.environ[f"AIRFLOW_CONN_{CONNECTION.upper()}"] = json.dumps(
            {"conn_type": "nats", "host": "127.0.0.1", "port": nats.port}
        )
        yield nats, asyncio.run(_provision(nats))


async def _provision(nats: NatsServer) -> WorkQueue:
    async with connect(ConnectionSettings(servers=(nats.url,))) as connection:
        return await make_queue(connection, "walks")


def _publish(queue: WorkQueue) -> tuple[object, ...]:
    instance = SimpleNamespace(
        dag_id="walks", task_id="publish", run_id="run", map_index=-1, try_number=1, xcom_push=lambda **_: None
    )
    context: Any = {"ti": instance, "task_instance": instance, "dag_run": instance, "run_id": "run"}
    operator = JetStreamPublishOperator(
        task_id="publish",
        work_queue=queue,
        subject=queue.subjects[0].replace(">", "walk"),
        jobs=["job"],
        nats_conn_id=CONNECTION,
    )
    with traced() as walk:
        operator.execute(context)
    return "publish one job (operator)", len(walk.modules), walk.moves


async def _letters(nats: NatsServer, queue: WorkQueue) -> list[tuple[object, ...]]:
    async with connect(ConnectionSettings(servers=(nats.url,))) as connection:
        await make_dead_letters(connection, queue, ["a", "b"])
        with traced() as found:
            await find_dead_letters(connection, queue)
        service = MonitorService(MonitorSettings((CONNECTION,), 5, "all", 1_000, "jetstream_redrive"))
        with traced() as page:
            await service.letters.page(CONNECTION, queue.name, LetterQuery(Selection()), Hiding())
        service.stop()
        with traced() as redriven:
            await redrive_dead_letters(connection, queue)
    return [
        ("find two dead letters", len(found.modules), found.moves),
        ("a page of two dead letters", len(page.modules), page.moves),
        ("redrive two dead letters", len(redriven.modules), redriven.moves),
    ]


if __name__ == "__main__":
    sys.exit(main())
