"""The fixture that users' own tests have: a queue on a real server in two lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.testing import queue  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.testing import LiveQueue

DECLARED: dict[str, Any] = {
    "name": "orders",
    "subjects": ["orders.>"],
    "consumers": [{"name": "packer", "max_deliver": 1, "ack_wait": "5s"}],
    "dead_letters": "orders-dead",
    "events": "orders-events",
}


@pytest.mark.slow
def test_a_test_of_a_dag_has_a_queue_of_its_own(queue: Callable[[Any], LiveQueue]) -> None:  # noqa: F811
    orders = queue(DECLARED)
    publish = JetStreamPublishOperator(
        task_id="publish", work_queue=DECLARED, jobs=["one", "two"], subject="orders.new"
    )
    assert publish.execute(orders.context())["published"] == 2
    assert orders.bodies() == [b"one", b"two"]
    # As a retry of the same task in the same run.
    assert publish.execute(orders.context())["duplicates"] == 2
    assert publish.execute(orders.context(run_id="another"))["duplicates"] == 0

    def pack(job: Any) -> None:
        if job.body == b"two":
            raise ValueError("out of boxes")

    assert orders.work(pack) == {"completed": 2, "dead": 2}
    assert [(letter.body, letter.death.error_message) for letter in orders.dead_letters()] == [
        (b"two", "out of boxes"),
        (b"two", "out of boxes"),
    ]


async def test_the_next_test_finds_nothing_of_it_and_may_be_asynchronous(
    queue: Callable[[Any], LiveQueue],  # noqa: F811
) -> None:
    assert queue(DECLARED).bodies() == []
