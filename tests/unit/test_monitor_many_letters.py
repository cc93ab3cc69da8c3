"""The index of many letters: each answer is the one that a look at every letter gives, in few bytes a letter."""

from __future__ import annotations

import random
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.plugins.monitor import included_letters, letter_columns, subject_groups
from airflow_provider_jetstream.plugins.monitor.indexed_letter import IndexedLetter, digest_of
from airflow_provider_jetstream.plugins.monitor.letter_groups import group_letters
from airflow_provider_jetstream.plugins.monitor.letter_index import LetterIndex
from airflow_provider_jetstream.plugins.monitor.letter_query import KIND_FIELDS, LetterKind, LetterQuery

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
EVERY = LetterQuery(Selection())
COUNT = 1_500


def kind_of(number: int, *, parked: bool = False) -> LetterKind:
    values = {"reason": "terminated", "error_class": f"app.Error{number}", "dag_id": f"dag{number % 2}"}
    return LetterKind(
        parked=parked, map_index=None, of_unknown_task=False, values=tuple(values.get(field) for field in KIND_FIELDS)
    )


def make_letters() -> dict[int, IndexedLetter]:
    """Make letters of a few kinds, some on subjects of their own, that died neither in order nor at distinct times."""
    chance, letters = random.Random(20), dict[int, IndexedLetter]()  # noqa: S311
    sequence = 0
    for number in range(COUNT):
        sequence += chance.choice((1, 1, 1, 7, 70_000))
        # Half of them died an hour later than their neighbours.
        at = NOON + timedelta(seconds=number // 3 + 3_600 * (number % 2))
        subject = f"jobs.s{number}" if number % 3 else f"jobs.{'even' if number % 2 == 0 else 'odd'}.x{number % 40}"
        kind = kind_of(chance.randrange(4), parked=number % 50 == 0)
        letters[sequence] = IndexedLetter(kind, subject, at, sequence * 2, digest_of(f"job-{number}"), f"text {number}")
    return letters


@pytest.fixture(params=[(13, 256), (13, 0), (16_384, 256)])
async def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[LetterIndex, dict[int, Any]]:
    step, few_kinds = request.param
    monkeypatch.setattr(letter_columns, "_FEW_KINDS", few_kinds)
    for module in (letter_columns, included_letters):
        monkeypatch.setattr(module, "STEP", step)
    monkeypatch.setattr(letter_columns.in_steps, "__defaults__", (step,))
    monkeypatch.setattr(letter_columns, "_NEAR_END", 100)
    letters, index = make_letters(), LetterIndex()
    for sequence, letter in letters.items():
        index.add(sequence, letter)
    removed = dict.fromkeys(list(letters)[100:1_300:60])
    await index.change(removed)
    return index, {sequence: letter for sequence, letter in letters.items() if sequence not in removed}


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"parked": True},
        {"error_class": "app.Error1"},
        {"died_from": NOON + timedelta(seconds=300)},
        {"died_from": NOON + timedelta(seconds=100), "died_to": NOON + timedelta(seconds=4_000)},
        {"job_id": "job-701"},
        {"subject": "jobs.s701"},
        {"subject": "jobs.even.*"},
        {"subject": "jobs.*.x3"},
        {"subject": "jobs.>", "error_class": "app.Error2", "died_to": NOON + timedelta(seconds=3_700)},
        {"subject": "*.*"},
        {"subject": "jobs"},
        {"dags": frozenset({"dag1"})},
        {"dags": frozenset({"dag0", "dag1"}), "died_from": NOON + timedelta(seconds=300)},
    ],
)
async def test_an_answer_is_that_of_a_look_at_each_letter(
    many: tuple[LetterIndex, dict[int, IndexedLetter]], query: dict[str, Any]
) -> None:
    index, letters = many
    selected = {name: value for name, value in query.items() if name in ("parked", "error_class", "subject")}
    others = {name: value for name, value in query.items() if name not in selected}
    wanted = LetterQuery(Selection(**selected), **others)
    expected = [sequence for sequence, letter in letters.items() if is_wanted(letter, query)]
    by_death = sorted(expected, key=lambda sequence: letters[sequence].died_at)
    assert await index.count(wanted) == len(expected)
    assert await index.page(wanted, "sequence", 0, COUNT) == expected
    assert await index.page(wanted, "-sequence", 2, 5) == expected[::-1][2:7]
    times = [letters[sequence].died_at for sequence in await index.page(wanted, "died_at", 0, COUNT)]
    assert times == [letters[sequence].died_at for sequence in by_death]
    newest = [letters[sequence].died_at for sequence in await index.page(wanted, "-died_at", 3, 4)]
    assert newest == times[::-1][3:7]
    assert list(await index.sequences(wanted, after=5)) == [sequence for sequence in expected if sequence > 5]
    for group_by in (("error_class",), ("subject",), ("subject", "error_class")):
        await check_groups(index, wanted, {sequence: letters[sequence] for sequence in expected}, group_by)


def is_wanted(letter: IndexedLetter, query: dict[str, Any]) -> bool:
    """Tell by the fields of one letter whether a query includes it."""
    tokens, wanted = letter.subject.split("."), query.get("subject", ">").split(".")
    if wanted[-1] == ">":
        covered = len(tokens) >= len(wanted)
        wanted = wanted[:-1]
    else:
        covered = len(tokens) == len(wanted)
    return (
        covered
        and all(each in ("*", token) for each, token in zip(wanted, tokens, strict=False))
        and letter.kind.parked == query.get("parked", False)
        and query.get("error_class") in (None, letter.kind.value("error_class"))
        and ("dags" not in query or letter.kind.value("dag_id") in query["dags"])
        and ("job_id" not in query or letter.job == digest_of(query["job_id"]))
        and query.get("died_from", letter.died_at) <= letter.died_at
        and ("died_to" not in query or letter.died_at < query["died_to"])
    )


async def check_groups(
    index: LetterIndex, query: LetterQuery, letters: dict[int, IndexedLetter], group_by: tuple[GroupField, ...]
) -> None:
    """Compare the groups with those of all letters."""
    members: dict[tuple[str | None, ...], list[int]] = {}
    for sequence, letter in letters.items():
        values = (letter.subject if name == "subject" else letter.kind.value(name) for name in group_by)
        members.setdefault(tuple(values), []).append(sequence)
    groups, left_out = await group_letters(index, query, group_by, hidden=False, hidden_of_unknown=False)
    assert len(groups) + left_out == len(members)
    assert len(groups) == min(500, len(members))
    expected = sorted(members.items(), key=lambda item: (-len(item[1]), item[1][0]))[:500]
    assert [group.count for group in groups] == [len(sequences) for _, sequences in expected]
    if "subject" in group_by:
        assert [group.example for group in groups] == [sequences[0] for _, sequences in expected]
    for group in groups:
        of_group = members[tuple(group.key[name] for name in group_by)]
        times = [letters[sequence].died_at for sequence in of_group]
        assert (group.count, group.example) == (len(of_group), of_group[0])
        assert (group.first_seen, group.last_seen) == (min(times), max(times))


async def test_groups_that_are_too_many_for_places_are_the_same(
    many: tuple[LetterIndex, dict[int, IndexedLetter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, letters = many
    monkeypatch.setattr(subject_groups, "_MAX_PLACES", 10)
    circulating = {sequence: letter for sequence, letter in letters.items() if not letter.kind.parked}
    await check_groups(index, EVERY, circulating, ("subject", "error_class"))


@pytest.mark.slow
async def test_a_letter_on_a_subject_of_its_own_takes_less_than_45_bytes() -> None:
    count, kind = 20_000, kind_of(1)
    tracemalloc.start()
    try:
        index = LetterIndex()
        for number in range(1, count + 1):
            at = NOON + timedelta(microseconds=150 * number)
            subject = f"queue-000.jobs.s{number}"
            index.add(number, IndexedLetter(kind, subject, at, number, digest_of(f"order-{number}"), None))
        # Other threads of this process, and the record of lines, allocate too.
        own = [
            tracemalloc.Filter(inclusive=True, filename_pattern=pattern)
            for pattern in (__file__, "*/plugins/monitor/*")
        ]
        taken = tracemalloc.take_snapshot().filter_traces(own).statistics("filename")
    finally:
        tracemalloc.stop()
    size = sum(statistic.size for statistic in taken) / count
    print(f"{size:.1f} bytes for each letter")
    assert size < 45
