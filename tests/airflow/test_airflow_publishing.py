"""Jobs and queues in every form, and their templates."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from airflow_steps import log_text, succeeded, wait_for

from airflow_provider_jetstream.dev.airflow_home import database_path
from testbed.dead_letters import stream_messages
from testbed.face import stream_info

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection
    from testbed.airflow import Airflow


@pytest.fixture(scope="module")
def run_id(airflow: Airflow) -> str:
    dags = ("publish_forms", "templated", "as_dict")
    airflow.wait_for_dags(*dags)
    for dag_id in dags:
        airflow.trigger(dag_id, run_id="run.1")
    for dag_id in dags:
        succeeded(airflow, dag_id, "run.1")
    return "run.1"


@pytest.mark.parametrize(
    ("task_id", "bodies"),
    [
        ("as_list", [b"text", b"\xff\x00", b'{"json":[1,null]}', b"7"]),
        ("as_iterator", [b"generated-0", b"generated-1", b"generated-2"]),
        ("as_callable", [b"plain-0", b"plain-1"]),
        ("as_callable_with_context", [b"as_callable_with_context in run.1 with red"]),
        (
            "as_upstream",
            [f'{{"id":"image-{number}","advisory":"images.done","size":{number}}}'.encode() for number in range(2)],
        ),
        ("as_nothing", []),
    ],
)
async def test_jobs_of_every_form_are_stored(
    airflow: Airflow, connection: Connection, run_id: str, task_id: str, bodies: list[bytes]
) -> None:
    messages = await stream_messages(connection, "forms", f"forms.{task_id}")
    assert [message.data for message in messages] == bodies
    result = airflow.xcom("publish_forms", run_id, task_id)
    assert (result["published"], result["duplicates"]) == (len(bodies), 0)
    assert [n for low, high in result["sequences"] for n in range(low, high + 1)] == [m.sequence for m in messages]


async def test_a_queue_may_be_a_dict_with_templates(airflow: Airflow, connection: Connection, run_id: str) -> None:
    assert "create stream as_as_dict" in airflow.xcom("as_dict", run_id, "provision")
    assert (await stream_info(connection, "as_as_dict"))["state"]["messages"] == 1
    assert "doesn't capture" not in log_text(airflow, "as_dict", run_id, "provision")


def test_the_serialized_dag_is_the_same_at_every_parse(airflow: Airflow, run_id: str) -> None:
    before = airflow.api("GET", "dags/publish_forms")
    airflow.api("PUT", f"parseDagFile/{quote(before['file_token'])}")
    wait_for(
        lambda: airflow.api("GET", "dags/publish_forms")["last_parsed_time"] != before["last_parsed_time"], "a parse"
    )
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT data FROM serialized_dag WHERE dag_id = 'publish_forms'").fetchall()
    assert len(rows) == 1
    # The memory address of a generator differs from parse to parse: each would make a new version of the DAG.
    assert "as_iterator" in rows[0][0]
    assert " at 0x" not in rows[0][0]
    assert airflow.api("GET", "dags/publish_forms/dagVersions")["total_entries"] == 1
