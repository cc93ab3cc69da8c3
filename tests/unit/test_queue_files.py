from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_ORDERS = Path(__file__).parents[2] / "example_dags" / "queues" / "orders.yaml"
_MAX = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
_TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"

_JOBS: dict[str, Any] = {
    "name": "jobs",
    "subjects": ["jobs.*.*"],
    "storage": "file",
    "num_replicas": 1,
    "discard": "new",
    "max_msgs": 20_000,
    "max_msgs_per_subject": -1,
    "max_bytes": "256MB",
    "max_age": "7d",
    "max_msg_size": -1,
    "duplicate_window": "2m0s",
    "allow_rollup_hdrs": False,
    "deny_delete": False,
    "deny_purge": False,
    "consumers": [
        {"name": "high", "filter_subject": "jobs.high.*", "max_deliver": 3},
        {"name": "low", "filter_subject": "jobs.low.*", "max_deliver": 3},
    ],
    "dead_letters": {"name": "jobs_dlq", "subjects": [f"{_MAX}.jobs.*"], "metadata": {"dead_letter_queue": "true"}},
}
_TASKS: dict[str, Any] = {
    "name": "TASKS",
    "subjects": ["tasks.>"],
    "storage": "file",
    "consumers": [{"name": "worker", "max_deliver": -1}],
}
_PARTITIONED: dict[str, Any] = _TASKS | {
    "consumers": [
        {"name": f"worker-{partition}", "filter_subject": f"tasks.{partition}.>", "max_deliver": 5}
        for partition in range(2)
    ]
}
_IMAGES: dict[str, Any] = {
    "name": "IMAGES",
    "subjects": ["IMAGES.>"],
    "storage": "file",
    "discard": "old",
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": -1,
    "max_msg_size": 512,
    "duplicate_window": "1h",
    "consumers": [
        {"name": "BW", "filter_subject": "IMAGES.blackandwhite", "max_deliver": 5, "ack_wait": "30s"},
    ],
}

_UNCAPTURED = ["dead-letters-not-captured"] * 3


@pytest.mark.parametrize(
    ("source", "warnings"),
    [
        (_JOBS, ["max-age", *_UNCAPTURED, "no-backoff", "no-backoff"]),
        (_TASKS, ["no-dead-letters", "no-max-deliver", "no-backoff"]),
        (_PARTITIONED, ["no-dead-letters", "no-backoff", "no-backoff"]),
        (_IMAGES, ["duplicate-window", "no-dead-letters", "no-backoff"]),
        (_ORDERS, [*_UNCAPTURED, "dead-letters-discard-new", "unmarked-dead-letters"]),
    ],
    ids=["jobs", "TASKS", "TASKS partitioned", "IMAGES", "orders"],
)
def test_the_queues_of_the_source_documents_are_valid_and_warn_of_their_risks(source: Any, warnings: list[str]) -> None:
    assert [warning.name for warning in WorkQueue.load(source).warnings()] == warnings


def test_the_jobs_queue_is_written_in_the_units_of_the_server() -> None:
    queue = WorkQueue.load(_JOBS)
    assert queue.dead_letters is not None
    assert queue.config() == {
        "name": "jobs",
        "subjects": ["jobs.*.*"],
        "retention": "workqueue",
        "storage": "file",
        "num_replicas": 1,
        "discard": "new",
        "max_msgs": 20_000,
        "max_msgs_per_subject": -1,
        "max_bytes": 268_435_456,
        "max_age": 604_800_000_000_000,
        "max_msg_size": -1,
        "duplicate_window": 120_000_000_000,
        "allow_rollup_hdrs": False,
        "deny_delete": False,
        "deny_purge": False,
        "republish": {"src": ">", "dest": "archive.jobs.>"},
    }
    assert queue.dead_letters.config()["metadata"] == {"dead_letter_queue": "true"}
    assert queue.dead_letters.config()["retention"] == "limits"


def test_a_queue_that_drops_jobs_and_a_long_ack_wait_are_warned_of() -> None:
    queue = WorkQueue(
        name="q",
        subjects="q.>",
        discard="old",
        max_msgs=10,
        consumers=[{"name": "w", "max_deliver": 1, "ack_wait": "1h"}],
        dead_letters="q_dead",
    )
    dropping, slow = queue.warnings()
    assert dropping.startswith('discard "old" with a limit drops the oldest waiting jobs silently')
    assert 'use discard "new"' in dropping
    assert slow.startswith(
        "consumer w: an ack_wait of 1h delays the redelivery of a crashed worker's jobs by that time"
    )


def test_a_queue_of_names_alone_gets_streams_that_capture_all_ends() -> None:
    consumers = [{"name": "w", "max_deliver": 2, "backoff": ["5s"]}]
    queue = WorkQueue(
        name="q",
        subjects="q.>",
        consumers=consumers,
        dead_letters="dead",
        events="ends",
        discard="new",
        max_bytes="1GB",
    )
    assert queue.warnings() == []
    assert queue.dead_letters is not None
    assert queue.dead_letters.subjects == (f"{_MAX}.q.*", f"{_TERMINATED}.q.*", "dead.q.>", "parked.q.>")
    assert queue.dead_letters.metadata == {"dead_letter_queue": "true"}
    assert queue.events is not None
    metrics = "$JS.EVENT.METRIC.CONSUMER.ACK.q.*"
    assert queue.events.subjects == ("completed.q.>", "cancelled.q.>", "published.q.*", metrics)


def test_a_filter_wider_than_the_subjects_is_valid_while_it_gets_jobs() -> None:
    consumers = [{"name": "w", "filter_subject": "jobs.>", "max_deliver": 2}]
    queue = WorkQueue(name="q", subjects=["jobs.high.*", "jobs.low.*"], consumers=consumers)
    assert queue.consumer("w").filter_subjects == ("jobs.>",)


def test_loading_a_queue_returns_it() -> None:
    queue = WorkQueue.load(_JOBS)
    assert WorkQueue.load(queue) is queue


def test_a_missing_file_is_reported_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    with pytest.raises(QueueDeclarationError) as caught:
        WorkQueue.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.problems == ("expected a YAML file at this path, found: No such file or directory",)


def test_a_folder_instead_of_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(QueueDeclarationError, match="expected a YAML file at this path, found: Is a directory"):
        WorkQueue.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"- name: q", "expected a mapping with name, subjects, consumers…, found list"),
        (b"", "expected a mapping with name, subjects, consumers…, found NoneType"),
        (b"just text", "expected a mapping with name, subjects, consumers…, found str"),
        (b"name: q\non: x", "expected names of fields, found True: quote it"),
        (b"1: x", "expected names of fields, found 1: quote it"),
        (b"name: [unclosed", "expected YAML, found something else: while parsing a flow sequence"),
        (b"name: !!python/object:os.system x", "expected YAML, found something else: could not determine a constr"),
        (b"\xff\xfe\x00", "expected YAML, found something else:"),
    ],
)
def test_a_file_without_a_declaration_is_refused_with_what_it_holds(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "queue.yaml"
    path.write_bytes(content)
    with pytest.raises(QueueDeclarationError) as caught:
        WorkQueue.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize("source", [None, 5, ["q"], b"queue.yaml"])
def test_a_value_that_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(QueueDeclarationError, match=f"expected a mapping .* found {type(source).__name__}"):
        WorkQueue.load(source)
