"""What tasks return to each other, by Airflow's own serialiser: equal objects, and reports as JSON."""

from __future__ import annotations

import json
from array import array
from datetime import UTC, datetime, timedelta, timezone
from importlib import import_module
from typing import Any, cast
from zoneinfo import ZoneInfo

import pendulum
import pytest
from airflow.sdk import DAG, serde
from airflow.serialization.helpers import serialize_template_field
from pydantic import ValidationError

from airflow_provider_jetstream import jetstream
from airflow_provider_jetstream.jetstream import (
    CancelReport,
    ConnectionSettings,
    Consumer,
    Cursor,
    DrainReport,
    Findings,
    Job,
    JobReport,
    JobsHandle,
    JsonPatch,
    Origin,
    Plan,
    Protocol,
    PublishReport,
    RedriveOutcomes,
    RedriveReport,
    RedriveRequest,
    Repair,
    RetryReport,
    Selection,
    StopWhen,
    WaitPolicy,
    WaitReport,
    WorkQueue,
)
from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.origin import TaskTry
from airflow_provider_jetstream.jetstream.provisioning.plan import Step
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.tasks import xcom_classes

QUEUE: dict[str, Any] = {
    "name": "passed",
    "subjects": ["passed.>"],
    "dead_letters": "passed_dead",
    "events": {"name": "passed_events", "max_age": "7d"},
    "consumers": [{"name": "w", "filter_subject": "passed.>", "max_deliver": 3, "backoff": ["1s", "5m"]}],
}
WORK_QUEUE = WorkQueue(**QUEUE)
CURSOR = Cursor("passed", "2026-11-27T00:00:00Z", "passed_events", 7, None, 1, ("told.a", "told.b"))
WHEN = datetime(2026, 11, 27, 12, 30, tzinfo=timezone(timedelta(hours=2)))

VALUES: dict[str, Any] = {
    "a job": Job({"do": "ok", "n": 1, "list": [1, None, 2.5]}, id="one", subject="passed.a"),
    "a job of text": Job("text"),
    "a job of bytes": Job(b"\xff\x00", headers={"A": "b"}),
    "a job with Airflow's words": Job({"__type": "dict", "__var": {"a": 1}, "__classname__": "x", "__version__": 1}),
    "a job at a time": Job(1, at=WHEN, time_zone=None),
    "a job at pendulum's time": Job(1, at=pendulum.datetime(2026, 1, 1, tz="Europe/Vienna")),
    "a job at a time as text": Job(1, at="2026-11-21T09:00:00Z"),
    "a job with a delay": Job([], delay=timedelta(minutes=5, microseconds=1)),
    "a job with pendulum's delay": Job(None, delay=pendulum.duration(minutes=5)),
    "a job of a cron expression": Job(1, id="c", every="0 0 9 * * *", time_zone=ZoneInfo("Europe/Vienna")),
    "a job that is published by nobody yet": Job({"t": datetime(2026, 1, 1, tzinfo=UTC), "set": {1, 2}}),
    "a queue": WORK_QUEUE,
    "a queue without an archive": WorkQueue(**QUEUE | {"archive": False}),
    "a consumer": WORK_QUEUE.consumers[0],
    "a consumer of its own": Consumer(name="w", max_deliver=-1, ack_wait="5m"),
    "a dead letter queue": WORK_QUEUE.dead_letters,
    "events": WORK_QUEUE.events,
    "an archive": WORK_QUEUE.archive,
    "an audit": WORK_QUEUE.audit,
    "a selection": Selection(sequences=[3, 5], reasons=["terminated"], older_than="5m"),
    "an empty selection": Selection(),
    "an origin": Origin("dag", "run", "task", 3, idempotency_key="k", attempt=TaskTry(number=1, clear_number=0)),
    "a cursor": CURSOR,
    "a handle": JobsHandle(cursor=CURSOR, sequences=[(1, 5)], advised={"a": 7}),
    "a rule": StopWhen(0.5, "park", pendulum.duration(minutes=5)),
    "a policy": WaitPolicy(None, 3, None),
    "a patch": JsonPatch.of([{"op": "replace", "path": "/a", "value": 10**20}]),
    "a repair": Repair({"a": [1]}, {"A": None, "B": ("x", "y")}, "passed.b"),
    "a repair of bytes": Repair(b"\x00\xff"),
    "a repair of nothing": Repair(),
    "a request": RedriveRequest(
        Selection(consumer="w"),
        subject="passed.a",
        target=WORK_QUEUE,
        who={"dag_id": "d", "map_index": -1},
        protocol=Protocol.COPY,
        waves=[10, "rest"],
        stop_when={"died_again": 0.5},
        patch=[{"op": "remove", "path": "/a"}],
    ),
    "outcomes": RedriveOutcomes(completed=1, died_again=2),
}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that a process which has loaded the plugin makes objects of, and no others."""
    monkeypatch.setattr(serde, "_extra_allowed", set(serde._extra_allowed) - set(xcom_classes.CLASSES))  # noqa: SLF001
    xcom_classes.allow_classes()


def passed(value: Any) -> Any:
    """Return what the next task gets."""
    return serde.deserialize(json.loads(json.dumps(serde.serialize(value))))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_comes_back_as_an_equal_one(value: Any) -> None:
    found, (in_a_list,), in_a_dict = passed(value), passed([value]), passed({"a": value})
    assert type(found) is type(value)
    assert found == value == in_a_list == in_a_dict["a"]
    # What it becomes for another task once more, and for a person.
    assert passed(found) == value
    assert repr(value)[:8] == repr(found)[:8]


def test_a_queue_declares_what_it_declared() -> None:
    found = passed(WORK_QUEUE)
    assert found.to_yaml() == WORK_QUEUE.to_yaml()
    assert found.model_fields_set == WORK_QUEUE.model_fields_set
    assert JetStreamPublishOperator(task_id="a", work_queue=found, subject="passed.a", jobs=passed([Job(1)])).jobs == [
        Job(1)
    ]


def test_what_cannot_pass_is_named_where_it_is_returned() -> None:
    with pytest.raises(ArgumentError, match="found a function as transform: make it in the task"):
        serde.serialize(RedriveRequest(transform=lambda _: None))


def test_a_dag_holds_jobs_with_results_of_other_tasks() -> None:
    # Airflow serialises the fields of a DAG's tasks with the same method.
    with DAG("holding"):
        made = JetStreamPublishOperator(task_id="made", work_queue=WORK_QUEUE, subject="passed.a", jobs=[1])
        jobs = [Job({"x": made.output}, at=cast("Any", made.output), id="{{ run_id }}"), Job(b"\xff")]
        JetStreamPublishOperator(task_id="send", work_queue=WORK_QUEUE, subject="passed.a", jobs=jobs)
    first, second = (json.dumps(serialize_template_field(jobs, "jobs")) for _ in range(2))
    assert first == second
    assert "{{ run_id }}" in first
    assert "0x" not in first


def test_a_value_of_a_later_version_is_refused() -> None:
    stored: Any = serde.serialize(Job(1))
    stored["__version__"] = 99
    with pytest.raises(ArgumentError, match="found 99: a later version of this package has stored it"):
        serde.deserialize(stored)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_what_another_version_has_stored_otherwise_is_named(value: Any) -> None:
    stored: Any = serde.serialize(value)
    forms: list[Any] = ["text", None, [], 7]
    if not isinstance(value, RedriveOutcomes | JobsHandle):
        # These two leave out what they don't know.
        forms += [{"later_field": 1}, {**stored["__data__"], "later_field": 1}]
    for form in forms:
        with pytest.raises((JetStreamProviderError, ValidationError)) as caught:
            serde.deserialize({**stored, "__data__": form})
        assert type(value).__name__ in str(caught.value)


def _publish_report() -> PublishReport:
    report = PublishReport("passed", array("Q", [4, 5, 6, 9]), duplicates=1, handle=JobsHandle(cursor=CURSOR).as_json())
    report.extra.append(2)
    return report


def _redrive_report() -> RedriveReport:
    report = RedriveReport()
    report.add_redriven(3, 9, None)
    report.add_parked(4)
    report.add_failure(5, "why")
    return report


def _letter() -> DeadLetter:
    death = Death("passed", "2026", 3, "w", Reason.TERMINATED, WHEN)
    origin = Origin("dag", "run", "task")
    given = (death, "passed.a", b"\xff", (("A", "b"),), "2026", next(iter(BodySource)), (1, 2))
    return DeadLetter(*given, preserved=True, ready_at=WHEN, origin=origin)


REPORTS: dict[str, Any] = {
    "published": _publish_report(),
    "redriven": _redrive_report(),
    "awaited": WaitReport({1, 2}, dead={3: "why"}, results={"4": {"a": (1, 2)}}, copies={1: 2}),
    "found": Findings((_letter(),), (), 1, 0, ()),
    "a letter": _letter(),
    "cancelled": CancelReport(Cancellation("one", WHEN, "why"), 2),
    "planned": Plan((Step("stream", "passed", "create", {"name": "passed"}),)),
    "a job's": JobReport("one", 3, "completed", result=(1, 2)),
    "retried": RetryReport(4, "retry", 2, WHEN),
    "drained": DrainReport("passed", drained=True, consumers=(), stored=0, undeliverable={"passed.b": 1}),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_a_report_comes_back_as_its_json(report: Any) -> None:
    found = passed(report)
    assert isinstance(found, dict)
    assert found == json.loads(json.dumps(report.as_json())) == passed(found)
    # What Airflow's page shows of it.
    assert "Report" in type(report).__name__ or str(_shown(report))


def _shown(report: Any) -> object:
    stored: Any = serde.serialize(report)
    return serde.deserialize(stored, full=False)


def test_a_report_of_a_publish_is_a_handle_in_another_task() -> None:
    report = PublishReport("passed", handle=JobsHandle(cursor=CURSOR, sequences=[(1, 2)]).as_json())
    sensor = JetStreamJobsSensor(task_id="a", handle=passed(report))
    assert JobsHandle.of(passed(report)) == JobsHandle.of(report) == JobsHandle.of(sensor.handle)


def test_each_class_of_the_face_passes_or_is_none_that_a_task_returns() -> None:
    # Enumerations and sentences are texts; a connection, settings with secrets and a publication are made in the task.
    texts = {"Protocol", "QueueWarning", "Reason", "RedriveState", "Status"}
    others = {"Connection", "ConnectionSettings", "Publication"}
    classes = {
        name
        for name in jetstream.__all__
        if isinstance(value := getattr(jetstream, name), type) and not issubclass(value, Exception)
    }
    listed = {path.rpartition(".")[2] for path in xcom_classes.CLASSES}
    assert classes - texts - others <= listed
    for path in xcom_classes.CLASSES:
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__module__ == module


def test_settings_with_secrets_do_not_pass() -> None:
    stored: Any = serde.serialize(ConnectionSettings(servers=("nats://h:4222",), user="u", password="hidden-word"))
    assert "hidden-word" not in json.dumps(stored)
    with pytest.raises(ImportError, match="was not found in allow list"):
        serde.deserialize(stored)


def test_the_plugin_allows_the_classes() -> None:
    serde._extra_allowed.difference_update(xcom_classes.CLASSES)  # noqa: SLF001
    import importlib

    importlib.reload(import_module("airflow_provider_jetstream.plugins.monitor"))
    assert passed(Job(1)) == Job(1)
