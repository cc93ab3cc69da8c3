"""Templates inside of jobs, with every kind of value that they may render to."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.tasks.jobs import rendered_job

TEMPLATE: Any = "{{ params.value }}"
FIELDS = ("subject", "id", "advisory", "partition_key", "at", "delay", "every", "time_zone")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("nothing", [None, "", " ", "None"])
def test_a_field_that_renders_to_nothing_is_refused(field: str, nothing: object) -> None:
    with pytest.raises(JobError, match=f"expected a value for {field} of a job, found that its template"):
        rendered_job(Job(b"", **{field: TEMPLATE}), lambda *_: nothing)


def test_a_number_of_a_native_template_becomes_text_where_text_is_needed() -> None:
    job = Job(TEMPLATE, id=TEMPLATE, partition_key=TEMPLATE, headers={"A": TEMPLATE, "B": "b"})
    rendered = rendered_job(job, lambda value, _: {**value, "A": 7} if isinstance(value, dict) else 7)
    assert (rendered.body, rendered.id, rendered.partition_key) == (7, "7", "7")
    assert rendered.headers == {"A": "7", "B": "b"}
    # The job of the DAG stays as it is, for other instances of a mapped task.
    assert job.id == TEMPLATE


@pytest.mark.parametrize(("field", "value"), [("id", ["a"]), ("subject", True), ("headers", None)])
def test_a_value_that_the_field_can_not_have_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: {"A": TEMPLATE} if field == "headers" else TEMPLATE}
    with pytest.raises(JobError, match="of a job"):
        rendered_job(Job(b"", **fields), lambda *_: value)
