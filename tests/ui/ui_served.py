"""The page without an Airflow: served by this process, so that a test can move its clock by hours."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.core_api.security import get_user
from fastapi import FastAPI
from ui_steps import wait_for

from testbed.page import page_app, running_page
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.nats_server import NatsServer


@contextmanager
def served_page(server: NatsServer, **options: Any) -> Iterator[str]:
    """Serve the page to a user who may see and do everything; yields its address.

    :param server: the server of the connection ``nats_default``
    :param options: as those of ``running_page``
    """
    port = free_port()
    http = uvicorn.Server(uvicorn.Config(FastAPI(), host=LOOPBACK, port=port, log_level="warning"))

    async def serve() -> None:
        async with running_page(["nats_default"], server, **options):
            app = page_app()
            app.dependency_overrides[get_user] = lambda: SimpleAuthManagerUser(username="Ann", role="admin")
            airflow = FastAPI()
            airflow.mount("/jetstream", app)
            http.config.app = airflow
            await http.serve()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, serve())
        try:
            wait_for(lambda: http.started or running.done(), 30)
            yield f"http://{LOOPBACK}:{port}/jetstream/"
        finally:
            http.should_exit = True
            running.result(30)
