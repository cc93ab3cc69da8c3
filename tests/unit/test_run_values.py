"""Values that a run without a logical date lacks, in templates and as parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pendulum
import pytest
from airflow.sdk import DAG

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow.sdk import BaseOperator, Context

QUEUE: dict[str, Any] = {
    "name": "dated",
    "subjects": ["dated.>"],
    "dead_letters": "dated_dead",
    "events": "dated_events",
    "consumers": [{"name": "w", "max_deliver": 3}],
}
NAMES = (
    *("ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz", "logical_date"),
    *("data_interval_start", "data_interval_end"),
    *("prev_data_interval_start_success", "prev_data_interval_end_success"),
)
ADVICE = r"it has no logical date.*use dag_run\.run_id, or dag_run\.run_after.*which every run has"


def publish(**arguments: Any) -> JetStreamPublishOperator:
    return JetStreamPublishOperator(
        task_id="publish", **{"work_queue": QUEUE, "subject": "dated.a", "jobs": [1]} | arguments
    )


TEMPLATED: dict[str, Callable[[str], BaseOperator]] = {
    "a key": lambda text: publish(idempotency_key=text),
    "a subject": lambda text: publish(subject=f"dated.{text}"),
    "an id": lambda text: publish(jobs=[Job(1, id=text)]),
    "a body": lambda text: publish(jobs=[{"day": text}]),
    "a time": lambda text: publish(jobs=[Job(1, at=text)]),
    "the path of a queue": lambda text: JetStreamProvisionOperator(task_id="a", work_queue=f"{text}.yaml"),
    "a selection": lambda text: JetStreamRedriveOperator(task_id="a", work_queue=QUEUE, select={"run_id": text}),
    "ids to cancel": lambda text: JetStreamCancelOperator(task_id="a", work_queue=QUEUE, job_ids=[text]),
    "a consumer": lambda text: JetStreamConsumeOperator(
        task_id="a", work_queue=QUEUE, consumer=text, handler=lambda job: None
    ),
    "a folder": lambda text: JetStreamDeadLetterReportOperator(task_id="a", work_queue=QUEUE, directory=f"/r/{text}"),
    "a sensor": lambda text: JetStreamDeadLetterSensor(task_id="a", work_queue=QUEUE, select={"run_id": text}),
    "a drained sensor": lambda text: JetStreamQueueDrainedSensor(task_id="a", work_queue=QUEUE, nats_conn_id=text),
    "a handle": lambda text: JetStreamJobsSensor(task_id="a", handle=text),
}


def context(**values: Any) -> Context:
    """Return the context of a run without a logical date, as far as it is needed here."""
    run = SimpleNamespace(
        run_id="manual__1", run_after=pendulum.datetime(2026, 11, 27), logical_date=None, data_interval_start=None
    )
    instance = SimpleNamespace(dag_id="dated", run_id="manual__1", task_id="publish", map_index=-1, try_number=1)
    return cast("Context", {"dag_run": run, "run_id": run.run_id, "ti": instance, "params": {}} | values)


def _rendered(make: Callable[[str], BaseOperator], text: str, values: Context) -> BaseOperator:
    with DAG("dated"):
        operator = make(text)
    operator.render_template_fields(values)
    return operator


@pytest.mark.parametrize("place", TEMPLATED)
@pytest.mark.parametrize("name", ["ds", "data_interval_end"])
def test_a_template_of_a_missing_date_says_what_to_use(place: str, name: str) -> None:
    with pytest.raises(AirflowFailException, match=rf"expected {name} for the template .*{ADVICE}"):
        _rendered(TEMPLATED[place], f"{{{{ {name} }}}}", context())


@pytest.mark.parametrize("name", NAMES)
def test_so_does_each_of_these_names(name: str) -> None:
    with pytest.raises(AirflowFailException, match=f"JS115 expected {name} for the template .*{ADVICE}"):
        _rendered(TEMPLATED["a key"], f"sales-{{{{ {name} }}}}", context())
    function = eval(f"lambda {name}: [{name}]")  # noqa: S307 - the parameter's name is what is tried
    with pytest.raises(
        AirflowFailException, match=f"JS120 expected {name} for the parameter of the function .* of jobs, .*{ADVICE}"
    ):
        publish(jobs=function).execute(context())


@pytest.mark.parametrize(
    "text",
    ["sales-{{ dag_run.logical_date }}", "{{ dag_run.data_interval_start }}", "x{{ partition_key }}", "{{ params.a }}"],
)
@pytest.mark.parametrize("place", ["a key", "a subject", "an id"])
def test_a_part_that_is_nothing_is_no_part_of_a_key(text: str, place: str) -> None:
    values = context(partition_key=None, params={"a": None})
    with pytest.raises(AirflowFailException, match=rf"rendered to nothing, which would be the same.*{ADVICE}"):
        _rendered(TEMPLATED[place], text, values).execute(values)


def test_a_function_with_a_default_is_called_without_the_value() -> None:
    with pytest.raises(AirflowFailException, match="JS120 expected jobs as a list"):
        publish(jobs=lambda ds=None: ds).execute(context())


def test_another_undefined_name_is_jinjas_error() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="'sd' is undefined"):
        _rendered(TEMPLATED["a key"], "{{ sd }}", context())
