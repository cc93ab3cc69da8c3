from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker import Delivery, GiveUpError
from example_workers.orders import LEDGER, OrderFailedError, process

if TYPE_CHECKING:
    from pathlib import Path

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


def test_some_orders_fail_both_deliveries_and_most_do_not() -> None:
    dead = [order for order in ORDERS if not any(succeeds(delivery(order, attempt)) for attempt in (1, 2))]
    assert 1 <= len(dead) < len(ORDERS) / 2


def test_an_order_that_was_redriven_succeeds_whatever_its_attempt() -> None:
    assert all(succeeds(delivery(order, attempt, **{"Redrive-Count": "1"})) for order in ORDERS for attempt in (1, 2))


def test_a_failure_names_its_order() -> None:
    failing = next(order for order in ORDERS if not succeeds(delivery(order)))
    with pytest.raises(OrderFailedError, match=f"^{failing} could not be processed$"):
        process(delivery(failing))


def test_an_invalid_order_is_given_up() -> None:
    with pytest.raises(GiveUpError, match="expected an order as text, found something else"):
        process(Delivery("1", "orders.new", b"\xff", {}, 1, 1))


def test_the_ledger_holds_only_processed_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEDGER, str(tmp_path / "ledger"))
    done = [order for order in ORDERS if succeeds(delivery(order))]
    lines = [json.loads(line) for line in (tmp_path / "ledger").read_text().splitlines()]
    assert [line["order"] for line in lines] == done
