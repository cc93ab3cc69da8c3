from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.plugins.monitor import letter_index
from airflow_provider_jetstream.plugins.monitor.letter_index import IndexedLetter, LetterIndex

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


@pytest.mark.parametrize(
    ("select", "sequences"),
    [
        ({}, range(1, 10)),
        ({"parked": True}, [10]),
        ({"error_class": "app.BusyError"}, range(5, 10)),
        ({"subject": "jobs.1"}, [1, 3, 5, 7, 9]),
        ({"subject": "other.>"}, []),
        ({"reasons": ["max_deliveries"]}, []),
        ({"reasons": ["terminated", "orphan"], "run_id": "run0"}, [3, 6, 9]),
    ],
)
def test_a_selection_matches_its_letters(
    index: LetterIndex, select: dict[str, Any], sequences: range | list[int]
) -> None:
    selection = Selection.of(select)
    assert index.page(selection, 0, 100) == (list(sequences), False)
    assert index.count(selection) == len(sequences)


def test_a_page_begins_after_the_one_before(index: LetterIndex) -> None:
    assert index.page(Selection(), 0, 4) == ([1, 2, 3, 4], True)
    assert index.page(Selection(), 4, 5) == ([5, 6, 7, 8, 9], False)
    assert index.page(Selection(), 9, 5) == ([], False)


@pytest.mark.parametrize(
    "group_by", [("reason", "error_class", "fingerprint"), ("fingerprint",), ("subject",), ("run_id", "subject")]
)
def test_the_selection_of_a_group_matches_exactly_its_letters(
    index: LetterIndex, group_by: tuple[GroupField, ...]
) -> None:
    groups, left_out = index.groups(Selection(), group_by)
    assert left_out == 0
    assert sum(group.count for group in groups) == 9
    for group in groups:
        selection = Selection.of(group.select or {})
        assert group.select is not None
        assert index.count(selection) == group.count
        assert index.page(selection, 0, 1)[0] == [group.example]
        assert group.first_seen == NOON + timedelta(seconds=group.example)


def test_a_group_without_a_value_to_select_by_has_no_selection(index: LetterIndex) -> None:
    groups, _ = index.groups(Selection(), ("error_class",))
    assert {group.key["error_class"]: group.select for group in groups} == {
        None: None,
        "app.BusyError": {"error_class": "app.BusyError"},
    }


def test_a_letter_without_a_new_entry_is_found(index: LetterIndex) -> None:
    assert index.find(3, 30) == IndexedLetter.of(letter(3, run="run0"))
    assert index.find(4, 41) is None
    assert index.find(99, 990) is None


def test_the_letters_of_a_run_are_counted(index: LetterIndex) -> None:
    assert index.count_by_task("dag", "run1") == {("task", -1): (3, 1)}
    assert index.count_by_task("dag", "other") == {}


def test_it_stops_growing_at_its_maximum(index: LetterIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_LETTERS", 10)
    add(index, letter(11))
    assert (len(index), index.complete) == (10, False)
