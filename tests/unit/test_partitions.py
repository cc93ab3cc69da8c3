from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import prepare_jobs
from airflow_provider_jetstream.jetstream.queue.partitions import partition_of
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The test vectors of docs/contracts.md: the key, its FNV-1a, its partition of 4 and of 10.
VECTORS = [
    ("", 2166136261, 1, 1),
    ("a", 3826002220, 0, 0),
    ("email", 2324124615, 3, 5),
    ("customer-17", 4084557920, 0, 0),
    ("grün", 1616422199, 3, 9),
    ("日本", 2670128721, 1, 1),
]


def _queue(**changes: Any) -> WorkQueue:
    worker = {"name": "worker", "filter_subject": "tasks.{partition}.>", "partitions": 4, "max_deliver": 5}
    return WorkQueue(name="TASKS", subjects=["tasks.>"], consumers=[worker | changes])


@pytest.mark.parametrize(("key", "digest", "of_4", "of_10"), VECTORS)
def test_the_hash_is_the_documented_one(key: str, digest: int, of_4: int, of_10: int) -> None:
    assert partition_of(key, 2**32) == digest
    assert (partition_of(key, 4), partition_of(key.encode(), 10)) == (of_4, of_10)


def test_the_documented_vectors_are_the_tested_ones() -> None:
    contracts = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")
    for key, *numbers in VECTORS:
        shown = f"`{key}`" if key else "(empty)"
        assert f"| {shown} | {' | '.join(map(str, numbers))} |" in contracts


def test_keys_spread_over_the_partitions_and_there_is_at_least_one() -> None:
    counts = Counter(partition_of(f"customer-{number}", 8) for number in range(8_000))
    assert sorted(counts) == list(range(8))
    assert all(800 < count < 1_200 for count in counts.values())
    assert {partition_of(f"{number}", 1) for number in range(50)} == {0}
    with pytest.raises(ValueError, match="expected at least 1 partition, found 0"):
        partition_of("a", 0)


def test_one_line_declares_the_consumers_of_all_partitions() -> None:
    queue = _queue(metadata={"team": "mail"}, backoff=["1s", "2s"])
    assert [(consumer.name, consumer.filter_subjects) for consumer in queue.consumers] == [
        (f"worker-{number}", (f"tasks.{number}.>",)) for number in range(4)
    ]
    config = queue.consumer("worker-3").config()
    assert (config["filter_subject"], config["max_deliver"]) == ("tasks.3.>", 5)
    assert config["metadata"] == {"team": "mail", "partitions": "4"}
    assert WorkQueue(**json.loads(json.dumps(queue.model_dump(mode="json", exclude_unset=True)))) == queue


def test_a_dead_letter_queue_may_have_consumers_in_partitions_too() -> None:
    handler = {"name": "handler", "filter_subject": "dead.q.{partition}.*", "partitions": 2, "max_deliver": 3}
    letters = {"name": "dead", "retention": "workqueue", "consumers": [handler]}
    queue = WorkQueue(name="q", subjects=["q.>"], dead_letters=letters)
    assert queue.dead_letters is not None
    assert [consumer.name for consumer in queue.dead_letters.consumers] == ["handler-0", "handler-1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"filter_subject": "tasks.>"},
            "'tasks.>' of consumer worker, which has partitions: expected {partition} as one",
        ),
        ({"filter_subject": "tasks.p{partition}.>"}, "expected {partition} as one of its tokens, once"),
        ({"filter_subject": "{partition}.{partition}"}, "expected {partition} as one of its tokens, once"),
        (
            {"filter_subjects": [], "filter_subject": ...},
            "consumer worker has partitions and no filter subject: give it",
        ),
        ({"partitions": None}, "filter subject 'tasks.{partition}.>' of consumer worker needs partitions"),
        ({"partitions": 0}, "partitions: Input should be greater than or equal to 1"),
        ({"partitions": 1001}, "partitions: Input should be less than or equal to 1000"),
        (
            {"partition": 4, "filter_subject": "tasks.4.>"},
            "expected partition 4 to be one of its partitions and the end",
        ),
        ({"partition": 1, "filter_subject": "tasks.1.>"}, "declare partitions only, and the partition follows"),
        ({"partition": 1, "partitions": None, "filter_subject": "tasks.1.>"}, "expected partition 1 to be one of its"),
    ],
)
def test_invalid_partitions_are_refused(changes: dict[str, Any], message: str) -> None:
    worker = {"name": "worker", "filter_subject": "tasks.{partition}.>", "partitions": 4, "max_deliver": 5} | changes
    worker = {field: value for field, value in worker.items() if value is not ...}
    with pytest.raises(QueueDeclarationError) as caught:
        WorkQueue(name="TASKS", subjects=["tasks.>"], consumers=[worker])
    assert message in str(caught.value)


def test_partitions_that_overlap_with_another_consumer_are_refused() -> None:
    worker = {"name": "worker", "filter_subject": "tasks.{partition}.>", "partitions": 2, "max_deliver": 5}
    other = {"name": "other", "filter_subject": "tasks.1.email", "max_deliver": 5}
    with pytest.raises(QueueDeclarationError, match=r"tasks\.1\.> \(consumer worker-1\) and tasks\.1\.email"):
        WorkQueue(name="TASKS", subjects=["tasks.>"], consumers=[worker, other])


def _subjects(*jobs: object, subject: str | None = "tasks.{partition}.email", queue: WorkQueue | None) -> list[str]:
    return [job.subject for job in prepare_jobs(jobs, subject=subject, origin=None, batch="b", queue=queue)]


def test_the_partition_of_the_key_replaces_the_placeholder_in_the_subject() -> None:
    jobs = [Job(b"", partition_key="customer-17"), Job(b"", "tasks.{partition}.resize.big", partition_key="a")]
    number = partition_of("customer-17", 4)
    assert _subjects(*jobs, queue=_queue()) == [f"tasks.{number}.email", "tasks.0.resize.big"]
    assert _subjects(Job(b"", "tasks.9.email"), queue=_queue()) == ["tasks.9.email"]


def test_each_subject_has_the_number_of_partitions_of_its_consumer() -> None:
    few = {"name": "few", "filter_subject": "few.{partition}.>", "partitions": 2, "max_deliver": 1}
    many = {"name": "many", "filter_subject": "many.{partition}.>", "partitions": 50, "max_deliver": 1}
    queue = WorkQueue(name="q", subjects=["few.>", "many.>"], consumers=[few, many])
    jobs = [Job(b"", f"{kind}.{{partition}}.x", partition_key="customer-17") for kind in ("few", "many")]
    assert _subjects(*jobs, queue=queue) == [
        f"few.{partition_of('customer-17', 2)}.x",
        f"many.{partition_of('customer-17', 50)}.x",
    ]


@pytest.mark.parametrize(
    ("job", "queue", "message"),
    [
        (Job(b""), _queue(), "job 0 has no partition_key, which 'tasks.{partition}.email' needs: set it on the job"),
        (
            Job(b"", "tasks.1.x", partition_key="a"),
            _queue(),
            "job 0 has the subject 'tasks.1.x' and a partition_key",
        ),
        (Job(b"", partition_key="a"), None, "job 0 has a partition_key: pass the queue too"),
        (
            Job(b"", "other.{partition}.x", partition_key="a"),
            _queue(),
            "no consumer of TASKS has partitions on that subject",
        ),
    ],
)
def test_a_job_whose_partition_is_unknown_is_refused(job: Job, queue: WorkQueue | None, message: str) -> None:
    with pytest.raises(JobError) as caught:
        _subjects(job, queue=queue)
    assert message in str(caught.value)
