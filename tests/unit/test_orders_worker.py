from __future__ import annotations

import pytest

from airflow_provider_jetstream.worker import Delivery, GiveUpError
from example_workers.orders import OrderFailedError, process

ORDERS = [f"order-{number}" for number in range(20)]


def delivery(order: str, attempt: int = 1, **headers: str) -> Delivery:
    return Delivery(order, "orders.new", order.encode(), headers, int(order.split("-")[1]) + 1, attempt)


def succeeds(job: Delivery) -> bool:
    try:
        process(job)
    except OrderFailedError:
        return False
    return True


def test_about_half_of_the_attempts_fail_and_always_the_same_ones() -> None:
    attempts = [delivery(order, attempt) for order in ORDERS for attempt in (1, 2)]
    first = [succeeds(job) for job in attempts]
    assert 10 <= sum(first) <= 30
    assert [succeeds(job) for job in attempts] == first


def test_an_order_that_was_redriven_succeeds_whatever_its_attempt() -> None:
    assert all(succeeds(delivery(order, attempt, **{"Redrive-Count": "1"})) for order in ORDERS for attempt in (1, 2))


def test_an_invalid_order_is_given_up() -> None:
    with pytest.raises(GiveUpError, match="expected an order as text, found something else"):
        process(Delivery("1", "orders.new", b"\xff", {}, 1, 1))
