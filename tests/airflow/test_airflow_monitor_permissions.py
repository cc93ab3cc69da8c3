"""Who sees what on the page, and which requests it refuses: the application itself, under Airflow's authorization."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.models.connection import Connection
from airflow.models.dag import DagModel

from airflow_provider_jetstream.jetstream import Origin, connect, connection_settings
from testbed.dead_letters import make_terminated_letters, publish_raw, store_task, task_key
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.page import page_client, running_page
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx
    from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

CONNECTION = "nats_shown"
OTHER = "nats_of_a_team"
QUEUE = "shared"
_JSON = {"Content-Type": "application/json"}
_CLOSED = "closed"


class _PerDag(SimpleAuthManager):
    """One user doesn't see one DAG, and one team's members see the team's."""

    def is_authorized_dag(
        self, *, details: DagDetails | None = None, user: SimpleAuthManagerUser, **request: Any
    ) -> bool:
        if user.username == "stranger" and (details is None or details.id == _CLOSED):
            return False
        return super().is_authorized_dag(details=details, user=user, **request)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def page(server: NatsServer) -> AsyncIterator[None]:
    manager = _PerDag()  # type: ignore[no-untyped-call]
    async with running_page([CONNECTION, OTHER], server, auth_manager=manager):
        yield


async def scanned(client: httpx.AsyncClient, queue: str, query: str = "") -> dict[str, Any]:
    """Wait for the scan of a queue, and return its groups."""

    async def ready() -> dict[str, Any] | None:
        answer = await client.get(f"queues/{CONNECTION}/{queue}/groups?{query}")
        assert answer.status_code in (200, 503), answer.text
        return answer.json() if answer.status_code == 200 and answer.json()["scan"]["state"] == "ready" else None

    return dict(await eventually(ready, 60))


@pytest.mark.slow
@pytest.mark.usefixtures("page")
async def test_letters_of_a_dag_are_for_those_who_may_see_it(server: NatsServer) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, QUEUE, consumer={"ack_wait": "30s"})
        created = (await stream_info(connection, QUEUE))["created"]
        for dag_id in ("open", _CLOSED):
            origin = Origin(dag_id, "r", "t")
            await store_task(connection, queue, origin, created=created, published=1)
            await publish_jobs(connection, queue, [f"secret of {dag_id}"], headers={"Airflow-Task": task_key(origin)})
        for message in await pull_jobs(connection, queue, 2):
            await message.term()
        await wait_for_entries(connection, queue, 2)
        await make_terminated_letters(connection, queue, ["of nobody"])
    path = f"queues/{CONNECTION}/{QUEUE}"
    async with page_client("stranger") as stranger, page_client("friend") as friend:
        everything = await scanned(friend, QUEUE, "group_by=dag_id")
        assert (everything["total"]["value"], everything["not_shown"]) == (3, 0)
        groups = await scanned(stranger, QUEUE, "group_by=dag_id")
        assert (groups["total"]["value"], groups["not_shown"]) == (2, 1)
        assert {group["key"]["dag_id"] for group in groups["groups"]} == {"open", None}
        letters = (await stranger.get(f"{path}/letters")).json()
        assert [letter["sequence"] for letter in letters["letters"]] == [1, 3]
        assert letters["matching"]["value"] == 2
        assert len((await friend.get(f"{path}/letters")).json()["letters"]) == 3
        for route in ("groups?", "letters?", "groups?parked=true&", "letters?error_class=x&"):
            answer = await stranger.get(f"{path}/{route}dag_id={_CLOSED}")
            assert (answer.status_code, answer.json()["detail"]["code"]) == (403, "forbidden")
            assert (await stranger.get(f"{path}/{route}dag_id=open")).status_code == 200
        hidden = await stranger.get(f"{path}/letters/2")
        assert hidden.status_code == 403
        assert "secret" not in hidden.text
        assert "secret of closed" in (await friend.get(f"{path}/letters/2")).text
        assert (await stranger.get(f"{path}/letters/1")).status_code == 200
        body = json.dumps({"select": {"dag_id": _CLOSED}})
        assert (await stranger.post(f"{path}/dry-run", content=body, headers=_JSON)).status_code == 403
        assert (await friend.post(f"{path}/dry-run", content=body, headers=_JSON)).json()["redriven"] == 1
        # What a patch changes shows bodies.
        for select, status in (({}, 403), ({"dag_id": _CLOSED}, 403), ({"dag_id": "open"}, 200)):
            patching = json.dumps({"select": select, "patch": '[{"op":"replace","path":"","value":1}]'})
            answer = await stranger.post(f"{path}/dry-run", content=patching, headers=_JSON)
            assert (answer.status_code, "secret" in answer.text) == (status, False)
            assert (await friend.post(f"{path}/dry-run", content=patching, headers=_JSON)).status_code == 200


@pytest.mark.slow
@pytest.mark.usefixtures("page")
async def test_the_newest_cause_in_the_list_is_of_a_dag_that_its_viewer_may_see(server: NatsServer) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, "causes", consumer={"ack_wait": "30s"})
        created = (await stream_info(connection, "causes"))["created"]
        for count, dag_id in enumerate(("open", _CLOSED), 1):
            origin = Origin(dag_id, "r", "t")
            await store_task(connection, queue, origin, created=created, published=1)
            await publish_jobs(connection, queue, ["a job"], headers={"Airflow-Task": task_key(origin)})
            for message in await pull_jobs(connection, queue, 1):
                await message.term()
            await wait_for_entries(connection, queue, count)

    async def newest(client: httpx.AsyncClient) -> str | None:
        async def listed() -> dict[str, Any] | None:
            snapshot = (await client.get(f"snapshot?connection={CONNECTION}")).json()
            (numbers,) = [found for found in snapshot["connections"][0]["queues"] if found["queue"] == "causes"]
            return numbers if numbers["newest"] and sum(numbers["deaths_of_hour"]) == 2 else None

        return str((await eventually(listed, 60))["newest"]["dag_id"])

    async with page_client("stranger") as stranger, page_client("friend") as friend:
        assert await newest(friend) == _CLOSED
        assert await newest(stranger) == "open"
        assert _CLOSED not in (await stranger.get(f"snapshot?connection={CONNECTION}")).text


@pytest.mark.slow
@pytest.mark.usefixtures("page")
async def test_a_letter_whose_task_is_not_known_is_for_those_who_may_see_every_dag(server: NatsServer) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, "unknown", consumer={"ack_wait": "30s"})
        origin = Origin(_CLOSED, "r", "t")
        # As a publisher of the queue may do who wants to read other DAGs' jobs.
        await store_task(connection, queue, Origin("open", "r", "t"), created="x", published=1)
        record = json.dumps({"dag_id": "open"}).encode()
        await connection.client.jetstream().publish(f"published.unknown.{task_key(origin)}", record)
        headers = {"Airflow-Task": task_key(origin)}
        await publish_jobs(connection, queue, ["secret of closed"], headers=headers)
        for message in await pull_jobs(connection, queue, 1):
            await publish_raw(
                server,
                f"dead.unknown.{CONSUMER}.1",
                f"Dead-Letter-Version: 1\r\nDead-Letter-Sequence: 1\r\nAirflow-Task: {task_key(origin)}\r\n"
                "Dead-Letter-Reason: terminated\r\nDead-Letter-Error-Message: quotes the secret".encode(),
                b"secret of closed",
            )
            await message.term()
        await wait_for_entries(connection, queue, 2)
    async with page_client("stranger") as stranger, page_client("friend") as friend:
        for client, shown in ((stranger, False), (friend, True)):
            assert (await scanned(client, "unknown"))["total"]["value"] == 1
            for route in ("letters", "letters/1"):
                answer = await client.get(f"queues/{CONNECTION}/unknown/{route}")
                assert answer.status_code == 200, answer.text
                assert ("secret" in answer.text) is shown, (route, answer.text)


@pytest.mark.slow
@pytest.mark.usefixtures("page")
async def test_bodies_are_hidden_by_default_from_those_who_may_not_act(server: NatsServer) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, "bodies", consumer={"ack_wait": "30s"})
        await make_terminated_letters(connection, queue, ["the secret"], reason="quotes the secret")
    async with page_client("viewer", "viewer") as viewer, page_client("user") as user:
        await scanned(viewer, "bodies")
        assert (await viewer.get("me")).json()["payloads"] is False
        for client, shown in ((viewer, False), (user, True)):
            for route in ("letters", "letters/1"):
                answer = await client.get(f"queues/{CONNECTION}/bodies/{route}")
                assert answer.status_code == 200
                assert ("the secret" in answer.text) is shown


@pytest.mark.usefixtures("page")
async def test_a_connection_of_a_team_is_for_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    monkeypatch.setattr(Connection, "get_conn_id_to_team_name_mapping", lambda _: {OTHER: "sales"})
    monkeypatch.setattr(DagModel, "get_dag_id_to_team_name_mapping", lambda _: {"jetstream_redrive": "sales"})
    async with page_client("one", "op", ["sales"]) as member, page_client("two", "op", ["support"]) as stranger:
        for client, shown in ((member, [CONNECTION, OTHER]), (stranger, [CONNECTION])):
            me = (await client.get("me")).json()
            assert (me["connections"], me["may_act"]) == (shown, client is member)
            states = (await client.get("snapshot")).json()["connections"]
            assert [state["connection"] for state in states] == shown
        for path in (f"snapshot?connection={OTHER}", f"queues/{OTHER}/any", f"queues/{OTHER}/any/letters"):
            assert (await stranger.get(path)).status_code == 403, path
            assert (await member.get(path)).status_code in (200, 404, 503), path


@pytest.mark.usefixtures("page")
async def test_bytes_that_are_not_text_do_not_end_a_page(server: NatsServer) -> None:
    odd = b"\xff\xfe"
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, "odd", consumer={"ack_wait": "30s"})
        created = (await stream_info(connection, "odd"))["created"]
        names = ("Nats-Msg-Id", "X-Odd", "Airflow-Dag-Id", "Airflow-Run-Id", "Airflow-Task-Id")
        lines = [*(f"{name}: x".encode() + odd for name in names), b"Airflow-Map-Index: 0"]
        await publish_raw(server, "odd.jobs.\udcff", b"\r\n".join(lines), b"body")
        (message,) = await pull_jobs(connection, queue, 1)
        texts = ("Error-Class", "Error-Message", "Error-Place", "Explanation", "Fingerprint", "Traceback-Digest")
        head = [
            *lines[1:],
            b"Dead-Letter-Version: 1",
            b"Dead-Letter-Stream: odd",
            b"Dead-Letter-Stream-Created: " + created.encode(),
            b"Dead-Letter-Sequence: 1",
            b"Dead-Letter-Subject: odd.jobs." + odd[:1],
            b"Dead-Letter-Reason: terminated",
            b"Dead-Letter-Time: 2026-01-01T00:00:00Z",
            *(f"Dead-Letter-{name}: ".encode() + b"app.Busy" + odd for name in texts),
        ]
        await publish_raw(server, f"dead.odd.{CONSUMER}", b"\r\n".join(head), b"body")
        await message.respond(b"+TERM a reason " + odd)
        await wait_for_entries(connection, queue, 2)
    async with page_client("user") as user:
        # The sampler may have scanned the queue before there was a letter: until the next scan that one is shown.
        async def is_found() -> bool:
            return bool((await scanned(user, "odd"))["total"]["value"])

        await eventually(is_found)
        for field in ("error_class", "error_place", "subject", "dag_id", "run_id", "task_id"):
            groups = await scanned(user, "odd", f"group_by={field}")
            assert groups["groups"][0]["key"][field][-1] == "\ufffd"
        (letter,) = (await user.get(f"queues/{CONNECTION}/odd/letters")).json()["letters"]
        assert letter["error_class"] == "app.Busy\ufffd\ufffd"
        assert letter["subject"] == "odd.jobs.\ufffd"
        assert letter["origin"]["dag_id"] == "x\ufffd\ufffd"
        detail = await user.get(f"queues/{CONNECTION}/odd/letters/1")
        assert detail.status_code == 200
        assert detail.json()["letter"] == letter


@pytest.mark.slow
@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("../static/%00.js", {404}),
        ("../static/" + "x" * 5_000 + ".js", {404}),
        ("../static/" + "a/" * 2_500, {404}),
        ("../static/app/../../app.py", {404}),
        ("../static/assets.json", {200}),
        (f"queues/{'c' * 5_000}/q/letters", {404}),
        (f"queues/{CONNECTION}/{'q' * 5_000}/letters?subject=%ff&error_class=%00%ff", {404, 503}),
        (f"queues/{CONNECTION}/%00/letters/1", {404, 503}),
        (f"queues/{CONNECTION}/q/letters/{10**19}", {422}),
        (f"queues/{CONNECTION}/q/letters/{'9' * 5_000}", {422}),
        (f"queues/{CONNECTION}/q/letters/-1", {422}),
        (f"queues/{CONNECTION}/q/letters?after={'9' * 30}", {404, 422, 503}),
        (f"queues/{CONNECTION}/q/groups?group_by=%ff", {404, 422, 503}),
        ("jobs?dag_id=d&run_id=r&map_index=99999999999999999999999", {422}),
        ("jobs?dag_id=d&run_id=%00", {422}),
        (f"jobs?dag_id=d&run_id={'r' * 5_000}", {422}),
    ],
)
async def test_an_odd_request_is_answered(path: str, statuses: set[int]) -> None:
    async with page_client("user") as user:
        answer = await user.get(path, headers={b"X-Odd": b"\xff\xfe", b"User-Agent": b"\xff"})
        assert answer.status_code in statuses, answer.text


@pytest.mark.slow
@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    "body",
    [
        {"select": {"older_than": "9" * 20 + "s"}},
        {"select": {"older_than": int("9" * 20)}},
        {"select": {"younger_than": "9" * 20 + "w"}},
        {"select": {"older_than": "1e400"}},
        {"select": {"sequences": [10**30]}},
        {"select": {"sequences": [-1, 0]}},
        {"select": {"subject": "x" * 10_000}},
        {"select": {"error_class": "\ud800"}},
        {"select": []},
        [],
    ],
)
async def test_an_odd_body_is_answered(server: NatsServer, body: Any) -> None:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, "counted", consumer={"ack_wait": "30s"})
        if (await stream_info(connection, "counted"))["state"]["messages"] == 0:
            await make_terminated_letters(connection, queue, ["x"])
    async with page_client("user") as user:
        path = f"queues/{CONNECTION}/counted/dry-run"
        answer = await user.post(path, content=json.dumps(body).encode(), headers=_JSON)
        assert answer.status_code in (200, 404, 422), answer.text


@pytest.mark.slow
@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    ("headers", "base_url", "status"),
    [
        # A browser, without a proxy, behind one that ends TLS, and behind one that also changes Host.
        ({"Host": "airflow:8080", "Origin": "http://airflow:8080"}, "", 200),
        ({"Host": "airflow.example", "Origin": "https://airflow.example"}, "", 200),
        ({"Host": "airflow.example:443", "Origin": "https://airflow.example"}, "", 200),
        ({"Host": "[::1]:8080", "Origin": "http://[::1]:8080"}, "", 200),
        ({"Host": "internal:8080", "Origin": "https://airflow.example", "Sec-Fetch-Site": "same-origin"}, "", 200),
        ({"Host": "internal:8080", "Origin": "https://airflow.example"}, "https://airflow.example/path", 200),
        ({"Host": "internal:8080", "Origin": "https://airflow.example"}, "", 403),
        # A script.
        ({"Host": "airflow.example"}, "", 200),
        # Another page, a sandboxed or a local one.
        ({"Host": "airflow.example", "Origin": "https://elsewhere.example"}, "", 403),
        ({"Host": "airflow.example", "Origin": "https://airflow.example.elsewhere.example"}, "", 403),
        ({"Host": "airflow.example", "Origin": "https://airflow.example@elsewhere.example"}, "", 403),
        ({"Host": "airflow.example", "Origin": "https://airflow.example:8443"}, "", 403),
        ({"Host": "airflow.example", "Origin": "null"}, "", 403),
        ({"Host": "airflow.example", "Origin": ""}, "", 403),
        ({"Host": "airflow.example", "Origin": "file://"}, "", 403),
        ({"Host": "airflow.example", "Origin": "chrome-extension://airflow.example"}, "", 403),
        ({"Host": "airflow.example", "Origin": "http://[::"}, "", 403),
        ({"Host": "", "Origin": "null"}, "", 403),
        ({"Host": "airflow.example", "Origin": "null", "Sec-Fetch-Site": "same-origin"}, "", 403),
        ({"Host": "airflow.example", "Origin": "https://airflow.example", "Sec-Fetch-Site": "cross-site"}, "", 403),
        ({"Host": "airflow.example", "Sec-Fetch-Site": "same-site"}, "", 403),
    ],
)
async def test_only_the_page_itself_may_act(
    headers: dict[str, str], base_url: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base_url)
    async with page_client("user") as user:
        # The connection isn't shown, which is found only after the origin.
        answer = await user.post("queues/other/q/dry-run", content=b"{}", headers=_JSON | headers)
        assert answer.status_code == {200: 404}.get(status, status), answer.text
