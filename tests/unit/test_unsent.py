from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.client.unsent import changes_state


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.orders",
        "$JS.API.STREAM.LIST",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.MSG.GET.orders",
        "$JS.API.CONSUMER.INFO.orders.worker",
        "$JS.API.CONSUMER.LIST.orders",
        "$JS.API.CONSUMER.NAMES.orders",
        "$JS.API.CONSUMER.MSG.NEXT.orders.worker",
        "$JS.API.DIRECT.GET.orders",
        "$JS.API.DIRECT.GET.orders.orders.new",
        "$JS.hub.API.STREAM.INFO.orders",
    ],
)
def test_a_read_changes_nothing(subject: str) -> None:
    assert not changes_state(subject)


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.API.STREAM.MSG.DELETE.orders",
        "$JS.API.STREAM.PURGE.orders",
        "$JS.API.STREAM.CREATE.orders",
        "$JS.API.CONSUMER.CREATE.orders.worker",
        "$JS.API.CONSUMER.DELETE.orders.worker",
        "$JS.API.CONSUMER.PAUSE.orders.worker",
        "$JS.API.CONSUMER.RESET.orders.worker",
        "$JS.hub.API.CONSUMER.RESET.orders.worker",
        "$JS.ACK.orders.worker.1.17.1.0.0",
        "$JS.API.INFORMATION",
        "orders.new",
        "x.$JS.API.INFO",
    ],
)
def test_everything_else_changes_something(subject: str) -> None:
    assert changes_state(subject)
