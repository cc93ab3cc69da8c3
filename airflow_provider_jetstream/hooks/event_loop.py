"""Whether a blocking call may be made here."""

from __future__ import annotations

import asyncio

from airflow_provider_jetstream.jetstream.errors import EventLoopError


def require_no_event_loop() -> None:
    """Refuse a blocking call in a thread whose event loop it would stop.

    :raises EventLoopError: an event loop is running in this thread
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise EventLoopError(
        "expected no running event loop, found one: a blocking call would stop it; await the method of the same name"
        ' that starts with "a" (aprovision, apublish, …)'
    )
