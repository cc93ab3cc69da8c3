"""The identity of a task: for audit records, and for ids that all its tries share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from airflow.sdk import get_current_context

from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry

if TYPE_CHECKING:
    from airflow.sdk import Context


def origin_of(context: Context, idempotency_key: str | None = None, operation: str | None = None) -> Origin:
    """Return the task as the origin of jobs; the same for all its tries.

    :param idempotency_key: stands for the run in the ids of the jobs
    :param operation: one of several calls of the task that publish
    """
    instance = context["ti"]
    return Origin(
        instance.dag_id,
        instance.run_id,
        instance.task_id,
        -1 if instance.map_index is None else instance.map_index,
        idempotency_key=idempotency_key,
        operation=operation,
        max_tries=getattr(instance, "max_tries", None),
        attempt=_task_try(context),
    )


def _task_try(context: Context) -> TaskTry:
    instance, run = context["ti"], context.get("dag_run")
    started = getattr(run, "start_date", None)
    try_id = _uuid_text(getattr(instance, "id", None))
    version = getattr(instance, "dag_version_id", None)
    return TaskTry(
        run_started=started.astimezone(UTC).isoformat() if isinstance(started, datetime) else None,
        clear_number=_number(getattr(run, "clear_number", None)),
        number=_number(getattr(instance, "try_number", None)),
        try_id=try_id,
        dag_version=None if version is None else str(version),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _uuid_text(value: object) -> str | None:
    try:
        return str(UUID(str(value)))
    except ValueError:
        return None


def audit_identity(context: Context) -> dict[str, Any]:
    """Return the fields that identify the task and its try in audit records, and the person who triggered its run."""
    identity = {**_fields(origin_of(context)), "try_number": context["ti"].try_number}
    # Airflow knows it of runs that a person has triggered.
    person = getattr(context.get("dag_run"), "triggering_user_name", None)
    return identity | ({"person": person} if isinstance(person, str) and person else {})


def task_key(context: Context) -> str:
    """Return a key that all tries of a task share: one token, since run ids may hold dots and white space."""
    return origin_of(context).key


def _fields(origin: Origin) -> dict[str, Any]:
    return {
        "dag_id": origin.dag_id,
        "run_id": origin.run_id,
        "task_id": origin.task_id,
        "map_index": origin.map_index,
    }


# The calls of this process that publish, by task and try.
_calls: Counter[tuple[str, TaskTry | None]] = Counter()


def call_origin() -> Origin | None:
    """Return the origin of the jobs of one call; ``None`` outside of a task.

    Each call of a try is an operation of its own, by its number: two calls may publish equal jobs, and a retry that
    makes the same calls publishes none twice.
    """
    try:
        context = get_current_context()
    except RuntimeError:
        return None
    if not (instance := context.get("ti")):
        return None
    # The same in a retry, and another one where Airflow runs the task anew after a clear.
    origin = replace(origin_of(context), max_tries=instance.max_tries)
    call = _calls[origin.key, origin.attempt]
    _calls[origin.key, origin.attempt] += 1
    return replace(origin, operation=f"call-{call}") if call else origin
