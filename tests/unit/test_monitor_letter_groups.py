"""The page's groups of letters: the selection that each has is one of exactly its letters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, LetterTable
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.plugins.monitor.letter_service import group_letters
from airflow_provider_jetstream.plugins.monitor.models.figure import Figure

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NO_CONSUMER: Any = SimpleNamespace(consumer_for=lambda _: None)


def letter(sequence: int) -> DeadLetter:
    """Make a dead letter."""
    died_at, error = NOON + timedelta(seconds=sequence), "app.BusyError" if sequence > 4 else None
    return DeadLetter(
        death=Death("q", "", sequence, "worker", Reason.TERMINATED, died_at, error_class=error),
        subject=f"jobs.{sequence % 2}",
        body=b"",
        headers=(),
        time="",
        source=BodySource.COPY,
        entries=(sequence * 10,),
        preserved=True,
        ready_at=died_at,
        parked="poison" if sequence == 10 else None,
        origin=Origin("dag", f"run{sequence % 3}", "task"),
    )


@pytest.mark.parametrize(
    "group_by", [("reason", "error_class", "fingerprint"), ("fingerprint",), ("subject",), ("run_id", "subject")]
)
async def test_the_selection_of_a_group_matches_exactly_its_letters(group_by: tuple[GroupField, ...]) -> None:
    table = LetterTable()
    await table.change([letter(sequence) for sequence in range(1, 11)], NO_CONSUMER)
    groups, left_out = await group_letters(
        table, LetterQuery(Selection()), group_by, Figure, hidden=False, hidden_of_unknown=False
    )
    assert left_out == 0
    assert sum(group.count.value or 0 for group in groups) == 9
    for group in groups:
        count = int(group.count.value or 0)
        selection = Selection.of(group.select or {})
        assert group.select is not None
        assert await table.count(LetterQuery(selection)) == count
        assert list(await table.page(LetterQuery(selection), limit=1)) == [group.example]
        assert group.share == round(count / 9, 4)
        assert group.first_seen == NOON + timedelta(seconds=group.example)
