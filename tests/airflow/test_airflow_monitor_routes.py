"""One rule for every route of the page: a table of routes and viewers, in which each route has to have a row.

The queue has letters, jobs and redrives of two DAGs, of a task that isn't known, and of nobody. Nothing that a user is
answered may hold a word of the DAG that the user may not see; numbers that count all of it may be.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from fastapi.routing import APIRoute

from airflow_provider_jetstream.jetstream import (
    Origin,
    RedriveRequest,
    Repair,
    Selection,
    connect,
    connection_settings,
    list_redrives,
    redrive_dead_letters,
)
from testbed.dead_letters import publish_raw, store_task, task_key
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.page import page_app, page_client, running_page
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import httpx
    from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

CONNECTION, QUEUE = "nats_routes", "routes"
CLOSED = "closed_dag"
# Words of the DAG that one user may not see: its id, its run, what its jobs hold, why it redrove them.
WORDS = (CLOSED, "acme_run", "acme body", "ticket 4711", "acme.Refused", "acme@person")
_OPEN = "open_dag"
_BODY = b"acme body of a letter"


class _PerDag(SimpleAuthManager):
    """One user may see every DAG but one, and so not those that aren't known."""

    def is_authorized_dag(
        self, *, details: DagDetails | None = None, user: SimpleAuthManagerUser, **request: Any
    ) -> bool:
        if user.username == "stranger" and (details is None or details.id == CLOSED):
            return False
        return super().is_authorized_dag(details=details, user=user, **request)


# Who asks, with the role in SimpleAuthManager; nobody has no session.
VIEWERS: Mapping[str, str | None] = {"friend": "user", "reader": "viewer", "stranger": "user", "nobody": None}
_SEEN = {"friend": 200, "reader": 200, "stranger": 200, "nobody": 401}
_OF_CLOSED = _SEEN | {"stranger": 403}
_ACTING = _SEEN | {"reader": 403}
_ACTING_ON_CLOSED = _ACTING | {"stranger": 403}
_BODIES_OF_CLOSED = _OF_CLOSED | {"reader": 403}
_Q = f"queues/{CONNECTION}/{QUEUE}"
_ASKED = ("retry", "give-up")
_EDIT = {"sha256": sha256(_BODY).hexdigest(), "body": "x", "dry_run": True}

# Of each route its requests: path, body of a POST, and the status for each viewer. {redrive} is one of the closed DAG.
ROUTES: Mapping[str, list[tuple[str, Any, Mapping[str, int]]]] = {
    "GET /": [("../", None, _SEEN)],
    "GET /static/{path:path}": [("../static/index.html", None, _SEEN)],
    "GET /api/me": [("me", None, _SEEN)],
    "GET /api/snapshot": [("snapshot", None, _SEEN), (f"snapshot?connection={CONNECTION}", None, _SEEN)],
    "GET /api/queues/{connection}/{queue}": [(_Q, None, _SEEN)],
    "GET /api/queues/{connection}/{queue}/history": [(f"{_Q}/history", None, _SEEN)],
    "GET /api/queues/{connection}/{queue}/groups": [
        (f"{_Q}/groups?group_by=dag_id&group_by=run_id&group_by=error_class&group_by=subject", None, _SEEN),
        (f"{_Q}/groups?dag_id={CLOSED}", None, _OF_CLOSED),
    ],
    "GET /api/queues/{connection}/{queue}/letters": [
        (f"{_Q}/letters", None, _SEEN),
        (f"{_Q}/letters?sequences=1,2,3,4", None, _SEEN),
        (f"{_Q}/letters?error_class=acme.Refused", None, _SEEN),
        (f"{_Q}/letters?dag_id={CLOSED}", None, _OF_CLOSED),
    ],
    "GET /api/queues/{connection}/{queue}/letters/{sequence}": [
        (f"{_Q}/letters/2", None, _OF_CLOSED),
        # The letter of the open DAG, which the closed one has tried to redrive; and those that are none any more.
        (f"{_Q}/letters/{{again}}", None, _SEEN),
        (f"{_Q}/letters/5", None, _SEEN | {"stranger": 404}),
        (f"{_Q}/letters/7", None, _SEEN | {"stranger": 404}),
    ],
    "GET /api/queues/{connection}/{queue}/letters/{sequence}/body": [(f"{_Q}/letters/2/body", None, _BODIES_OF_CLOSED)],
    "GET /api/queues/{connection}/{queue}/search": [(f"{_Q}/search?text={text}", None, _SEEN) for text in ("a", "4")],
    "GET /api/queues/{connection}/{queue}/diagnosis": [
        (f"{_Q}/diagnosis", None, _OF_CLOSED),
        (f"{_Q}/diagnosis?dag_id={CLOSED}", None, _OF_CLOSED),
        (f"{_Q}/diagnosis?dag_id={_OPEN}", None, _SEEN),
    ],
    "GET /api/queues/{connection}/{queue}/jobs": [
        (f"{_Q}/jobs?state={state}", None, _SEEN) for state in ("pending", "delivered", "unserved")
    ],
    "GET /api/queues/{connection}/{queue}/jobs/{sequence}": [
        (f"{_Q}/jobs/{{of_closed}}", None, _OF_CLOSED),
        (f"{_Q}/jobs/{{of_unknown}}", None, _OF_CLOSED),
        (f"{_Q}/jobs/{{of_open}}", None, _SEEN),
    ],
    "GET /api/queues/{connection}/{queue}/redrives": [
        (f"{_Q}/redrives", None, _SEEN),
        (f"{_Q}/redrives?dag_id={CLOSED}", None, _SEEN),
        (f"{_Q}/redrives?run_id=acme_run", None, _SEEN),
    ],
    "GET /api/queues/{connection}/{queue}/redrives/{redrive}": [
        (f"{_Q}/redrives/{{by_closed}}", None, _OF_CLOSED),
        (f"{_Q}/redrives/{{for_closed}}", None, _OF_CLOSED),
        (f"{_Q}/redrives/{{by_person}}", None, _OF_CLOSED),
        (f"{_Q}/redrives/{{by_open}}", None, _SEEN),
    ],
    "POST /api/queues/{connection}/{queue}/redrives/{redrive}/{action}": [
        # It is over: who may see it is told so.
        (f"{_Q}/redrives/{{by_closed}}/{action}", {}, _ACTING_ON_CLOSED | {"friend": 422})
        for action in ("pause", "resume", "abort")
    ],
    "POST /api/queues/{connection}/{queue}/consumers/{name}/pause": [
        (f"{_Q}/consumers/{CONSUMER}/pause", {"seconds": 1}, _ACTING)
    ],
    "POST /api/queues/{connection}/{queue}/consumers/{name}/resume": [
        (f"{_Q}/consumers/{CONSUMER}/resume", {}, _ACTING)
    ],
    "POST /api/queues/{connection}/{queue}/jobs/{sequence}/{action}": [
        # The queue stores no attempts: who may act on the job is told so.
        *((f"{_Q}/jobs/{{of_closed}}/{action}", {}, _ACTING_ON_CLOSED | {"friend": 409}) for action in _ASKED),
        *((f"{_Q}/jobs/{{of_open}}/{action}", {}, {**_ACTING, "friend": 409, "stranger": 409}) for action in _ASKED),
    ],
    "POST /api/queues/{connection}/{queue}/letters/{sequence}/edit": [
        (f"{_Q}/letters/2/edit", _EDIT, _ACTING_ON_CLOSED),
        # Which body a letter has isn't told by a refusal either.
        (f"{_Q}/letters/2/edit", _EDIT | {"sha256": "0" * 64}, _ACTING_ON_CLOSED | {"friend": 422}),
    ],
    "POST /api/queues/{connection}/{queue}/dry-run": [
        (f"{_Q}/dry-run", {"select": {}}, _ACTING),
        (f"{_Q}/dry-run", {"select": {"sequences": [2]}}, _ACTING),
        (f"{_Q}/dry-run", {"select": {"dag_id": CLOSED}}, _ACTING_ON_CLOSED),
        (f"{_Q}/dry-run", {"select": {}, "patch": '[{"op":"remove","path":"/a"}]'}, _ACTING_ON_CLOSED),
    ],
    # Numbers and sequences, of all DAGs' jobs together.
    "GET /api/queues/{connection}/{queue}/account": [(f"{_Q}/account", None, _SEEN)],
    "POST /api/queues/{connection}/{queue}/account": [(f"{_Q}/account", {}, _ACTING)],
    "GET /api/jobs": [
        (f"jobs?dag_id={_OPEN}&run_id=r", None, _SEEN),
        (f"jobs?dag_id={CLOSED}&run_id=acme_run", None, _OF_CLOSED),
    ],
}


async def _terminate(server: NatsServer, connection: NatsPyConnection, queue: WorkQueue, bodies: list[bytes]) -> None:
    """Make letters of all jobs that wait, with a worker's record of their errors."""
    created = (await stream_info(connection, queue.name))["created"]
    for message in await pull_jobs(connection, queue, len(bodies)):
        number, task = message.metadata.sequence.stream, (message.headers or {}).get("Airflow-Task")
        error = "acme.Refused" if message.data == _BODY else "app.Busy"
        lines = [
            "Dead-Letter-Version: 1",
            f"Dead-Letter-Stream: {queue.name}",
            f"Dead-Letter-Stream-Created: {created}",
            f"Dead-Letter-Sequence: {number}",
            f"Dead-Letter-Subject: {message.subject}",
            f"Dead-Letter-Time: {message.metadata.timestamp.isoformat()}",
            "Dead-Letter-Reason: terminated",
            f"Dead-Letter-Error-Class: {error}",
            f"Dead-Letter-Error-Message: {message.data.decode()}",
            *([f"Airflow-Task: {task}"] if task else []),
        ]
        await publish_raw(server, f"dead.{queue.name}.{CONSUMER}.{number}", "\r\n".join(lines).encode(), message.data)
        await message.term()


@asynccontextmanager
async def prepared(server: NatsServer) -> AsyncIterator[dict[str, str]]:
    """Make the queue with everything that belongs to DAGs; return what the table's paths name."""
    named: dict[str, str] = {}
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, QUEUE, consumer={"ack_wait": "30s"}, audit=True, archive=True)
        created = (await stream_info(connection, QUEUE))["created"]
        headers: dict[str, dict[str, str]] = {
            "nobody": {},
            "unknown": {"Airflow-Task": task_key(Origin("gone", "r", "t"))},
        }
        for dag_id, run_id in ((_OPEN, "r"), (CLOSED, "acme_run")):
            origin = Origin(dag_id, run_id, "t")
            await store_task(connection, queue, origin, created=created, published=1)
            headers[dag_id] = {"Airflow-Task": task_key(origin)}
        letters = [(_OPEN, b"open"), (CLOSED, _BODY), ("unknown", b"unknown"), ("nobody", b"of nobody")]
        letters += [(CLOSED, b"acme body 5"), (CLOSED, b"acme body 6"), ("unknown", b"acme body 7"), (_OPEN, b"open 8")]
        for whose, body in letters:
            await publish_jobs(connection, queue, [body], headers=headers[whose])
        await _terminate(server, connection, queue, [body for _, body in letters])
        await wait_for_entries(connection, queue, 2 * len(letters))

        async def redrive(name: str, selection: Selection, who: dict[str, Any], why: str) -> None:
            request = RedriveRequest(selection, who=who, why=why, run=name)
            report = await redrive_dead_letters(connection, queue, request)
            report.raise_for_failures()
            named[name] = str(report.redrive)

        of_closed = {"dag_id": CLOSED, "run_id": "acme_run", "task_id": "t"}
        await redrive("by_closed", Selection(sequences=[5]), of_closed, "ticket 4711")
        await redrive("for_closed", Selection(sequences=[6], dag_id=CLOSED), {"dag_id": _OPEN}, "ticket 4711")
        await redrive("by_person", Selection(sequences=[7]), {"person": "acme@person"}, "ticket 4711")
        # Letters of any DAG, by one that the stranger may see; one of them is refused, with a text about it.
        failing = RedriveRequest(
            Selection(sequences=[2]),
            who={"dag_id": _OPEN, "run_id": "r"},
            why="ticket 4711",
            transform=lambda letter: Repair(subject=letter.body.decode()),
        )
        report = await redrive_dead_letters(connection, queue, failing)
        assert "acme body" in report.failed[2]
        named["by_open"] = str(report.redrive)
        # The closed DAG redrives a letter of the open one, which dies again.
        await redrive("of_open_by_closed", Selection(sequences=[8]), of_closed, "ticket 4711")
        found = {redrive.run: redrive for redrive in await list_redrives(connection, queue)}
        assert len(found) == 5
        messages = [await _pulled(message) for message in await pull_jobs(connection, queue, 4)]
        named["again"] = next(number for number, body in messages if body == b"open 8")
        await wait_for_entries(connection, queue, 2 * (len(letters) - 4) + 1)
        # Of a job that waits only its own headers are looked at.
        headers[_OPEN] = {"Airflow-Dag-Id": _OPEN, "Airflow-Run-Id": "r", "Airflow-Task-Id": "t"}
        for whose, body in ((CLOSED, b"acme body pending"), ("unknown", b"acme body unknown"), (_OPEN, b"pending")):
            (number,) = await publish_jobs(connection, queue, [body], headers=headers[whose])
            named[{CLOSED: "of_closed", _OPEN: "of_open"}.get(whose, "of_unknown")] = str(number)
        yield named


async def _pulled(message: Any) -> tuple[str, bytes]:
    await (message.term() if message.data == b"open 8" else message.ack())
    return str(message.metadata.sequence.stream), message.data


@pytest.mark.slow
def test_every_route_has_a_row() -> None:
    routes = [route for route in page_app().routes if isinstance(route, APIRoute)]
    assert {f"{method} {route.path}" for route in routes for method in route.methods} == ROUTES.keys()
    assert len(routes) == len(page_app().routes), "a route that is none of FastAPI's has no permissions"


@pytest.mark.slow
async def test_each_viewer_gets_of_each_route_what_the_viewer_may_see(subtests: pytest.Subtests) -> None:
    shown: dict[str, set[str]] = {viewer: set() for viewer in VIEWERS}
    manager = _PerDag()  # type: ignore[no-untyped-call]
    with NatsServer() as server:
        async with (
            running_page([CONNECTION], server, auth_manager=manager, refresh_seconds=3),
            prepared(server) as named,
            AsyncExitStack() as stack,
        ):
            browsers = {
                viewer: await stack.enter_async_context(page_client(viewer, role)) for viewer, role in VIEWERS.items()
            }
            await _scanned(browsers["friend"])
            for route, requests in ROUTES.items():
                for path, body, statuses in requests:
                    for viewer in VIEWERS:
                        with subtests.test(route=route, path=path, viewer=viewer):
                            text = await _answer(browsers[viewer], path.format(**named), body, statuses[viewer])
                            words = {word for word in WORDS if word in text}
                            shown[viewer] |= words
                            # A refusal may repeat what the request names.
                            asked = {word for word in WORDS if word in f"{path} {json.dumps(body)}"}
                            assert not (words - asked and viewer in ("stranger", "nobody")), text
    # Or the table would prove nothing.
    assert shown["friend"] == set(WORDS)


async def _scanned(friend: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        answer = await friend.get(f"{_Q}/groups")
        return (
            answer.status_code == 200
            and answer.json()["scan"]["state"] == "ready"
            and answer.json()["total"]["value"] == 5
        )

    await eventually(ready, 60)


async def _answer(client: httpx.AsyncClient, path: str, body: Any, expected: int) -> str:
    answer = await (client.get(path) if body is None else client.post(path, json=body))
    assert answer.status_code == expected, answer.text
    return answer.text
