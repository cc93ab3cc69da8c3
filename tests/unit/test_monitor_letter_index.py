from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.plugins.monitor import letter_index, text_table
from airflow_provider_jetstream.plugins.monitor.indexed_letter import IndexedLetter
from airflow_provider_jetstream.plugins.monitor.letter_groups import group_letters
from airflow_provider_jetstream.plugins.monitor.letter_index import LetterIndex
from airflow_provider_jetstream.plugins.monitor.letter_query import LetterQuery

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def letter(sequence: int, *, run: str = "run", parked: str | None = None, **death: Any) -> DeadLetter:
    """Make a dead letter."""
    died_at = NOON + timedelta(seconds=sequence)
    fields: dict[str, Any] = {
        "stream": "q",
        "created": "",
        "consumer": "worker",
        "reason": Reason.TERMINATED,
        "died_at": died_at,
    } | death
    return DeadLetter(
        death=Death(sequence=sequence, **fields),
        subject=f"jobs.{sequence % 2}",
        body=b"",
        headers=(),
        time="",
        source=BodySource.COPY,
        entries=(sequence * 10,),
        preserved=True,
        ready_at=died_at,
        parked=parked,
        origin=Origin("dag", run, "task"),
    )


def add(index: LetterIndex, letter: DeadLetter) -> None:
    index.add(letter.sequence, IndexedLetter.of(letter))


@pytest.fixture
def index() -> LetterIndex:
    letters = LetterIndex()
    for sequence in range(1, 11):
        error = {"error_class": "app.BusyError"} if sequence > 4 else {}
        add(letters, letter(sequence, run=f"run{sequence % 3}", parked="poison" if sequence == 10 else None, **error))
    return letters


async def test_letters_beyond_the_kinds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_KINDS", 5)
    letters = LetterIndex()
    for sequence in range(1, 11):
        add(letters, letter(sequence, run=f"run{sequence}"))
    assert (len(letters), letters.complete, letters.counted[False]) == (5, False, 10)


@pytest.mark.parametrize(
    "group_by", [("reason", "error_class", "fingerprint"), ("fingerprint",), ("subject",), ("run_id", "subject")]
)
async def test_the_selection_of_a_group_matches_exactly_its_letters(
    index: LetterIndex, group_by: tuple[GroupField, ...]
) -> None:
    groups, left_out = await group_letters(
        index, LetterQuery(Selection()), group_by, hidden=False, hidden_of_unknown=False
    )
    assert left_out == 0
    assert sum(group.count for group in groups) == 9
    for group in groups:
        selection = Selection.of(group.select or {})
        assert group.select is not None
        assert await index.count(LetterQuery(selection)) == group.count
        assert await index.page(LetterQuery(selection), "sequence", 0, 1) == [group.example]
        assert group.share == round(group.count / 9, 4)
        assert group.first_seen == NOON + timedelta(seconds=group.example)


async def test_letters_are_added_replaced_and_removed(index: LetterIndex) -> None:
    def changed(sequence: int, seconds: int) -> IndexedLetter:
        return IndexedLetter.of(letter(sequence, died_at=NOON + timedelta(seconds=seconds)))

    query, before = LetterQuery(Selection()), index.columns
    assert await index.page(query, "-died_at", 0, 3) == [9, 8, 7]
    await index.change({10: None, 2: None, 77: None, 3: changed(3, 600), 2**33: changed(2**33, 300)})
    assert await index.page(query, "sequence", 0, 100) == [1, 3, 4, 5, 6, 7, 8, 9, 2**33]
    assert await index.page(query, "-died_at", 0, 3) == [3, 2**33, 9]
    assert (dict(index.counted), await index.count(query)) == ({False: 9, True: 0}, 9)
    assert await index.page(LetterQuery(Selection(parked=True)), "sequence", 0, 100) == []
    groups, _ = await group_letters(index, query, ("reason",), hidden=False, hidden_of_unknown=False)
    assert [(group.count, group.last_seen) for group in groups] == [(9, NOON + timedelta(seconds=600))]
    # Who asked before goes on with what was there.
    assert len(await index.positions(query, before)) == 9


async def test_texts_have_one_number_each() -> None:
    table = text_table.TextTable()
    texts = [f"jobs.{number}.größe" for number in range(5_000)]
    assert [table.number_of(text) for text in texts * 2] == [*range(5_000)] * 2
    assert table[4_321] == texts[4_321]
    for subject, count in (("jobs.*.größe", 5_000), ("jobs.>", 5_000), ("jobs.77.*", 1), ("jobs.77", 0), ("*.*", 0)):
        assert len(list(table.matching(subject, range(5_000)))) == count


async def test_it_stops_growing_at_its_maximum(index: LetterIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_LETTERS", 10)
    add(index, letter(11))
    assert (len(index), index.complete) == (10, False)
