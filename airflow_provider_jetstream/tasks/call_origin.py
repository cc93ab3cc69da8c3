"""The origin of jobs that a task's own code publishes, such as a function with ``@task``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow.sdk import get_current_context

from airflow_provider_jetstream.tasks.identity import origin_of

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry

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
