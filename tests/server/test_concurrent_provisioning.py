"""Several processes that provision one queue at the same time."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, apply, connect, plan, provision
from airflow_provider_jetstream.jetstream.errors import TransientError
from testbed import seams

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, Plan
    from testbed.face import NatsPyConnection


def declared(name: str, size: str = "2MB", wait: str = "2s") -> WorkQueue:
    consumer = {"name": "worker", "filter_subject": f"{name}.{{partition}}", "partitions": 3, "max_deliver": 3}
    companions = {"dead_letters": f"{name}-dead", "events": f"{name}-events"}
    return WorkQueue(
        name=name, subjects=[f"{name}.>"], max_bytes=size, consumers=[consumer | {"ack_wait": wait}], **companions
    )


@pytest.mark.parametrize("theirs", [{"size": "1MB"}, {"wait": "1s"}], ids=["stream", "consumer"])
async def test_what_another_process_has_changed_since_the_plan_was_made_is_planned_again(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str]
) -> None:
    ours, plans = declared(name), count(1)

    async def plan_while_another_provisions(*arguments: Any, **options: Any) -> Plan:
        planned = await plan(*arguments, **options)
        if next(plans) == 1:
            await apply(connection, await plan(connection, declared(name, **theirs)))
        return planned

    monkeypatch.setattr(seams.APPLY_PLAN, plan_while_another_provisions)
    await provision(connection, ours)
    assert next(plans) == 3
    assert (await plan(connection, ours)).changes == ()


async def test_a_plan_that_another_process_has_overtaken_can_be_tried_again(
    connection: NatsPyConnection, name: str
) -> None:
    planned = await plan(connection, declared(name))
    await provision(connection, declared(name, wait="1s"))
    with pytest.raises(TransientError) as caught:
        await apply(connection, planned)
    assert str(caught.value).startswith(
        f"consumer {name}/worker-0 was changed by another process after the plan was made: consumer already exists"
        " (error 10148)"
    )


async def test_different_declarations_at_once_leave_one_of_them(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with connect(settings) as other:
        queues = [declared(name), declared(name, "1MB", "1s")]
        await asyncio.gather(*map(provision, (connection, other), queues))
    for queue in queues:
        await provision(connection, queue)
        assert (await plan(connection, queue)).changes == ()
