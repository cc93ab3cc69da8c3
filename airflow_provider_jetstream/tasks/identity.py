"""The identity of a task: for audit records, and for ids that all its tries share."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.origin import Origin

if TYPE_CHECKING:
    from airflow.sdk import Context

_KEY_DIGITS = 32


def origin_of(context: Context) -> Origin:
    """Return the task as the origin of jobs; the same for all its tries."""
    instance = context["ti"]
    map_index = instance.map_index
    return Origin(instance.dag_id, instance.run_id, instance.task_id, -1 if map_index is None else map_index)


def audit_identity(context: Context) -> dict[str, Any]:
    """Return the fields that identify the task and its try in audit records."""
    return {**_fields(origin_of(context)), "try_number": context["ti"].try_number}


def task_key(context: Context) -> str:
    """Return a key that all tries of a task share: one token, since run ids may hold dots and white space."""
    return origin_key(origin_of(context))


def origin_key(origin: Origin) -> str:
    """Return the :func:`task_key` of a task whose context isn't available."""
    return sha256(json.dumps(list(_fields(origin).values())).encode()).hexdigest()[:_KEY_DIGITS]


def _fields(origin: Origin) -> dict[str, Any]:
    fields = asdict(origin)
    del fields["round"]
    return fields
