"""The monitor page as its users see it: over HTTP, without a web server and without Airflow's database."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.core_api.security import get_user

from airflow_provider_jetstream.plugins.monitor.app import make_app
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings
from airflow_provider_jetstream.plugins.monitor.jobs import TaskQuery
from airflow_provider_jetstream.plugins.monitor.routes import parse_task_query
from airflow_provider_jetstream.plugins.monitor.service import MonitorService
from testbed import seams
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from fastapi import FastAPI

    from testbed.nats_server import NatsServer

__all__ = ["page_app", "page_client", "running_page"]

_AUTH_MANAGER = "airflow.api_fastapi.app._AuthManagerState.instance"


@asynccontextmanager
async def running_page(
    conn_ids: Iterable[str],
    server: NatsServer | None = None,
    *,
    auth_manager: SimpleAuthManager | None = None,
    sample_seconds: float | None = None,
    **options: object,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run the page of one API worker; yields a client of a user who may see and do everything.

    :param conn_ids: the connections that it shows
    :param server: what they connect to; without it Airflow knows them already
    :param sample_seconds: samples the queues in this interval; not at all where absent
    :param options: further ones of the section ``[jetstream]``, without ``monitor_``
    """
    conn_ids = tuple(conn_ids)
    with pytest.MonkeyPatch.context() as patch:
        if server:
            login = {"login": server.user, "password": server.password} if server.user else {}
            known = {"conn_type": "nats", "host": LOOPBACK, "port": server.port, **login, "extra": {"timeout": 5}}
            for conn_id in conn_ids:
                patch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(known))
        for name, value in {"connections": ",".join(conn_ids), "refresh_seconds": 0.5, **options}.items():
            patch.setenv(f"AIRFLOW__JETSTREAM__MONITOR_{name.upper()}", str(value))
        patch.setattr(_AUTH_MANAGER, auth_manager or SimpleAuthManager())  # type: ignore[no-untyped-call]
        service = MonitorService(monitor_settings())
        patch.setattr(seams.RUNNING_SERVICE_SERVICE, lambda: service)
        sampling = [asyncio.create_task(service.sample(sample_seconds))] if sample_seconds else []
        try:
            async with page_client("Ann", "admin") as client:
                yield client
        finally:
            for task in sampling:
                task.cancel()
            service.stop()


def page_app() -> FastAPI:
    """Make the page's application. Each run of a DAG has had one task ``t``."""
    app = make_app()
    app.dependency_overrides[parse_task_query] = _task_t
    return app


def page_client(username: str, role: str | None = "user", teams: list[str] | None = None) -> httpx.AsyncClient:
    """Return a client of the page that runs, with a user's session; without a role there is no session.

    An error that the application doesn't answer fails the test.
    """
    app = page_app()
    if role is not None:
        app.dependency_overrides[get_user] = lambda: SimpleAuthManagerUser(username=username, role=role, teams=teams)
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://airflow.example/api/", timeout=60)


def _task_t(**query: Any) -> TaskQuery:
    return TaskQuery(query["dag_id"], query["run_id"], None, None, (("t", -1),))


# Its query is checked as the page's own is.
_task_t.__signature__ = inspect.signature(parse_task_query)  # type: ignore[attr-defined]
