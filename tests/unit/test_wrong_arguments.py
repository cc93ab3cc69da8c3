"""A table of wrong arguments: each is refused when the DAG is parsed, or before a method of the hook sends anything.

The error is one of this package or of Airflow, and says what was expected and what was found.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from airflow.sdk.exceptions import AirflowException

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.repair import Repair
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CONSUMERS = [{"name": "mail", "filter_subject": "q.mail.*", "max_deliver": 3}]
QUEUE = {"name": "q", "subjects": ["q.>"], "consumers": CONSUMERS, "events": "q-events", "dead_letters": "q-dlq"}
BARE = {"name": "bare", "subjects": ["bare.>"], "consumers": [{"name": "w", "max_deliver": 2}]}
DIVIDED = {
    "name": "d",
    "subjects": ["d.>"],
    "consumers": [{"name": "w", "filter_subject": "d.*.{partition}", "partitions": 2, "max_deliver": 2}],
    "events": "d-events",
}
ADVISED = QUEUE | {"advisory_subjects": ["done.q.>"]}

PUBLISH = partial(JetStreamPublishOperator, task_id="t", work_queue=QUEUE, jobs=[], subject="q.mail.new")
WAIT = partial(PUBLISH, wait_for_completion=True)
REDRIVE = partial(JetStreamRedriveOperator, task_id="t", work_queue=QUEUE)
PROVISION = partial(JetStreamProvisionOperator, task_id="t", work_queue=QUEUE)
CANCEL = partial(JetStreamCancelOperator, task_id="t", work_queue=QUEUE)
REPORT = partial(JetStreamDeadLetterReportOperator, task_id="t", work_queue=QUEUE, directory="/reports")
LETTERS = partial(JetStreamDeadLetterSensor, task_id="t", work_queue=QUEUE)
DRAINED = partial(JetStreamQueueDrainedSensor, task_id="t", work_queue=QUEUE)
UNTYPED_QUEUE: Any = WorkQueue
WITHOUT_ZONE = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)
WRONG_NAME: Any = {7: "c"}
WRONG_VALUE: Any = {"A": 7}
POLLING: dict[str, Any] = {"nats_conn_id": "n", "work_queue": QUEUE, "poll_interval": 1.0, "deferred_at": 0.0}
LETTER_TRIGGER = partial(DeadLetterTrigger, min_count=1, **POLLING)
DRAINED_TRIGGER = partial(QueueDrainedTrigger, **POLLING)
JOBS_SENSOR = partial(JetStreamJobsSensor, task_id="t", handle="{{ ti.xcom_pull('publish') }}")
CURSOR: dict[str, Any] = {
    "queue": "q",
    "created": "2026-01-01T00:00:00Z",
    "events": "e",
    "events_from": 1,
    "dead_letters": None,
    "dead_letters_from": 1,
}
HANDLE = {"cursor": CURSOR, "sequences": [[1, 2]]}
JOBS_TRIGGER = partial(
    JobCompletionTrigger,
    nats_conn_id="n",
    handle=HANDLE,
    tolerance={"max_dead": 0},
    deadline=1.0,
    deferred_at=1.0,
    summary={},
)
HOOK = JetStreamHook()


class Table:
    """Iterates over its columns, as a DataFrame does."""

    columns = ("id", "do")
    dtypes = ()

    def __iter__(self) -> Any:
        return iter(self.columns)


class Row(NamedTuple):
    """One wrong call.

    :param found: what its error says of what was found
    """

    call: Callable[..., object]
    arguments: dict[str, Any]
    found: str


async def asynchronous(letter: object) -> None:
    """Return a coroutine, which nobody awaits."""


async def asynchronous_jobs(ds: str) -> list[object]:
    return [ds]


async def yielding(letter: object) -> AsyncIterator[object]:
    yield letter


class AsynchronousCall:
    async def __call__(self, letter: object) -> None:
        """Return a coroutine."""


def without_parameter() -> None:
    """Take no letter."""


def with_two(letter: object, other: object) -> None:
    """Take more than a letter."""


def unknown_parameter(customer: str) -> list[object]:
    return [customer]


def positional(ds: str, /) -> list[object]:
    return [ds]


QUEUES = [
    Row(call, {"work_queue": value}, found)
    for call in (PUBLISH, REDRIVE, PROVISION, partial(CANCEL, job_ids="a"), REPORT, LETTERS, DRAINED)
    for value, found in (
        (None, "found None"),
        ("", "found ''"),
        (7, "found 7"),
        ({"name": "q"}, "stream q has no subjects"),
        (QUEUE | {"subject": "q.>"}, "no such field"),
        ("nowhere.yaml", "nowhere.yaml"),
        ("name: q\nsubjects: [q.>]\n" * 20, "found the text of a declaration"),
    )
]

CONNECTIONS = [
    Row(call, {"nats_conn_id": value}, f"found {value!r}")
    for call in (PUBLISH, REDRIVE, PROVISION, partial(CANCEL, job_ids="a"), REPORT, LETTERS, DRAINED)
    for value in (None, "", 7)
]

JOBS = [
    Row(PUBLISH, {"jobs": value}, found)
    for value, found in (
        ("abc", "found str"),
        (b"abc", "found bytes"),
        (bytearray(b"abc"), "found bytearray"),
        ({"id": 1}, "found dict"),
        (None, "found NoneType"),
        (7, "found int"),
        (Job(b"x"), "found Job"),
        ({1, 2}, "found set: a set drops equal jobs"),
        (frozenset({1}), "found frozenset"),
        (Table(), "found Table: iterating over a table gives the names of its columns"),
        (asynchronous_jobs, "which returns a coroutine"),
        (unknown_parameter, "found customer among those"),
        (positional, "found ds among those"),
        ([Job(b"x", subject="q.{part}.x")], "job 0 has the subject 'q.{part}.x'"),
        ([Job(b"x", subject="q.{partition}.x")], "job 0 has no partition_key"),
        ([b"a", Job(b"x", subject="q.*")], "job 1 can't be published to 'q.*'"),
        ([Job(b"x", subject="q..x")], "it has an empty token"),
        ([Job(b"x", subject="q.a b")], "white space"),
        ([Job(b"x", subject="other.x")], "job 0 can't be published to 'other.x'"),
        ([Job(b"x", partition_key="c")], "job 0 has the subject 'q.mail.new' and a partition_key"),
        ([b"{{ ds }}", Job({1, 2})], "job 1: expected a body of bytes, text or JSON values, found set"),
        ([{"at": WITHOUT_ZONE}], "job 0: expected a body"),
        ([float("nan")], "job 0: expected a body"),
        ([Job(b"x", headers={"Nats-Msg-Id": "a"})], "job 0 sets Nats-Msg-Id"),
        ([Job(b"x", headers={"a b": "c"})], "job 0 has a header 'a b'"),
        ([Job(b"x", headers=WRONG_NAME)], "job 0 has a header 7"),
        ([Job(b"x", headers=WRONG_VALUE)], "header A: expected text without line breaks, found 7"),
        ([Job(b"x", headers={"A": "b\nc"})], "without line breaks"),
        ([Job(b"x", id="a\nb")], "expected text in one line"),
        ([Job(b"x", id="x" * 20_000)], "has an id of 20000 bytes"),
        ([Job(b"x", id="a"), Job(b"y", id="a")], "jobs 0 and 1 both have the id 'a'"),
        ([Job(b"x", advisory="done.*")], "can't be reported on 'done.*'"),
        ([Job(b"x", delay="10m")], "job 0 has a schedule, and q takes none"),
        ([Job(b"{{ ds }}", subject="{{ ds }}"), Job(b"x", subject="q.*")], "job 1 can't be published"),
    )
] + [
    Row(partial(PUBLISH, work_queue=ADVISED), {"jobs": [Job(b"", advisory="other.a")]}, "outside of the queue"),
    Row(partial(PUBLISH, work_queue=DIVIDED), {"jobs": [Job(b"")], "subject": "d.a.{partition}"}, "no partition_key"),
    Row(
        partial(PUBLISH, work_queue=DIVIDED),
        {"jobs": [Job(b"", partition_key="a")], "subject": "d.a.b.{partition}"},
        "expected a subject on which a consumer of d has partitions",
    ),
    Row(partial(PUBLISH, work_queue=QUEUE | {"max_msg_size": 300}), {"jobs": [b"x" * 400]}, "job 0"),
    Row(PUBLISH, {"jobs": [b"x"], "subject": None}, "job 0 has no subject"),
]

SCHEDULED = partial(PUBLISH, work_queue=QUEUE | {"schedules": True})
SCHEDULES = [
    Row(SCHEDULED, {"jobs": [Job(b"x", **fields)]}, found)
    for fields, found in (
        ({"delay": 60}, "bare number is nanoseconds"),
        ({"delay": "soon"}, "found 'soon'"),
        ({"delay": "-1"}, "expected a delay of at least 0"),
        ({"delay": "1m", "every": "2m"}, "several of at, delay and every"),
        ({"at": WITHOUT_ZONE}, "with its time zone"),
        ({"at": "tomorrow"}, "found 'tomorrow'"),
        ({"every": "10ms", "id": "a"}, "at least a second"),
        ({"every": "*/5 * * * *", "id": "a"}, "six fields"),
        ({"every": "@daily"}, "give it an id"),
        ({"every": "0 0 0 31 2 *", "id": "a"}, "never comes"),
        ({"delay": "1m", "time_zone": "Europe/Vienna"}, "time zone with a cron expression only"),
        ({"every": "0 30 8 * * *", "time_zone": "Europe/Wien", "id": "a"}, "found 'Europe/Wien'"),
    )
] + [Row(SCHEDULED, {"jobs": [Job(b"x", delay="1m")], "wait_for_completion": True}, "can't be waited for")]

FIELDS = [
    Row(Job, {"body": b"", name: value}, f"found {value!r}")
    for name, values in {
        "subject": (7, "", b"q.a"),
        "id": (1.5, True, "", ["a"]),
        "advisory": (7, ""),
        "partition_key": (1.5, ""),
        "headers": (None, "a: b", [("a", "b")]),
    }.items()
    for value in values
]

LIMITS = [
    *(
        Row(WAIT, {name: value}, found)
        for name in ("max_dead", "max_cancelled", "max_unaccounted")
        for value, found in ((-1, "found -1"), (1.5, "found 1.5"), ("many", "found 'many'"), (True, "found True"))
    ),
    *(
        Row(WAIT, {"min_completed": value}, found)
        for value, found in (
            (0, "expected a whole number of at least 1 as min_completed, found 0"),
            (-3, "found -3"),
            ("0", "found '0'"),
            (2.5, "found 2.5"),
            (1, "found 0 jobs and 1"),
        )
    ),
    Row(WAIT, {"jobs": [b"a"], "min_completed": 2}, "found 1 jobs and 2"),
    Row(WAIT, {"jobs": [b"a"], "min_completed": "2"}, "found 1 jobs and 2"),
    Row(WAIT, {"jobs": [b"a"], "min_completed": 1, "max_dead": 3}, "expected min_completed alone"),
    Row(WAIT, {"jobs": [b"a"], "min_completed": "{{ params.n }}", "max_dead": 3}, "expected min_completed alone"),
    *(
        Row(WAIT, {"wait_timeout": value}, found)
        for value, found in (
            (0, "expected a duration above 0"),
            ("0", "above 0"),
            (timedelta(), "above 0"),
            (1e-9, "above 0"),
            (-1, "found -1"),
            (timedelta(hours=-1), "wait_timeout"),
            ("soon", "found 'soon'"),
            ("2 hours", "found '2 hours'"),
            (None, "found None"),
            (True, "found True"),
            (float("nan"), "found nan"),
            (float("inf"), "found inf"),
            ("100000d", "expected at most 3650 days"),
            (timedelta(days=999_999), "wait_timeout"),
            ([1], "found [1]"),
        )
    ),
    *(
        Row(call, {name: value}, f"expected {name} with wait_for_completion=True only")
        for call in (PUBLISH, REDRIVE)
        for name, value in {
            "max_dead": 3,
            "max_cancelled": None,
            "max_unaccounted": "{{ params.n }}",
            "min_completed": 1,
            "wait_timeout": "2h",
            "cancel_on_kill": True,
        }.items()
    ),
    Row(partial(WAIT, work_queue=BARE, subject="bare.x"), {}, "expected events"),
    Row(partial(REDRIVE, work_queue=BARE | {"dead_letters": "d"}), {"wait_for_completion": True}, "expected events"),
]

PUBLISHING = [
    Row(PUBLISH, {name: value}, found)
    for name, value, found in (
        ("subject", "", "found ''"),
        ("subject", 7, "found 7"),
        ("subject", "q.{part}.a", "expected {partition} as one of its tokens"),
        ("subject", "q.{partition}{partition}", "expected {partition}"),
        ("subject", "q.partition}", "expected {partition}"),
        ("subject", "q.>", "can't have wildcards"),
        ("subject", "q.mail. ", "white space"),
        ("rate", 0, "found 0"),
        ("rate", -5, "found -5"),
        ("rate", "fast", "found 'fast'"),
        ("rate", True, "found True"),
        ("rate", float("nan"), "found nan"),
        ("rate", float("inf"), "found inf"),
        ("room_timeout", "soon", "room_timeout"),
        ("room_timeout", -1, "room_timeout"),
        ("room_timeout", True, "room_timeout"),
        ("idempotency_key", "", "found that its template rendered to nothing"),
        ("idempotency_key", ["a"], "found ['a']"),
        ("idempotency_key", True, "found True"),
        ("subject", "other.mail", "expected a subject of q (q.>"),
        ("subject", "q.{partition}", "on which a consumer of q has partitions"),
        ("job_id", "", "found ''"),
        ("job_id", "{{ params.id }}", "takes no template"),
        ("job_id", 7, "found 7"),
        ("job_id", asynchronous, "which is asynchronous"),
        ("job_id", without_parameter, "expected a function that takes one value"),
        ("wait_for_completion", "no", "found 'no'"),
        ("wait_for_completion", "{{ params.wait }}", "takes no template"),
        ("cancel_on_kill", "false", "found 'false'"),
        ("deferrable", 1, "found 1"),
        ("jbos", [], "jbos"),
    )
] + [Row(partial(JetStreamPublishOperator, task_id="t", work_queue=QUEUE), {}, "jobs")]

REDRIVES = [
    Row(REDRIVE, {name: value}, found)
    for name, value, found in (
        ("select", 7, "found 7"),
        ("select", "everything", "found 'everything'"),
        ("select", {"reason": "terminated"}, "reason"),
        ("select", {"consumer": None}, "found None"),
        ("select", {"older_than": "soon"}, "found 'soon'"),
        ("select", {"older_than": -1}, "at least 0"),
        ("select", {"subject": "a..b"}, "selects nothing"),
        ("select", {"reasons": ["sleepy"]}, "reasons"),
        ("sequences", "first", "found 'first'"),
        ("sequences", [0], "found 0"),
        ("sequences", [[5, 3]], "found [5, 3]"),
        ("sequences", 1.5, "found 1.5"),
        ("sequences", [[1, 10**10]], "at most 10,000,000"),
        ("subject", 7, "found 7"),
        ("subject", "a.*", "can't have wildcards"),
        ("subject", "", "found ''"),
        ("subject", "q.{partition}", "braces would be part"),
        ("order_key", "", "found ''"),
        ("sequences", b"12", "found b'12'"),
        ("transform", "repair", "found str"),
        ("transform", asynchronous, "which is asynchronous"),
        ("transform", yielding, "which is asynchronous"),
        ("transform", AsynchronousCall(), "which is asynchronous"),
        ("transform", partial(asynchronous), "which is asynchronous"),
        ("transform", without_parameter, "expected a function that takes one value"),
        ("transform", with_two, "expected a function that takes one value"),
        ("rate", 0, "found 0"),
        ("rate", "fast", "found 'fast'"),
        ("protocol", "teleport", "found 'teleport'"),
        ("protocol", 7, "found 7"),
        ("max_redrives", -1, "found -1"),
        ("max_redrives", 1.5, "found 1.5"),
        ("max_redrives", True, "found True"),
        ("why", 7, "found 7"),
        ("lease_timeout", "soon", "lease_timeout"),
        ("lease_timeout", -1, "lease_timeout"),
        ("count_under_pause", "perhaps", "found 'perhaps'"),
        ("order_key", "customer", "expected header:<name>"),
        ("order_key", 7, "found 7"),
        ("target_queue", 7, "as target_queue, found 7"),
        ("target_queue", BARE, "expected a subject of bare"),
        ("dry_run", "false", "found 'false'"),
        ("dry_run", "{{ params.dry }}", "takes no template"),
        ("group_by", ["cause"], "found 'cause'"),
        ("group_by", 7, "found 7"),
        ("group_by", [["reason"]], "found ['reason']"),
        ("engine", "flink", "found 'flink'"),
        ("repair", len, 'with engine="spark" only'),
        ("letters", "/letters", 'with engine="spark" only'),
        ("spark_conn_id", "", "found ''"),
        ("wait_timeout", "soon", "found 'soon'"),
        ("max_dead", "many", "found 'many'"),
    )
] + [
    Row(partial(REDRIVE, engine="spark"), {name: value}, found)
    for name, value, found in (
        ("repair", 7, "found int"),
        ("repair", asynchronous, "which is asynchronous"),
        ("letters", 7, "found 7"),
        ("directory", 7, "found 7"),
        ("spark_conf", "no json", "expected properties"),
        ("spark_conf", {"executor.memory": "2g"}, "found 'executor.memory'"),
        ("spark_conf", {"spark.master": "local"}, "expected no spark.master"),
        ("sequences", [1], "expected no sequences"),
        ("count_under_pause", True, "expected no count under a pause"),
        ("transform", len, "found transform"),
    )
]

OTHERS = [
    Row(call, {name: value}, found)
    for call, name, value, found in (
        (PROVISION, "dry_run", "false", "found 'false'"),
        (PROVISION, "drain", 1, "found 1"),
        (CANCEL, "job_ids", {"a": 1}, "found {'a': 1}"),
        (CANCEL, "job_ids", [1.5], "found 1.5"),
        (CANCEL, "job_ids", [True], "found True"),
        (CANCEL, "job_ids", ["a", ""], "found ''"),
        (CANCEL, "job_ids", "", "found ''"),
        (CANCEL, "job_ids", None, "found none of them"),
        (CANCEL, "jobs", 7, "found int"),
        (CANCEL, "jobs", {1}, "found set"),
        (CANCEL, "jobs", asynchronous_jobs, "which returns a coroutine"),
        (CANCEL, "sequences", "first", "found 'first'"),
        (CANCEL, "sequences", [-1], "found -1"),
        (partial(CANCEL, job_ids="a"), "sequences", [1], "found job_ids and sequences"),
        (partial(CANCEL, job_ids="a"), "why", 7, "found 7"),
        (partial(CANCEL, job_ids="a"), "work_queue", BARE, "expected events"),
        (CANCEL, "jobs", [b"without an id"], "job 0 has no id to cancel it by"),
        (REDRIVE, "work_queue", BARE, "expected dead_letters"),
        (REPORT, "work_queue", BARE, "expected dead_letters"),
        (LETTERS, "work_queue", BARE, "expected dead_letters"),
        (partial(DRAINED, nothing_dead=True), "work_queue", BARE, "expected dead_letters"),
        (REPORT, "directory", "", "found ''"),
        (REPORT, "directory", None, "found None"),
        (REPORT, "directory", "s3a://bucket/reports", "expected page_directory"),
        (REPORT, "page_directory", 7, "found 7"),
        (REPORT, "served_at", 7, "found 7"),
        (REPORT, "select", "everything", "found 'everything'"),
        (REPORT, "spark_conf", [1], "expected properties"),
        (REPORT, "spark_conn_id", None, "found None"),
        (LETTERS, "select", {"nothing": 1}, "nothing"),
        (LETTERS, "min_count", 0, "found 0"),
        (LETTERS, "min_count", "many", "found 'many'"),
        (LETTERS, "min_count", None, "found None"),
        (LETTERS, "min_count", 1.5, "found 1.5"),
        (LETTERS, "older_than", "soon", "found 'soon'"),
        (LETTERS, "older_than", timedelta(seconds=-1), "older_than"),
        (LETTERS, "older_than", -1, "older_than"),
        (LETTERS, "group_by", 7, "found 7"),
        (LETTERS, "group_by", "cause", "found 'cause'"),
        (LETTERS, "count_under_pause", "perhaps", "found 'perhaps'"),
        (LETTERS, "deferrable", "no", "found 'no'"),
        (LETTERS, "mode", "push", "push"),
        (LETTERS, "poke_interval", -1, "poke_interval"),
        (DRAINED, "consumers", [], "found []"),
        (DRAINED, "consumers", 7, "found 7"),
        (DRAINED, "consumers", {"mail": 1}, "found {'mail': 1}"),
        (DRAINED, "consumers", [7], "found [7]"),
        (DRAINED, "consumers", [["mail"]], "found [['mail']]"),
        (DRAINED, "consumers", "", "expected names of consumers"),
        (DRAINED, "nothing_dead", "no", "found 'no'"),
        (LETTER_TRIGGER, "min_count", 0, "found 0"),
        (LETTER_TRIGGER, "min_count", "many", "found 'many'"),
        (LETTER_TRIGGER, "select", {"nothing": 1}, "nothing"),
        (LETTER_TRIGGER, "older_than", -1, "older_than"),
        (LETTER_TRIGGER, "group_by", ["cause"], "found 'cause'"),
        (LETTER_TRIGGER, "count_under_pause", "yes", "found 'yes'"),
        (LETTER_TRIGGER, "nats_conn_id", None, "found None"),
        (LETTER_TRIGGER, "work_queue", 7, "found 7"),
        (LETTER_TRIGGER, "poll_interval", 0, "found 0"),
        (LETTER_TRIGGER, "poll_interval", "1s", "found '1s'"),
        (DRAINED_TRIGGER, "consumers", 7, "found 7"),
        (DRAINED_TRIGGER, "nothing_dead", None, "found None"),
    )
]

WAITS = [
    Row(call, {name: value}, found)
    for call, name, value, found in (
        (WAIT, "on_stall", "retry", "found 'retry'"),
        (WAIT, "on_stall", None, "found None"),
        (WAIT, "reconcile", 0, "found 0"),
        (WAIT, "reconcile", -1, "reconcile"),
        (WAIT, "reconcile", "soon", "found 'soon'"),
        (WAIT, "defer_after", -1, "defer_after"),
        (WAIT, "defer_after", "soon", "found 'soon'"),
        (WAIT, "defer_after", True, "defer_after"),
        (PUBLISH, "defer_after", 3, "found it without"),
        (JOBS_SENSOR, "defer_after", [], "defer_after"),
        (WAIT, "returns", "letters", "found 'letters'"),
        (partial(JOBS_SENSOR, mode="reschedule"), "cancel_on_kill", True, "deferrable=True or mode='poke'"),
        (partial(JOBS_SENSOR, soft_fail=True), "never_fail", True, "mutually exclusive"),
        (PUBLISH, "returns", "jobs", "expected wait_for_completion=True"),
        (JOBS_SENSOR, "handle", None, "found None"),
        (JOBS_SENSOR, "handle", 7, "found 7"),
        (JOBS_SENSOR, "handle", {"queue": "q"}, "found {'queue': 'q'}"),
        (JOBS_SENSOR, "max_dead", "many", "found 'many'"),
        (JOBS_SENSOR, "wait_timeout", "2h", "Invalid arguments were passed to JetStreamJobsSensor"),
        (JOBS_SENSOR, "work_queue", QUEUE, "Invalid arguments were passed to JetStreamJobsSensor"),
        (JOBS_SENSOR, "wait_for_completion", True, "Invalid arguments were passed to JetStreamJobsSensor"),
        (JOBS_SENSOR, "timeout", "2h", "`timeout` must be timedelta object or a non-negative number"),
        (JOBS_SENSOR, "poke_interval", -1, "`poke_interval` must be timedelta object or a non-negative number"),
        (JOBS_SENSOR, "mode", "wait", "The mode must be one of"),
        (JOBS_SENSOR, "on_stall", "retry", "found 'retry'"),
        (JOBS_SENSOR, "nats_conn_id", 7, "found 7"),
        (JOBS_TRIGGER, "nats_conn_id", None, "found None"),
        (JOBS_TRIGGER, "handle", None, "found None"),
        (JOBS_TRIGGER, "handle", {"cursor": {"queue": "q"}}, "expected the handle"),
        (JOBS_TRIGGER, "handle", HANDLE | {"sequences": None}, "expected the handle"),
        (JOBS_TRIGGER, "handle", HANDLE | {"sequences": [[2, 1]]}, "expected the handle"),
        (JOBS_TRIGGER, "handle", HANDLE | {"sequences": [1]}, "expected the handle"),
        (JOBS_TRIGGER, "handle", HANDLE | {"cursor": CURSOR | {"events_from": "1"}}, "expected the handle"),
        (JOBS_TRIGGER, "tolerance", None, "found None"),
        (JOBS_TRIGGER, "tolerance", {"max_lost": 1}, "'max_lost'"),
        (JOBS_TRIGGER, "tolerance", {"max_dead": -1}, "found -1"),
        (JOBS_TRIGGER, "stalls", "wait", "expected a dict as stalls, found 'wait'"),
        (JOBS_TRIGGER, "stalls", {"on_stall": "ignore"}, "found 'ignore'"),
        (JOBS_TRIGGER, "stalls", {"on_stall": None}, "found None"),
        (JOBS_TRIGGER, "stalls", {"on_stall": ["fail"]}, "found ['fail']"),
        (JOBS_TRIGGER, "stalls", {"on_stal": "fail"}, "'on_stal'"),
        (JOBS_TRIGGER, "stalls", {"reconcile": 0}, "above 0 as reconcile, found 0"),
        (JOBS_TRIGGER, "stalls", {"reconcile": float("nan")}, "as reconcile, found nan"),
        (JOBS_TRIGGER, "stalls", {"reconcile": "5m"}, "as reconcile, found '5m'"),
        (JOBS_TRIGGER, "stalls", {"reconcile": True}, "as reconcile, found True"),
        (JOBS_TRIGGER, "deadline", "soon", "found 'soon'"),
        (JOBS_TRIGGER, "deadline", float("nan"), "found nan"),
        (JOBS_TRIGGER, "deferred_at", None, "found None"),
        (JOBS_TRIGGER, "summary", None, "found None"),
        (JOBS_TRIGGER, "cancel_on_kill", "no", "found 'no'"),
    )
]

MAPPED = [
    Row(call, {"task_id": "t", "work_queue": QUEUE, name: value}, found)
    for call, name, value, found in (
        (JetStreamPublishOperator.partial, "subject", "q.>", "can't have wildcards"),
        (JetStreamPublishOperator.partial, "max_dead", 3, "with wait_for_completion=True only"),
        (JetStreamPublishOperator.partial, "wait_timeout", "soon", "found 'soon'"),
        (JetStreamPublishOperator.partial, "jobs", {1}, "found set"),
        (JetStreamPublishOperator.partial, "jobs", [Job(b"", subject="q.*")], "job 0 can't be published"),
        (JetStreamPublishOperator.partial, "work_queue", "nowhere.yaml", "nowhere.yaml"),
        (JetStreamRedriveOperator.partial, "transform", asynchronous, "which is asynchronous"),
        (JetStreamRedriveOperator.partial, "rate", 0, "found 0"),
    )
]

HOOKS = [
    Row(call, arguments, found)
    for call, arguments, found in (
        (HOOK.publish, {"jobs": "abc"}, "found str"),
        (HOOK.publish, {"jobs": {1}}, "found set"),
        (HOOK.publish, {"jobs": len}, "found builtin_function_or_method"),
        (HOOK.publish, {"jobs": [], "subject": "q.*"}, "can't have wildcards"),
        (HOOK.publish, {"jobs": [], "subject": "q.{part}"}, "expected {partition}"),
        (HOOK.publish, {"jobs": [], "rate": "fast"}, "found 'fast'"),
        (HOOK.publish, {"jobs": [], "rate": 0}, "found 0"),
        (HOOK.publish, {"jobs": [], "room_timeout": "soon"}, "room_timeout"),
        (HOOK.publish, {"jobs": [], "origin": "dag"}, "expected an Origin"),
        (HOOK.publish, {"jobs": [], "queue": 7}, "found 7"),
        (HOOK.cancel, {"queue": QUEUE, "job_id": None}, "found None"),
        (HOOK.cancel, {"queue": QUEUE, "job_id": ["a"]}, "found ['a']"),
        (HOOK.cancel, {"queue": QUEUE, "job_id": "a", "why": 7}, "found 7"),
        (HOOK.plan, {"queue": "nowhere.yaml"}, "nowhere.yaml"),
        (HOOK.plan, {"queue": QUEUE, "drain": "no"}, "found 'no'"),
        (HOOK.provision, {"queue": None}, "found None"),
        (HOOK.provision, {"queue": {"name": "q"}}, "stream q has no subjects"),
        (HOOK.check_drained, {"queue": QUEUE, "consumers": 7}, "found 7"),
        (HOOK.check_drained, {"queue": QUEUE, "nothing_dead": "no"}, "found 'no'"),
        (HOOK.discover_queue, {"name": None}, "found None"),
        (HOOK.discover_queue, {"name": "a b"}, "white space"),
        (HOOK.discover_queue, {"name": "a.b"}, "it has a dot"),
        (HOOK.find_dead_letters, {"queue": QUEUE, "selection": {"nothing": 1}}, "nothing"),
        (HOOK.find_dead_letters, {"queue": QUEUE, "selection": "all"}, "found 'all'"),
        (HOOK.find_dead_letters, {"queue": QUEUE, "count_under_pause": "no"}, "found 'no'"),
        (HOOK.scan_dead_letters, {"queue": QUEUE, "group_by": ["cause"]}, "found 'cause'"),
        (HOOK.scan_dead_letters, {"queue": QUEUE, "group_by": 7}, "found 7"),
        (HOOK.redrive, {"queue": QUEUE, "request": {"rate": 5}}, "found {'rate': 5}"),
        (HOOK.preview_redrive, {"queue": QUEUE, "request": "all"}, "found 'all'"),
        (HOOK.preview_redrive, {"queue": QUEUE, "group_by": ["cause"]}, "found 'cause'"),
    )
]

DECLARATIONS = [
    Row(call, arguments, found)
    for call, arguments, found in (
        (RedriveRequest, {"selection": {"consumer": "mail"}}, "expected a Selection as selection"),
        (RedriveRequest, {"subject": 7}, "found 7"),
        (RedriveRequest, {"rate": "5"}, "found '5'"),
        (RedriveRequest, {"rate": True}, "found True"),
        (RedriveRequest, {"protocol": "teleport"}, "found 'teleport'"),
        (RedriveRequest, {"protocol": None}, "found None"),
        (RedriveRequest, {"max_redrives": "3"}, "found '3'"),
        (RedriveRequest, {"lease_timeout": "1 minute"}, "found '1 minute'"),
        (RedriveRequest, {"transform": "repair"}, "found str"),
        (RedriveRequest, {"transform": asynchronous}, "which is asynchronous"),
        (RedriveRequest, {"target": QUEUE, "subject": "q.a"}, "found dict"),
        (RedriveRequest, {"order_key": 7}, "found 7"),
        (RedriveRequest, {"who": "me"}, "found 'me'"),
        (RedriveRequest, {"why": 7}, "found 7"),
        (RedriveRequest, {"run": 7}, "found 7"),
        (RedriveRequest, {"count_under_pause": "no"}, "found 'no'"),
        (RedriveRequest, {"subjct": "q.a"}, "found: got an unexpected keyword argument 'subjct'"),
        (Repair, {"boddy": b""}, "'boddy'"),
        (Job, {}, "found: missing 1 required positional argument: 'body'"),
        (Job, {"body": b"", "partition": "a"}, "unexpected keyword argument 'partition'"),
        (WaitPolicy, {"max_dead": -1}, "found -1"),
        (WaitPolicy, {"max_dead": "3"}, "found '3'"),
        (WaitPolicy, {"max_cancelled": True}, "found True"),
        (WaitPolicy, {"min_completed": 0}, "found 0"),
        (WaitPolicy, {"max_lost": 0}, "'max_lost'"),
        (Selection, {"nothing": 1}, "nothing"),
        (Selection, {"sequences": "abc"}, "sequences"),
        (Selection, {"sequences": [0]}, "found 0"),
        (Selection, {"sequences": [True]}, "found True"),
        (Selection, {"error_class": 7}, "error_class"),
        (Selection, {"older_than": "-5m"}, "found '-5m'"),
        (Selection, {"older_than": "2d", "younger_than": "1d"}, "selects nothing"),
        (Selection, {"parked": "perhaps"}, "parked"),
        (partial(UNTYPED_QUEUE, "q"), {}, "expected its fields by name, found 'q'"),
        (partial(Selection, "all"), {}, "by name, such as Selection(consumer=…), found 'all'"),
        (WorkQueue, {}, "name"),
        (WorkQueue, {"name": 7, "subjects": ["q.>"]}, "name"),
        (WorkQueue, BARE | {"consumers": "w"}, "consumers"),
        (WorkQueue, BARE | {"consumers": [{"name": "w", "max_deliver": "x"}]}, "max_deliver"),
        (WorkQueue, BARE | {"max_age": "soon"}, "found 'soon'"),
        (WorkQueue, BARE | {"storage": "tape"}, "storage"),
        (WorkQueue, BARE | {"num_replicas": 9}, "num_replicas"),
        (WorkQueue, BARE | {"subjects": ["a..b"]}, "a..b"),
    )
]

TABLE = [
    *QUEUES,
    *CONNECTIONS,
    *JOBS,
    *SCHEDULES,
    *LIMITS,
    *PUBLISHING,
    *REDRIVES,
    *OTHERS,
    *WAITS,
    *MAPPED,
    *HOOKS,
    *DECLARATIONS,
]


def _name(row: Row) -> str:
    called = row.call
    while isinstance(called, partial):
        called = called.func
    # The workers of a parallel run have to agree on the name: an address in memory would differ.
    values = ((name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))) for name, value in row.arguments.items())
    shown = ", ".join(f"{name}={value}"[:60] for name, value in values)
    return f"{getattr(called, '__qualname__', called)}({shown})"


@pytest.mark.parametrize("row", [*TABLE, *FIELDS], ids=_name)
def test_a_wrong_argument_is_refused(row: Row) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one it may be is what is tested
        row.call(**row.arguments)
    error = raised.value
    is_airflows = isinstance(error, AirflowException) or "airflow/sdk" in str(raised.traceback[-1].path)
    assert isinstance(error, JetStreamProviderError) or is_airflows, repr(error)
    # Those who catch Python's own errors catch it too.
    assert isinstance(error, ValueError | LookupError) or is_airflows, repr(error)
    assert row.found in str(error)
