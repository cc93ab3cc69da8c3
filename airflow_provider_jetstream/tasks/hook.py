"""The hook of a task or a trigger: its module is imported when something runs, not when a DAG file is parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook


def hook_for(nats_conn_id: str) -> JetStreamHook:
    """Return the hook of an Airflow connection."""
    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook as Hook

    return Hook(nats_conn_id)
