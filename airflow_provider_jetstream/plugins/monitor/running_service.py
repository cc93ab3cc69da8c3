"""The one monitor service of an API worker, which all routes use."""

import asyncio
import os
import threading
from functools import cache

from fastapi import Response

from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings
from airflow_provider_jetstream.plugins.monitor.service import MonitorService

_BEGIN_SECONDS = 3.0


@cache
def service() -> MonitorService:
    """Return the one monitor service of this process."""
    return MonitorService(monitor_settings())


def start_sampling() -> None:
    """Sample the queues from now on, in an API server; elsewhere do nothing."""
    # Airflow's command sets it for its processes; every other one may read the plugin too.
    if os.environ.get("AIRFLOW_API_APPS"):
        _start_timer()
        # A server that loads the application first and then makes its workers leaves them without the thread.
        os.register_at_fork(after_in_child=_start_timer)


def _start_timer() -> None:
    # Later, since a process that only loads the application may end at once.
    timer = threading.Timer(_BEGIN_SECONDS, lambda: asyncio.run(service().sample()))
    timer.daemon = True
    timer.name = "jetstream-sampler"
    timer.start()


def json_answer(body: bytes) -> Response:
    """Return an encoded answer."""
    return Response(body, media_type="application/json")
