"""The table of letters answers what a look at every letter answers, whatever was put and removed before."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters import table as table_module
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, LetterGroups
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, LetterTable, Sort
from airflow_provider_jetstream.jetstream.origin import Origin

if TYPE_CHECKING:
    import pytest

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOW = NOON + timedelta(seconds=150)
FIELDS: tuple[GroupField, ...] = get_args(GroupField)
SORTS: tuple[Sort, ...] = get_args(Sort)
NOT_UTF8 = "app.Gr\udce4"


class Consumers:
    """Of a snapshot: the consumer that takes a subject, which is the last letter of it."""

    def consumer_for(self, subject: str) -> Any:
        return SimpleNamespace(name=f"c{int(subject[-1]) % 2}")


SNAPSHOT: Any = Consumers()


def dead_letter(sequence: int, number: int, *, parked: bool) -> DeadLetter:
    """Make a dead letter; ``number`` decides about its fields."""
    reason = (Reason.TERMINATED, Reason.MAX_DELIVERIES, Reason.UNDELIVERABLE)[number % 3]
    died_at = NOON + timedelta(seconds=number)
    error = ("app.BusyError", None, NOT_UTF8)[number // 3 % 3]
    return DeadLetter(
        death=Death("q", "", sequence, f"c{number % 2}", reason, died_at, error_class=error, error_message=error),
        subject=f"jobs.{number % 4}",
        body=b"",
        headers=(("Job-Id", f"job-{number % 7}"),),
        time="",
        source=BodySource.QUEUE if number % 5 else BodySource.COPY,
        entries=(sequence * 10, sequence) if number % 9 else (),
        preserved=True,
        ready_at=died_at,
        parked="poison" if parked else None,
        origin=Origin(f"dag{number % 3}", f"run{number % 5}", "task") if number % 2 else None,
    )


letters = st.builds(dead_letter, st.integers(1, 30), st.integers(0, 200), parked=st.booleans())
selections: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "reasons": st.sets(st.sampled_from(Reason), min_size=1),
        "error_class": st.sampled_from(["app.BusyError", NOT_UTF8]),
        "consumer": st.sampled_from(["c0", "c1", "c2"]),
        "subject": st.sampled_from(["jobs.1", "jobs.*", "other.>", "*.2", "jobs"]),
        "run_id": st.sampled_from(["run1", "run9"]),
        "sequences": st.frozensets(st.integers(1, 40)),
        "parked": st.booleans(),
    },
)
ages = st.fixed_dictionaries(
    {},
    optional={
        "older_than": st.sampled_from([0, 60 * 10**9]),
        "younger_than": st.sampled_from([100 * 10**9, 9 * 10**18]),
    },
)
others: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "dags": st.frozensets(st.sampled_from(["dag0", "dag1", "other"])),
        "job_id": st.sampled_from(["job-1", "job-6", "none"]),
        "died_from": st.integers(0, 200).map(lambda seconds: NOON + timedelta(seconds=seconds)),
        "died_to": st.integers(0, 200).map(lambda seconds: NOON + timedelta(seconds=seconds)),
    },
)
groupings = st.lists(st.sampled_from(FIELDS), unique=True, max_size=3).map(tuple)
steps = st.lists(letters | st.integers(1, 30), max_size=8)


async def fill(table: LetterTable, changes: list[list[DeadLetter | int]]) -> dict[int, DeadLetter]:
    """Put letters and remove those that are only numbers; return the letters that there are."""
    known: dict[int, DeadLetter] = {}
    for number, some in enumerate(changes):
        put = {letter.sequence: letter for letter in some if isinstance(letter, DeadLetter)}
        if number % 3 == 2:
            # All that there is between two sequences.
            after, until = number % 4 * 5, 25
            put = {sequence: letter for sequence, letter in sorted(put.items()) if after < sequence <= until}
            await table.replace(after, until, list(put.values()), SNAPSHOT)
            known = {each: letter for each, letter in known.items() if not after < each <= until}
        else:
            removed = {each for each in some if isinstance(each, int)}
            await table.change(list(put.values()), SNAPSHOT, removed)
            known = {each: letter for each, letter in known.items() if each not in removed}
        known |= put
        # What was answered before is forgotten.
        await table.groups(LetterQuery(Selection()), ("reason",))
        await table.ranges(LetterQuery(Selection()), 2)
    return known


async def check(table: LetterTable, query: LetterQuery, expected: list[DeadLetter], fields: tuple[Any, ...]) -> None:
    """Compare the answers to a query with its letters, which are in the order of their sequences."""
    groups = LetterGroups()
    for letter in expected:
        groups.add(letter, fields)
    for _ in range(2):
        assert await table.groups(query, fields) == groups
    assert await table.count(query) == len(expected)
    largest, count, total = await table.largest_groups(query, fields, most=2, texts=True)
    assert [(key, group) for key, group, _ in largest] == groups.largest()[:2]
    assert (count, total) == (len(groups), len(expected) if groups else 0)
    ranges, beyond = await table.ranges(query, 100)
    sequences = [letter.sequence for letter in expected]
    assert [sequence for first, last in ranges for sequence in range(first, last + 1)] == sequences
    assert (beyond, all(low > last + 1 for (_, last), (low, _) in pairwise(ranges))) == (0, True)
    assert (await table.ranges(query, 1)) == (ranges[:1], len(ranges[1:]))
    for sort in SORTS:
        ordered = sorted(expected, key=lambda letter: letter.death.died_at) if sort.endswith("died_at") else expected
        ordered = ordered[::-1] if sort.startswith("-") else ordered
        found = [letter.sequence for letter in ordered]
        assert list(await table.page(query, sort)) == found
        assert list(await table.page(query, sort, offset=1, limit=2)) == found[1:3]
        assert list(await table.page(query, sort, after=9)) == [each for each in found if each > 9]
    assert await table.count_until(query, 9) == sum(each <= 9 for each in sequences)
    rows = await table.rows(query, fields, 3, 5)
    assert [sequence for _, sequence, _ in rows] == [each for each in sequences if each > 3][:5]
    assert {key for key, _, _ in rows} <= groups.keys()


@given(st.lists(steps, max_size=6), selections, ages, others, groupings)
def test_a_table_answers_what_single_letters_answer(
    changes: list[list[DeadLetter | int]],
    select: dict[str, Any],
    age: dict[str, Any],
    other: dict[str, Any],
    fields: tuple[GroupField, ...],
) -> None:
    async def run() -> None:
        table = LetterTable()
        known = await fill(table, changes)
        every = [letter for _, letter in sorted(known.items())]
        aged = Selection(**select, **age)
        await check(table, LetterQuery.of(aged, NOW), [each for each in every if aged.matches(each, NOW)], fields)
        query = LetterQuery(Selection(**select), **other)
        await check(table, query, [letter for letter in every if query.includes(letter)], fields)
        # What doesn't depend on a query.
        circulating = sum(letter.parked is None for letter in every)
        assert (len(table), table.last) == (len(every), max(known, default=0))
        assert table.counted == {False: circulating, True: len(every) - circulating}
        assert await table.known(range(1, 31)) == known.keys()
        assert await table.died_at([*known, 99]) == {each: letter.death.died_at for each, letter in known.items()}
        last = {each: max(letter.entries, default=0) for each, letter in known.items()}
        assert await table.entries(4, 20) == {each: entry for each, entry in last.items() if 4 < each <= 20}
        stored = {letter.sequence for letter in every if letter.source == BodySource.QUEUE}
        assert (await table.stored_below(15), await table.stored_among(range(31))) == (
            {each for each in stored if each < 15},
            stored,
        )
        of_c1 = [each for each in stored if int(known[each].subject[-1]) % 2]
        assert (await table.stored_for()).get("c1", 0) == len(of_c1)
        assert await table.stored_above("c1", 15) == sum(each > 15 for each in of_c1)
        dags = {letter.origin.dag_id for letter in every if letter.origin}
        assert dags <= await table.dags()
        of_run = [
            each for each in every if each.origin and each.origin.run_id == "run1" and each.origin.dag_id == "dag1"
        ]
        parked = sum(each.parked is not None for each in of_run)
        tasks = {("task", -1): (len(of_run) - parked, parked)} if of_run else {}
        assert await table.count_by_task("dag1", "run1") == tasks
        seconds = [(letter.death.died_at - NOON).total_seconds() for letter in every]
        deaths = await table.deaths(NOON, 60, 2)
        assert deaths == Counter(at // 60 for at in seconds if at < 120)

    asyncio.run(run())


async def test_the_counts_of_a_time_follow_the_letters() -> None:
    table = LetterTable()
    query = LetterQuery(Selection(), died_from=NOON + timedelta(seconds=5))
    counts = []
    for number in (4, 10, 13):
        await table.change([dead_letter(number, number, parked=False)], SNAPSHOT)
        counts.append((await table.count(query), await table.count(replace(query, died_from=NOON))))
    await table.change([], SNAPSHOT, [10])
    counts.append((await table.count(query), await table.count(replace(query, died_from=NOON))))
    assert counts == [(0, 1), (1, 2), (2, 3), (1, 2)]


async def test_letters_beyond_the_limits_are_counted() -> None:
    some = [dead_letter(sequence, 3 * sequence + 1, parked=sequence == 5) for sequence in range(1, 8)]
    for limits, there in (({"most_letters": 4}, 4), ({"most_kinds": 2}, 2)):
        table = LetterTable(**limits)
        await table.change(some[:3], SNAPSHOT)
        await table.change(some[3:], SNAPSHOT)
        assert (len(table), table.complete, table.counted) == (there, False, {False: 6, True: 1})
        # One that is there may change, and one that is removed makes room.
        await table.change([replace(some[0], parked="poison")], SNAPSHOT, {2})
        assert table.counted == {False: 4, True: 2}


async def test_texts_of_letters_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_FEW_UNUSED", 100)
    table = LetterTable(most_kinds=500)
    for begin in range(0, 1_200, 100):
        some = [dead_letter(each, 1, parked=False) for each in range(begin + 1, begin + 101)]
        named = [replace(each, subject=f"jobs.s{each.sequence}.1") for each in some]
        named = [replace(each, death=replace(each.death, error_class=f"app.{each.sequence}")) for each in named]
        await table.replace(0, 2**63, named, SNAPSHOT)
    assert (len(table), table.complete) == (100, True)
    groups, count, total = await table.largest_groups(LetterQuery(Selection()), ("subject",), most=1, texts=True)
    assert (count, total, groups[0][0]) == (100, 100, ("jobs.s1101.1",))


async def test_a_group_has_the_text_of_its_largest_part() -> None:
    table, unknown = LetterTable(), (("Airflow-Task", "key"),)
    some = [dead_letter(sequence, 6 * sequence + 2, parked=False) for sequence in range(1, 7)]
    texts = ["rare", "often", "often", "hidden", "hidden", "hidden"]
    some = [
        replace(each, death=replace(each.death, error_message=text), headers=unknown if text == "hidden" else ())
        for each, text in zip(some, texts, strict=True)
    ]
    await table.change([replace(each, origin=None) for each in some], SNAPSHOT)
    query = LetterQuery(Selection(reasons=set(Reason)))
    shown = [(await table.largest_groups(query, (), 5, texts=each))[0][0][2] for each in (True, False, None)]
    assert shown == ["hidden", "often", None]


def test_a_table_writes_nothing_to_a_temporary_file() -> None:
    # 2 is SQLite's number for memory. A file's name is gone as soon as it is open, so no folder would show one.
    assert LetterTable()._database.execute("PRAGMA temp_store").fetchone() == (2,)  # noqa: SLF001
