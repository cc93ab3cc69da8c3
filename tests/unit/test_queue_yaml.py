"""A declaration as YAML: it loads as an equal one, and reads like one written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_queue_files import _IMAGES, _JOBS, _ORDERS, _PARTITIONED, _TASKS

from airflow_provider_jetstream.jetstream.queue.declaration import Archive
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from pathlib import Path

_NAMES: dict[str, Any] = {"name": "q", "subjects": ["q.>"]}
_WORKER = {"name": "w", "max_deliver": 2}


_TWO_FILTERS: dict[str, Any] = {
    "name": "w",
    "filter_subjects": ["q.a.{partition}.0", "q.b.{partition}.x"],
    "partitions": 3,
    "max_deliver": 2,
}


def _divided(count: int, **fields: Any) -> dict[str, Any]:
    return {"name": "w", "filter_subject": "q.{partition}.>", "partitions": count, "max_deliver": 2} | fields


@pytest.mark.parametrize(
    "source",
    [
        _JOBS,
        _TASKS,
        _PARTITIONED,
        _IMAGES,
        _ORDERS,
        _NAMES,
        _NAMES | {"consumers": [_WORKER], "dead_letters": "d", "events": "e"},
        _NAMES | {"archive": True, "audit": "other"},
        _NAMES | {"archive": False, "audit": False},
        _NAMES | {"dead_letters": "d", "archive": False, "audit": False},
        _NAMES | {"dead_letters": "d", "archive": {"max_age": "7d"}, "audit": {"name": "a", "max_bytes": "3MB"}},
        _NAMES | {"dead_letters": {"name": "d", "metadata": None, "retention": "workqueue", "consumers": [_WORKER]}},
        _NAMES | {"archive": Archive(name="q-archive", max_bytes=3, discard="new"), "max_age": 0, "num_replicas": 3},
        _NAMES | {"schedules": True, "dead_letters": "d", "consumers": [_WORKER]},
        _NAMES | {"consumers": [_divided(1)]},
        _NAMES | {"consumers": [_divided(12, backoff=["1s", "1m30s"], sample_freq="50%", metadata={"a": "true"})]},
        _NAMES | {"consumers": [_divided(3) | {"filter_subject": "q.0.{partition}.0"}]},
        _NAMES | {"consumers": [_TWO_FILTERS]},
        _NAMES | {"consumers": [_divided(2), _WORKER | {"name": "other", "filter_subject": "q.x"}]},
        _NAMES | {"description": "\x85", "metadata": {"a\u2028b": " \u2029c\x85"}},
        _NAMES
        | {"description": "ü: \n#☃ \U0001f600", "metadata": {"on": "1", "": "x"}, "duplicate_window": 150_000_001},
    ],
)
def test_a_queue_loads_from_its_yaml_as_an_equal_one(source: Any, tmp_path: Path) -> None:
    queue = WorkQueue.load(source)
    path = tmp_path / "queue.yaml"
    path.write_text(queue.to_yaml(), encoding="utf-8")
    loaded = WorkQueue.load(path)
    assert loaded == queue
    # What isn't declared is left to the server, or taken over from the queue.
    assert loaded.model_fields_set == queue.model_fields_set
    for ours, theirs in zip(loaded.companions(), queue.companions(), strict=True):
        assert ours.model_fields_set == theirs.model_fields_set
    assert loaded.to_yaml() == queue.to_yaml()
