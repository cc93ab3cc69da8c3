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
from airflow_steps import provisioned, succeeded, wait_for, wait_for_states
from dags.monitored import MONITORED

from airflow_provider_jetstream.jetstream import ConnectionSettings, connect, connection_settings
from testbed.airflow_client import AirflowClient
from testbed.dead_letters import make_terminated_letters
from testbed.page import make_app
from testbed.queues import make_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.airflow import Airflow
    from testbed.nats_server import NatsServer

SCRIPT = "<script>alert(1)</script>"
QUEUE = "fleet"
LETTERS = 12
# The status codes of a route for an authorized user.
AUTHORIZED = {200, 404, 409, 415, 422, 503}


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


def scanned(client: AirflowClient, queue: str, connection: str = "nats_fleet", query: str = "") -> dict[str, Any]:
    """Wait for a scan to end, and return its groups."""

    def ready() -> dict[str, Any] | None:
        result: dict[str, Any] = get(client, f"api/queues/{connection}/{queue}/groups?{query}")
        return result if result["scan"]["state"] == "ready" else None

    return wait_for(ready, f"a scan of {queue}", 30)


def every_route() -> list[tuple[str, str]]:
    """Return the methods and paths of all routes."""
    parameters = {"connection": "nats_fleet", "queue": QUEUE, "sequence": "1", "path:path": "index.html"}
    parameters |= {"name": "worker", "redrive": "none", "action": "pause"}
    routes = []
    for route in make_app().routes:
        path = str(getattr(route, "path", ""))
        for name, value in parameters.items():
            path = path.replace(f"{{{name}}}", value)
        routes += [(method, path) for method in getattr(route, "methods", None) or {"GET"}]
    return sorted(routes)


def test_every_route_requires_a_session(airflow: Airflow) -> None:
    routes = every_route()
    assert len(routes) >= 10
    for method, path in routes:
        answer = airflow.request(method, f"/jetstream{path}", anonymous=True)
        assert answer.status_code == 401, (method, path, answer.text)
        malformed = httpx.post(f"{airflow.url}/jetstream{path}", content=b"{", trust_env=False)
        assert malformed.status_code in (401, 405), (path, malformed.text)
    for path in ("docs", "redoc", "openapi.json"):
        assert airflow.request("GET", f"/jetstream/{path}").status_code == 404


@pytest.mark.usefixtures("fleet")
def test_a_viewer_may_read_and_may_not_act(airflow: Airflow, viewer: AirflowClient) -> None:
    for method, path in every_route():
        if method == "GET":
            query = "?dag_id=deaths&run_id=none" if path.endswith("/jobs") else ""
            # A viewer doesn't see bodies.
            expected = {403} if path.endswith("/body") else AUTHORIZED
            assert viewer.request(method, f"/jetstream{path}{query}").status_code in expected, path
        else:
            assert viewer.request(method, f"/jetstream{path}", {}).status_code == 403, path
    assert get(viewer, "api/me") | {"version": ""} == {
        "may_act": False,
        "payloads": False,
        "dag_id": "jetstream_redrive",
        "refresh_seconds": 1.0,
        "connections": ["nats_default", "nats_fleet", "nats_unreachable", "nats_wrong_password"],
        "version": "",
        "user": "viewer",
        "default_timezone": "utc",
    }
    assert get(airflow, "api/me")["may_act"] is True
    airflow.wait_for_dags("jetstream_redrive")
    answer = viewer.request("POST", "/api/v2/dags/jetstream_redrive/dagRuns", {"logical_date": None, "conf": {}})
    assert answer.status_code == 403


def test_the_cookie_of_a_browser_is_a_session(airflow: Airflow) -> None:
    with httpx.Client(trust_env=False, cookies={"_token": airflow.token()}) as browser:
        answer = browser.get(f"{airflow.url}/jetstream/api/me")
        assert answer.status_code == 200, answer.text
        # The page also uses it to trigger the DAG.
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


@pytest.mark.usefixtures("fleet")
def test_the_snapshot_has_every_queue_with_its_numbers(airflow: Airflow) -> None:
    by_hand = wait_for(lambda: queue_of(airflow, "nats_fleet", "by_hand"), "the queue made by hand")
    assert by_hand["declared"] is False
    assert by_hand["undeliverable"] == 9
    assert by_hand["limits"] == [{"name": "max_msgs", "used": 9.0, "limit": 10.0, "share": 0.9}]
    wait_for(lambda: (queue_of(airflow, "nats_fleet", QUEUE) or {}).get("letters"), "a scan in the background")
    numbers = queue_of(airflow, "nats_fleet", QUEUE) or {}
    assert (numbers["letters"]["certain"], numbers["letters"]["uncertain"]) == (LETTERS, 0)
    detail = get(airflow, f"api/queues/nats_fleet/{QUEUE}")
    assert [consumer["name"] for consumer in detail["consumers"]] == ["worker"]
    assert (detail["dead_letter_queue"], detail["audit"]) == (f"{QUEUE}-dead", f"{QUEUE}-audit")
    assert detail["history"]
    answer = airflow.request("GET", "/jetstream/api/queues/nats_fleet/by_hand/groups")
    assert (answer.status_code, answer.json()["detail"]["code"][:2]) == (409, "JS")


def test_the_snapshot_has_servers_that_are_away(airflow: Airflow) -> None:
    def all_known() -> dict[str, Any] | None:
        states = {state["connection"]: state for state in get(airflow, "api/snapshot")["connections"]}
        bad = [states[name]["state"] for name in ("nats_unreachable", "nats_wrong_password")]
        return states if bad == ["away", "refused"] and states["nats_default"]["state"] == "up" else None

    states = wait_for(all_known, "the states of all connections", 30)
    assert "check host, port and firewall" in states["nats_unreachable"]["problem"]["message"]
    assert "refused the credentials" in states["nats_wrong_password"]["problem"]["message"]
    answer = airflow.request("GET", "/jetstream/api/queues/nats_unreachable/any")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert airflow.request("GET", "/jetstream/api/queues/other/any").status_code == 404


@pytest.mark.usefixtures("fleet")
def test_a_letters_payload_is_data_and_hidden_from_viewers(airflow: Airflow, viewer: AirflowClient) -> None:
    groups = scanned(airflow, QUEUE)
    assert [group["count"] for group in groups["groups"]] == [LETTERS]
    page = get(airflow, f"api/queues/nats_fleet/{QUEUE}/letters?limit=5")
    assert (page["matching"], len(page["letters"]), page["next_after"]) == (LETTERS, 5, 5)
    last = airflow.request("GET", f"/jetstream/api/queues/nats_fleet/{QUEUE}/letters/{LETTERS}")
    assert last.headers["content-type"] == "application/json"
    letter = last.json()
    assert (letter["payload"]["kind"], letter["payload"]["text"]) == ("text", SCRIPT)
    assert letter["letter"]["error_message"] == "no such customer"
    hidden = get(viewer, f"api/queues/nats_fleet/{QUEUE}/letters/{LETTERS}")
    assert hidden["hidden"] is True
    assert SCRIPT not in json.dumps(hidden)
    assert "no such customer" not in json.dumps(hidden)
    gone = airflow.request("GET", f"/jetstream/api/queues/nats_fleet/{QUEUE}/letters/999")
    assert gone.status_code == 404
    for query in ("reasons=nonsense", "limit=0", "limit=1000", "after=-1", "subject=a..b"):
        assert airflow.request("GET", f"/jetstream/api/queues/nats_fleet/{QUEUE}/letters?{query}").status_code == 422


@pytest.mark.usefixtures("fleet")
def test_letters_are_counted_redriven_and_gone_from_the_page(airflow: Airflow) -> None:
    airflow.wait_for_dags("jetstream_redrive")
    before = scanned(airflow, QUEUE)["total"]
    select = {"sequences": [1, 2]}
    body = {"select": select, "action": "redrive"}
    counted = airflow.request("POST", f"/jetstream/api/queues/nats_fleet/{QUEUE}/dry-run", body).json()
    assert (counted["redriven"], counted["parked"], counted["failed"]) == (2, 0, 0)
    assert counted["conf"] == {"nats_conn_id": "nats_fleet", "queue": QUEUE, **body}
    assert scanned(airflow, QUEUE)["total"] == before
    dry_run = airflow.trigger("jetstream_redrive", counted["conf"] | {"dry_run": True})
    succeeded(airflow, "jetstream_redrive", dry_run)
    assert airflow.xcom("jetstream_redrive", dry_run, "redrive")["dry_run"] is True
    redrive = airflow.trigger("jetstream_redrive", counted["conf"] | {"why": "the customer is back"})
    succeeded(airflow, "jetstream_redrive", redrive)
    assert airflow.xcom("jetstream_redrive", redrive, "redrive")["redriven"] == 2
    wait_for(lambda: scanned(airflow, QUEUE)["total"] == before - 2, "the letters to be gone from the page", 30)
    letter = get(airflow, f"api/queues/nats_fleet/{QUEUE}/letters/1")
    assert (letter["state"], letter["payload"]) == ("redriven", None)
    assert letter["next"] > LETTERS
    audit = [(line["action"], line["why"], line["user"]) for line in letter["audit"]]
    assert audit == [("redriven", "the customer is back", "admin")]


@pytest.mark.usefixtures("fleet")
def test_letters_are_parked_and_the_page_names_the_task(airflow: Airflow) -> None:
    select = {"sequences": [3]}
    conf = {"nats_conn_id": "nats_fleet", "queue": QUEUE, "select": select, "action": "park", "why": "no order"}
    succeeded(airflow, "jetstream_redrive", airflow.trigger("jetstream_redrive", conf))
    wait_for(lambda: scanned(airflow, QUEUE, query="parked=true")["total"] == 1, "the letter to be parked", 30)
    letter = get(airflow, f"api/queues/nats_fleet/{QUEUE}/letters/3")
    assert letter["letter"]["parked"] == "no order"
    assert [(line["action"], line["who"]["dag_id"]) for line in letter["audit"]] == [("parked", "jetstream_redrive")]


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
    assert (line["published"], line["ended"], line["stored"], line["letters"]) == (10, 0, 10, 0)
    of_task = get(viewer, f"api/jobs?{query}&task_id=publish&map_index=-1")["queues"]
    assert of_task == [line]
    links = airflow.api("GET", f"dags/monitored/dagRuns/{quote(run_id)}/taskInstances/publish/links")["extra_links"]
    assert links.keys() == {"JetStream queue", "JetStream jobs", "JetStream dead letters", "JetStream job reports"}
    link = urlsplit(links["JetStream jobs"])
    assert link.path == "/plugin/jetstream"
    assert parse_qs(link.query)["run_id"] == [run_id]
    assert parse_qs(link.query)["queue"] == ["monitored"]
