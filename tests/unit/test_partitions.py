from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.queue.declaration import partition_of
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


def _subjects(*jobs: object, subject: str | None = "tasks.{partition}.email", queue: WorkQueue | None) -> list[str]:
    return [job.subject for job in PreparedJobs(jobs, subject=subject, origin=None, batch="b", queue=queue)]


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
