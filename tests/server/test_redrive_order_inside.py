"""What no face shows of redrive order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    find_dead_letters,
)
from airflow_provider_jetstream.jetstream.redrive.key_order import key_of
from testbed.queues import (
    exhaust_deliveries,
    make_queue,
    publish_jobs,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order_key", "keys"),
    [
        ("header:Customer", ["ann", "ann", None]),
        ("subject:3", ["plain", "plain", "other"]),
        ("subject:4", [None, None, None]),
        ("body:customer", ["7", "7", None]),
    ],
)
async def test_where_a_key_is_stated(
    connection: NatsPyConnection, name: str, order_key: str, keys: list[str | None]
) -> None:
    queue = await make_queue(connection, name)
    for body in (json.dumps({"customer": 7}), json.dumps({"customer": "7"})):
        await publish_jobs(connection, queue, [body], headers={"Customer": "ann"})
    await publish_jobs(connection, queue, ["[" * 100_000], kind="other", headers={"customer": "ann"})
    await exhaust_deliveries(connection, queue, 3)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [key_of(letter, order_key) for letter in letters] == keys
