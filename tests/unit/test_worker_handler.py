from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from airflow_provider_jetstream.worker import Delivery
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from airflow_provider_jetstream.worker.handler import inspect_batch_handler, inspect_handler

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal


class Order(BaseModel):
    item: str
    lines: list[int] = []


def plain(job: Any) -> str:
    return str(job.id)


def annotated(job: Delivery) -> str:
    return job.id


def typed(order: Order) -> str:
    return order.item


def typed_with_delivery(order: Order, job: Delivery) -> str:
    return order.item + job.id


def typed_with_option(order: Order, *, loud: bool = False) -> str:
    return order.item.upper() if loud else order.item


class Shop:
    def method(self, order: Order) -> str:
        return order.item

    def __call__(self, order: Order, job: Delivery) -> str:
        return order.item + job.id


JOB = Delivery("7", "orders.new", b'{"item": "pen"}', {}, 1, 1)


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (plain, "7"),
        (annotated, "7"),
        (typed, "pen"),
        (typed_with_delivery, "pen7"),
        (typed_with_option, "pen"),
        (partial(typed_with_option, loud=True), "PEN"),
        (Shop().method, "pen"),
        (Shop(), "pen7"),
        (lambda *jobs: jobs[0].id, "7"),
    ],
)
def test_a_handler_is_called_with_the_arguments_of_its_signature(handler: Callable[..., Any], expected: str) -> None:
    bound = inspect_handler(handler)
    assert bound(JOB) == expected
    assert not bound.is_async


@pytest.mark.parametrize("handler", [[].append, print, dict])
def test_a_builtin_gets_the_delivery(handler: Callable[..., Any]) -> None:
    assert inspect_handler(handler).model is None


def none() -> None: ...


def two(first: Delivery, second: str) -> None: ...


def three(order: Order, job: Delivery, more: str) -> None: ...


def keyword(*, job: Delivery) -> None: ...


@pytest.mark.parametrize("handler", [none, two, three, keyword])
def test_a_handler_that_takes_something_else_is_refused(handler: Callable[..., Any]) -> None:
    expected_text = f"expected a handler that takes a job, or a pydantic model and a job, found {handler.__name__}("
    with pytest.raises(WorkerSetupError, match=re.escape(expected_text)):
        inspect_handler(handler)


def hidden(amount: Decimal) -> None: ...


def test_an_annotation_imported_for_type_checkers_only_is_refused_since_it_may_be_a_model() -> None:
    with pytest.raises(WorkerSetupError, match=r"found 'Decimal' on amount of hidden: .*import it outside"):
        inspect_handler(hidden)


def models(jobs: list[Order]) -> None:
    """Would get deliveries."""


@pytest.mark.parametrize("handler", [models, partial(models)])
def test_a_batch_handler_that_takes_models_is_refused(handler: Callable[..., Any]) -> None:
    with pytest.raises(WorkerSetupError, match=r"expected a batch handler that takes list\[Delivery\], found Order in"):
        inspect_batch_handler(handler)
