"""Templates inside of jobs: each field of a :class:`~airflow_provider_jetstream.jetstream.Job` may hold some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.tasks.template_values import is_absent, is_templated

if TYPE_CHECKING:
    from collections.abc import Callable

# A template of the body may render to nothing: that is a body.
_FREE_FIELDS = ("body", "headers")
_TEXTS = ("subject", "id", "advisory", "partition_key")


def rendered_job(job: Job, render: Callable[[Any, str], Any]) -> Job:
    """Return the job with its templates rendered; what holds none stays as it is.

    :param render: renders one value, strictly where it is given the name of a field in which nothing may be nothing
    :raises JobError: a field but the body rendered to nothing, or to a value that it can't have
    """
    values: dict[str, Any] = {}
    for field in fields(job):
        value = getattr(job, field.name)
        if not is_templated(value):
            continue
        is_free = field.name in _FREE_FIELDS
        rendered = render(dict(value) if isinstance(value, Mapping) else value, "" if is_free else field.name)
        if not is_free and is_absent(rendered):
            raise JobError(
                f"expected a value for {field.name} of a job, found that its template {value!r} rendered to nothing:"
                " see why, or leave it out"
            )
        # With render_template_as_native_obj, the text of a number becomes the number.
        if field.name in _TEXTS and isinstance(rendered, int) and not isinstance(rendered, bool):
            rendered = str(rendered)
        elif field.name == "headers" and isinstance(rendered, Mapping):
            rendered = {name: str(text) for name, text in rendered.items()}
        values[field.name] = rendered
    return replace(job, **values) if values else job


def references_of(jobs: object) -> list[Any]:
    """Return the values of jobs that may be results of other tasks, on which the publishing task depends."""
    if not isinstance(jobs, list | tuple):
        return []
    return [getattr(job, field.name) for job in jobs if isinstance(job, Job) for field in fields(job)]
