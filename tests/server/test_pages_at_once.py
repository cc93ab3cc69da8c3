"""Pages of letters that are proved at the same time are each proved by what holds for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream import Selection
from airflow_provider_jetstream.jetstream.dead_letters.classifier import Classifier
from testbed.face import Scan
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from testbed.face import NatsPyConnection


async def test_each_of_them_is_proved_again_after_the_connection_was_lost(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    sequences = await make_dead_letters(connection, queue, "abcdef")
    classify_all, begun, lost = Classifier.classify_all, list[tuple[int, ...]](), asyncio.Event()

    async def classify(classifier: Classifier, jobs: Sequence[tuple[int, Any]]) -> list[Any]:
        begun.append(tuple(sequence for sequence, _ in jobs))
        if len(begun) == 2:
            # Both pages are read from the server as it was before.
            connection.client.stats["reconnects"] += 1
            lost.set()
        results = await classify_all(classifier, jobs)
        await lost.wait()
        return results

    monkeypatch.setattr(Classifier, "classify_all", classify)
    scan = await Scan.begin(connection, queue)
    scan.page_size = 2
    pages = [page async for page in scan.pages(Selection(), ahead=1)]
    assert [letter.sequence for page in pages for letter in page.letters] == sequences
    first, second, third = (tuple(sequences[start : start + 2]) for start in (0, 2, 4))
    assert sorted(begun) == [first, first, second, second, third]
