"""What lives as long as a wait is left out of the collector's full passes until the last wait has ended."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.triggers.triggerer import ShortCollections

if TYPE_CHECKING:
    from collections.abc import Iterator


class Circle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_many_waits_hold_is_left_out_but_not_at_each_that_comes_and_goes() -> None:
    collections = ShortCollections()
    with ExitStack() as waits:
        waits.enter_context(collections)
        kept = [Circle() for _ in range(10_000)]
        before = gc.get_freeze_count()
        for _ in range(2_000):
            with collections:
                pass
        assert gc.get_freeze_count() <= before
        for _ in range(2_000):
            waits.enter_context(collections)
        assert gc.get_freeze_count() >= before + len(kept)
