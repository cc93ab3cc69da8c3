from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.provisioning.apply import plan, provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection


def _consumer(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": "w", "filter_subject": f"{name}.a", "max_deliver": 3} | changes


def _alone(name: str, **changes: Any) -> WorkQueue:
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [_consumer(name)]} | changes)


async def _consumer_config(connection: Connection, stream: str, name: str) -> dict[str, Any]:
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
    return config


_FILTERS: dict[str, Mapping[str, Any]] = {
    "one": {"filter_subject": "{}.a"},
    "another": {"filter_subject": "{}.b"},
    "a list": {"filter_subjects": ["{}.a", "{}.c"]},
    "none": {},
}


@pytest.mark.parametrize("after", _FILTERS)
@pytest.mark.parametrize("before", _FILTERS)
async def test_a_filter_is_changed_into_any_other_kind(
    connection: Connection, name: str, before: str, after: str
) -> None:
    def queue(kind: str) -> WorkQueue:
        filters = {
            field: [one.format(name) for one in value] if isinstance(value, list) else value.format(name)
            for field, value in _FILTERS[kind].items()
        }
        return _alone(name, consumers=[{"name": "w", "max_deliver": 3, **filters}])

    await provision(connection, queue(before))
    done = await provision(connection, queue(after))
    assert bool(done.changes) == (before != after)
    stored = await _consumer_config(connection, name, "w")
    expected = queue(after).consumer("w").config()
    for field in ("filter_subject", "filter_subjects"):
        assert stored.get(field) == expected.get(field)
    assert (await plan(connection, queue(after))).changes == ()


async def test_a_filter_written_as_a_list_of_one_is_the_same_filter(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[]))
    config = _alone(name).consumer("w").config()
    config["filter_subjects"] = [config.pop("filter_subject")]
    await connection.api(f"CONSUMER.CREATE.{name}.w", {"stream_name": name, "config": config, "action": "create"})
    assert (await plan(connection, _alone(name))).changes == ()


async def test_an_ack_wait_replaces_the_backoff_that_would_override_it(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[_consumer(name, backoff=["1s", "2s"])]))
    waiting = _alone(name, consumers=[_consumer(name, ack_wait="1m")])
    done = await provision(connection, waiting)
    assert "ack_wait: 1s → 1m\n    backoff: [1s, 2s] → unset" in str(done)
    stored = await _consumer_config(connection, name, "w")
    assert (stored["ack_wait"], stored.get("backoff")) == (60_000_000_000, None)
    assert (await plan(connection, waiting)).changes == ()
