from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_ORDERS = Path(__file__).parents[2] / "example_dags" / "queues" / "orders.yaml"
_MAX = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"

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


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"- name: q", "expected a mapping with name, subjects, consumers…, found list"),
        (b"", "expected a mapping with name, subjects, consumers…, found NoneType"),
        (b"just text", "expected a mapping with name, subjects, consumers…, found str"),
        (b"name: q\non: x", "expected names of fields, found True: quote it"),
        (b"1: x", "expected names of fields, found 1: quote it"),
        (b"name: [unclosed", "expected YAML, found something else: while parsing a flow sequence"),
        (b"name: !!python/object:os.system x", "expected values without tags, found 'tag:yaml.org,2002:python/object"),
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


_BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (name, name, b", ".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghi"
)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (_BOMB + b"name: q\nstorage: *i", "expected at most 20000 values, with those of aliases, found more"),
        (b"name: q\nmetadata: &a {b: *a}", "expected an anchor before its alias, found *a within it"),
        (b"name: q\nconsumers: " + b"[" * 100_000, "expected at most 20 levels, found more"),
        (b"a:\n" + b"".join(b" " * depth + b"a:\n" for depth in range(1, 600)), "expected at most 20 levels"),
        (b"# comment\n" * 30_000, "expected a queue's file of at most 262144 bytes, found more"),
        (b"name: q\nmax_msgs: 1" + b":1" * 120_000, "expected a number of at most 64 characters, found '1:1:1"),
        (b"- a\n" * 25_000, "expected at most 20000 values"),
        (b'name: "\\ud800"', "expected YAML, found something else"),
        (b"name: q\nmax_msgs: " + b"9" * 5_000, "expected YAML, found something else: Exceeds the limit"),
        (b"name: q\nmax_age: 2026-13-45", "expected YAML, found something else: month must be in 1..12"),
        (b"name: q\nmax_age: 99999999999w", 'max_age: expected a duration such as "30s", of at most 292 years, found'),
        (b"name: q\nstorage: [[file]]", "storage: Input should be 'file' or 'memory'"),
        (b"name: q\nnum_replicas: " + b"9" * 4_000, "num_replicas: "),
        (b"name: [q]", "name: Input should be a valid string"),
    ],
    ids=range(14),
)
def test_a_file_of_somebody_hostile_is_refused_at_once(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "queue.yaml"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(QueueDeclarationError) as caught:
        WorkQueue.load(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(found.startswith(problem) for found in caught.value.problems), caught.value.problems
    assert len(str(caught.value).encode()) < 3_000
    # It took 3 GiB, and 52 s.
    assert most < 64 << 20


def test_text_that_no_server_takes_is_refused() -> None:
    with pytest.raises(QueueDeclarationError, match="expected text that UTF-8 can encode") as caught:
        WorkQueue(name="q\ud800", subjects="q.>", description="\udfff", metadata={"\ud800": "x"})
    str(caught.value).encode()
    assert len(caught.value.problems) == 3
