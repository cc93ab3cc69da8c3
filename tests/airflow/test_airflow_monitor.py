"""The monitor in a real Airflow: authorization, data, and actions."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import pytest
from airflow_steps import provisioned, wait_for, wait_for_states
from dags.monitored import MONITORED

from airflow_provider_jetstream.jetstream import ConnectionSettings, connect, connection_settings
from testbed.airflow_client import AirflowClient
from testbed.dead_letters import make_terminated_letters
from testbed.queues import make_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.airflow import Airflow
    from testbed.nats_server import NatsServer

SCRIPT = "<script>alert(1)</script>"
QUEUE = "fleet"
LETTERS = 12


@pytest.fixture(scope="module")
def fleet(fleet_nats: NatsServer) -> ConnectionSettings:
    """A queue with dead letters, and one made by hand."""
    settings = connection_settings({"servers": (fleet_nats.url,), "timeout": 5})

    async def fill() -> None:
        async with connect(settings) as connection:
            queue = await make_queue(connection, QUEUE)
            bodies = [json.dumps({"number": number, "text": SCRIPT}) for number in range(LETTERS - 1)]
            await make_terminated_letters(connection, queue, [*bodies, SCRIPT], reason="no such customer")
            by_hand = {"name": "by_hand", "subjects": ["by_hand"], "retention": "workqueue", "max_msgs": 10}
            await connection.api("STREAM.CREATE.by_hand", by_hand)
            for _ in range(9):
                await connection.client.jetstream().publish("by_hand", b"job")

    asyncio.run(fill())
    return settings


@pytest.fixture(scope="module")
def viewer(airflow: Airflow) -> Iterator[AirflowClient]:
    client = AirflowClient(airflow.url, "viewer", "viewer")
    yield client
    client.close()


def get(client: AirflowClient, path: str) -> Any:
    """Request data from the monitor, which must answer."""
    answer = client.request("GET", f"/jetstream/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def queue_of(client: AirflowClient, connection: str, queue: str) -> dict[str, Any] | None:
    """Return a queue's numbers from the snapshot."""
    (state,) = get(client, f"api/snapshot?connection={connection}")["connections"]
    return next((numbers for numbers in state["queues"] if numbers["queue"] == queue), None)


def test_the_cookie_of_a_browser_is_a_session(airflow: Airflow) -> None:
    with httpx.Client(trust_env=False, cookies={"_token": airflow.token()}) as browser:
        answer = browser.get(f"{airflow.url}/jetstream/api/me")
        assert answer.status_code == 200, answer.text
        # The page also uses it to trigger the DAG.
        airflow.wait_for_dags("jetstream_redrive")
        assert browser.get(f"{airflow.url}/api/v2/dags/jetstream_redrive").status_code == 200


def test_answers_have_restrictive_headers(airflow: Airflow) -> None:
    page = airflow.request("GET", "/jetstream/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    data = airflow.request("GET", "/jetstream/api/me")
    assert data.headers["content-type"] == "application/json"
    assert data.headers["cache-control"] == "no-store"
    for answer in (page, data):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "vendor", "missing.js"):
        assert airflow.request("GET", f"/jetstream/static/{path}").status_code == 404, path


def test_the_plugin_is_loaded_without_an_error(airflow: Airflow) -> None:
    assert airflow.api("GET", "plugins/importErrors")["import_errors"] == []
    plugins = {plugin["name"]: plugin for plugin in airflow.api("GET", "plugins")["plugins"]}
    plugin = plugins["jetstream_monitor"]
    assert [app["url_prefix"] for app in plugin["fastapi_apps"]] == ["/jetstream"]
    # Before 3.2, Airflow has no tabs for a plugin's own components on DAGs and tasks, only frames.
    has_tabs = tuple(map(int, version("apache-airflow").split(".")[:2])) >= (3, 2)
    frames = set() if has_tabs else {"dag_run", "task_instance"}
    assert {view["destination"] for view in plugin["external_views"]} == {"nav", *frames}
    assert not plugin["external_views"][0]["href"].startswith("/")
    apps = {app["destination"]: app for app in plugin["react_apps"]}
    assert apps.keys() == {"dashboard", *(["dag", "dag_run", "task_instance"] if has_tabs else [])}
    for app in apps.values():
        script = airflow.request("GET", app["bundle_url"])
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        assert f'"{app["name"]}"' in script.text


def test_hashed_files_are_kept_and_the_page_is_not(airflow: Airflow) -> None:
    page = airflow.request("GET", "/jetstream/")
    assert page.headers["cache-control"] == "no-cache"
    names = re.findall(r'(?:src|href)="(static/page-[^"]+)"', page.text)
    assert len(names) == 2
    for name in names:
        answer = airflow.request("GET", f"/jetstream/{name}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"


def test_the_jobs_of_a_task_are_found_while_it_waits(
    airflow: Airflow, viewer: AirflowClient, settings: ConnectionSettings
) -> None:
    airflow.wait_for_dags("monitored")
    asyncio.run(provisioned(settings, MONITORED))
    run_id = airflow.trigger("monitored", run_id="manual__2026-01-01T00:00:00+00:00")
    wait_for_states(airflow, "monitored", run_id, {"publish": "deferred"})
    query = httpx.QueryParams({"dag_id": "monitored", "run_id": run_id})
    wait_for(lambda: queue_of(airflow, "nats_default", "monitored"), "the queue in the snapshot")
    (line,) = get(viewer, f"api/jobs?{query}")["queues"]
    assert (line["connection"], line["queue"], line["task_id"]) == ("nats_default", "monitored", "publish")
    assert [line[name]["value"] for name in ("published", "ended", "stored", "letters")] == [10, 0, 10, 0]
    of_task = get(viewer, f"api/jobs?{query}&task_id=publish&map_index=-1")["queues"]
    assert [(found["queue"], found["select"], found["published"]) for found in of_task] == [
        ("monitored", line["select"], line["published"])
    ]

    def stored_links() -> dict[str, str] | None:
        # Airflow stores them once the task is deferred.
        path = f"dags/monitored/dagRuns/{quote(run_id)}/taskInstances/publish/links"
        found: dict[str, str] = airflow.api("GET", path)["extra_links"]
        return found if found["JetStream jobs"] else None

    links = wait_for(stored_links, "the operator's links")
    assert links.keys() == {"JetStream queue", "JetStream jobs", "JetStream dead letters", "JetStream job reports"}
    link = urlsplit(links["JetStream jobs"])
    assert link.path == "/plugin/jetstream"
    assert parse_qs(link.query)["run_id"] == [run_id]
    assert parse_qs(link.query)["queue"] == ["monitored"]
    # A failed task's own letters are one click away.
    of_letters = parse_qs(urlsplit(links["JetStream dead letters"]).query)
    assert (of_letters["view"], of_letters["run_id"], of_letters["task_id"]) == (["letters"], [run_id], ["publish"])
