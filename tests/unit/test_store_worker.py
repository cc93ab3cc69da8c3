from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker import Delivery, GiveUpError
from example_workers.store import LEDGER, BankBusyError, MalformedOrderError, process

if TYPE_CHECKING:
    from pathlib import Path


def delivery(body: bytes, headers: dict[str, str] | None = None) -> Delivery:
    return Delivery("1", "store.orders.new", body, headers or {}, 1, 1)


def order(amount: object, bank: str = "quick") -> bytes:
    return json.dumps({"id": "one", "amount": amount, "bank": bank}).encode()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b"\xff", GiveUpError, "expected an order as JSON, found something else"),
        (order("12,50"), MalformedOrderError, "expected the amount as a number, found '12,50'"),
        (order(12.5, "slow"), BankBusyError, "the bank didn't answer"),
    ],
)
def test_each_kind_of_bad_order_has_its_own_error(body: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        process(delivery(body))


def test_processed_orders_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEDGER, str(tmp_path / "ledger"))
    process(delivery(order(12.5)))
    process(delivery(order(3, "slow"), {"Redrive-Count": "1"}))
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert [json.loads(line)["amount"] for line in lines] == [12.5, 3]
