"""The digest of where a handler failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.worker.handler import Failure, HandlerResult, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOP = """
import json


def price(item):
    if item == "gone":
        raise KeyError(item)
    raise ValueError(f"no price for {item}")


def sell(item):
    return price(item)


def lend(item):
    return price(item)


def sell_or_close(item):
    try:
        return sell(item)
    except (ValueError, KeyError) as error:
        raise RuntimeError(f"closed because of {item}") from error


def sell_lazily(item):
    try:
        return sell(item)
    except ValueError:
        raise RuntimeError("closed") from None


def sell_later(depth):
    return sell_later(depth - 1) if depth else sell("x")


def sell_all(items):
    return [price(item) for item in items]


def read(text):
    return json.loads(text)


def fall_apart(errors):
    raise ExceptionGroup("several", errors)


class Till:
    def open(self, item):
        return sell(item)


def größe(item):
    return price(item)
"""


def shop(source: str = _SHOP, *, name: str = "shop.prices", file: str = "/srv/shop/prices.py", **names: Any) -> Any:
    module = {"__name__": name} | names
    exec(compile(source, file, "exec"), module)
    return module


SHOP = shop()


def raised(call: Callable[..., object], *arguments: object) -> Exception:
    with HandlerResult() as done:
        call(*arguments)
    assert done.error is not None
    trace = done.error.__traceback__
    # This function isn't part of a handler.
    assert trace is not None
    return done.error.with_traceback(trace.tb_next)


def failure(call: Callable[..., object], *arguments: object) -> Failure:
    result = failure_of(raised(call, *arguments))
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("call", "one", "other"),
    [
        ("sell", "pear", "plum"),
        ("sell_or_close", "pear", "plum"),
        ("sell_later", 1, 200),
        ("read", "{", "[" * 50),
        ("sell_all", ["a"], ["b", "c"]),
    ],
)
def test_values_messages_and_depth_do_not_change_the_digest(call: str, one: object, other: object) -> None:
    first, second = failure(SHOP[call], one), failure(SHOP[call], other)
    assert (first.digest, first.place) == (second.digest, second.place)


def test_another_place_call_path_error_or_cause_is_another_fault() -> None:
    other_module = shop(name="shop.offers")
    result = [
        failure(SHOP["price"], "pear"),
        failure(SHOP["price"], "gone"),
        failure(SHOP["sell"], "pear"),
        failure(SHOP["lend"], "pear"),
        failure(SHOP["Till"]().open, "pear"),
        failure(SHOP["sell_or_close"], "pear"),
        failure(SHOP["sell_or_close"], "gone"),
        failure(SHOP["sell_lazily"], "pear"),
        failure(other_module["sell"], "pear"),
    ]
    assert len({failed.digest for failed in result}) == len(result)


def test_the_place_is_that_of_the_root_cause() -> None:
    assert failure(SHOP["sell_or_close"], "pear").place == failure(SHOP["price"], "pear").place
    # A cause that was never raised has no place.
    error = raised(SHOP["sell"], "pear")
    error.__cause__ = KeyError("made")
    result, without = failure_of(error), failure(SHOP["sell"], "pear")
    assert result is not None
    assert (result.place, result.digest != without.digest) == (without.place, True)


def test_the_order_in_an_exception_group_does_not_change_the_digest() -> None:
    errors = [raised(SHOP["sell"], "pear"), raised(SHOP["lend"], "gone")]
    assert failure(SHOP["fall_apart"], errors) == failure(SHOP["fall_apart"], errors[::-1])
    fewer = failure(SHOP["fall_apart"], errors[:1])
    assert fewer.digest != failure(SHOP["fall_apart"], errors).digest


def test_a_circle_of_causes_ends() -> None:
    error = raised(SHOP["sell_or_close"], "pear")
    expected = failure_of(error)
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error
    assert failure_of(error) == expected


def test_a_place_fits_a_header() -> None:
    result = failure(SHOP["größe"], "pear")
    assert result.place.isascii()
    long = shop(f"def {'a' * 900}(item):\n    raise ValueError\n")["a" * 900]
    assert len(failure(long, "pear").place) < 220
    assert failure(long, "pear").place.endswith("a:2")
    named = shop("def größe(item):\n    raise ValueError\n")["größe"]
    assert failure(named, "pear").place == "shop.prices:gr\\xf6\\xdfe:2"
