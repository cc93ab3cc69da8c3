from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.plugins.monitor import included_letters, letter_columns, letter_index, text_table
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
async def test_a_selection_matches_its_letters(
    index: LetterIndex, select: dict[str, Any], sequences: range | list[int]
) -> None:
    selection = Selection.of(select)
    query = LetterQuery(selection)
    assert await index.page(query, "sequence", 0, 100) == list(sequences)
    assert await index.page(query, "-died_at", 0, 100) == list(reversed(sequences))
    assert await index.count(query) == len(sequences)


async def test_a_page_begins_after_the_one_before(index: LetterIndex) -> None:
    query = LetterQuery(Selection())
    assert await index.page(query, "sequence", 0, 4) == [1, 2, 3, 4]
    assert await index.page(query, "sequence", 4, 50) == [5, 6, 7, 8, 9]
    assert await index.page(query, "sequence", 9, 5) == []
    assert await index.page(query, "-sequence", 7, 5) == [2, 1]
    assert [await index.offset_after(query, sequence) for sequence in (0, 4, 9, 99)] == [0, 4, 9, 9]


@pytest.mark.parametrize(
    ("query", "sequences"),
    [
        ({"job_id": "7"}, [7]),
        ({"job_id": "70"}, []),
        ({"died_from": NOON + timedelta(seconds=8)}, [8, 9]),
        ({"died_to": NOON + timedelta(seconds=3)}, [1, 2]),
        ({"dags": frozenset()}, []),
        ({"dags": frozenset({"dag"}), "selection": Selection(sequences={2, 4, 10, 77})}, [2, 4]),
    ],
)
async def test_letters_are_found_by_job_time_dag_and_rows(
    index: LetterIndex, query: dict[str, Any], sequences: list[int]
) -> None:
    wanted = LetterQuery(**{"selection": Selection()} | query)
    assert await index.page(wanted, "died_at", 0, 100) == sequences
    assert await index.count(wanted) == len(sequences)


async def test_letters_on_distinct_subjects_are_all_indexed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_KINDS", 50)
    letters = LetterIndex()
    for sequence in range(1, 101):
        add(letters, replace(letter(sequence), subject=f"jobs.{sequence}"))
    assert (len(letters), letters.complete, letters.counted[False]) == (100, True, 100)
    assert await letters.page(LetterQuery(Selection()), "-died_at", 0, 2) == [100, 99]
    assert await letters.page(LetterQuery(Selection(subject="jobs.77")), "sequence", 0, 9) == [77]
    groups, left_out = await group_letters(
        letters, LetterQuery(Selection()), ("subject",), hidden=False, hidden_of_unknown=False
    )
    assert (len(groups) + left_out, {group.count for group in groups}) == (100, {1})


async def test_letters_beyond_the_kinds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_KINDS", 5)
    letters = LetterIndex()
    for sequence in range(1, 11):
        add(letters, letter(sequence, run=f"run{sequence}"))
    assert (len(letters), letters.complete, letters.counted[False]) == (5, False, 10)


async def test_a_group_has_the_text_of_its_largest_part_unless_it_is_hidden() -> None:
    letters = LetterIndex()
    for sequence, text in enumerate(["a busy shop", "a busy shop", "no shop"], start=1):
        add(letters, letter(sequence, error_class="app.BusyError", error_message=text))
    for hidden in (False, True):
        # By kinds, and letter by letter.
        for query in (LetterQuery(Selection()), LetterQuery(Selection(), died_from=NOON)):
            (group,), _ = await group_letters(letters, query, ("error_class",), hidden=hidden, hidden_of_unknown=False)
            assert (group.count, group.error_message) == (3, None if hidden else "a busy shop")


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


async def test_a_group_without_a_value_to_select_by_has_no_selection(index: LetterIndex) -> None:
    groups, _ = await group_letters(
        index, LetterQuery(Selection()), ("error_class",), hidden=False, hidden_of_unknown=False
    )
    assert {group.key["error_class"]: group.select for group in groups} == {
        None: None,
        "app.BusyError": {"error_class": "app.BusyError"},
    }


async def test_a_letter_without_a_new_entry_is_found(index: LetterIndex) -> None:
    assert index.has(3, 30)
    assert not index.has(4, 41)
    assert not index.has(99, 990)
    assert not index.differs(3, IndexedLetter.of(letter(3, run="run0")))
    assert index.differs(3, IndexedLetter.of(letter(3, run="run1")))


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


async def test_a_question_goes_on_while_letters_are_added_and_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = LetterIndex()
    for module in (letter_columns, included_letters):
        monkeypatch.setattr(module, "STEP", 7)
    monkeypatch.setattr(letter_columns.in_steps, "__defaults__", (7,))
    for sequence in range(1, 1001):
        add(letters, letter(sequence, died_at=NOON + timedelta(seconds=sequence * 37 % 1000)))
    queries = [LetterQuery(Selection(), died_from=NOON + timedelta(seconds=each)) for each in range(0, 500, 100)]
    asked = [asyncio.create_task(letters.page(query, "-died_at", 0, 2)) for query in queries]
    await asyncio.sleep(0)
    await letters.change({5: None, 2_000: IndexedLetter.of(letter(2_000))})
    assert [len(page) for page in await asyncio.gather(*asked)] == [2] * 5
    assert await letters.page(LetterQuery(Selection()), "-died_at", 0, 2) == [2_000, 27]
    by_death = await letters.page(LetterQuery(Selection()), "died_at", 0, 2_000)
    assert by_death[:-1] == sorted((each for each in range(1, 1001) if each != 5), key=lambda each: each * 37 % 1000)


async def test_texts_have_one_number_each() -> None:
    table = text_table.TextTable()
    texts = [f"jobs.{number}.größe" for number in range(5_000)]
    assert [table.number_of(text) for text in texts * 2] == [*range(5_000)] * 2
    assert table[4_321] == texts[4_321]
    for subject, count in (("jobs.*.größe", 5_000), ("jobs.>", 5_000), ("jobs.77.*", 1), ("jobs.77", 0), ("*.*", 0)):
        assert len(list(table.matching(subject, range(5_000)))) == count


async def test_deaths_are_counted_by_time(index: LetterIndex) -> None:
    start = NOON.timestamp()
    assert [index.died_before(start + seconds) for seconds in (0, 1, 1.5, 5, 99)] == [0, 0, 1, 4, 10]


async def test_the_letters_of_a_run_are_counted(index: LetterIndex) -> None:
    assert index.count_by_task("dag", "run1") == {("task", -1): (3, 1)}
    assert index.count_by_task("dag", "other") == {}


async def test_it_stops_growing_at_its_maximum(index: LetterIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_index, "MAX_LETTERS", 10)
    add(index, letter(11))
    assert (len(index), index.complete) == (10, False)
