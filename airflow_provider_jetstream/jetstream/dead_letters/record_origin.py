"""The task that published a job, as the record of the job's death names it."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, ValidationError

from airflow_provider_jetstream.jetstream.origin import Origin

_MAX_TEXT = 10_000


class _TaskNames(BaseModel):
    """The form in which a record names a task."""

    model_config = ConfigDict(strict=True)

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1


def format_origin(origin: Origin) -> str:
    """Return a task as the record of a dead letter names it."""
    return json.dumps({name: getattr(origin, name) for name in _TaskNames.model_fields})


def parse_origin(text: str | None) -> Origin | None:
    """Read the task that a record names; ``None`` where it names none."""
    if not text or len(text) > _MAX_TEXT:
        return None
    try:
        names = _TaskNames.model_validate_json(text.encode(errors="replace"))
    except ValidationError:
        return None
    return Origin(names.dag_id, names.run_id, names.task_id, names.map_index)
