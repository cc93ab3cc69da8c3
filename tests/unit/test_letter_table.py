"""The table of letters counts what a count of single letters counts, whatever was added and removed before."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters import death_times
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.death_times import DeathTimes
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, LetterGroups
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.letter_count import LetterCount
from airflow_provider_jetstream.jetstream.dead_letters.letter_table import LetterTable
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.origin import Origin

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIELDS: tuple[GroupField, ...] = get_args(GroupField)


def dead_letter(sequence: int, number: int, *, parked: bool) -> DeadLetter:
    """Make a dead letter; ``number`` decides about its fields."""
    reason = (Reason.TERMINATED, Reason.MAX_DELIVERIES, Reason.UNDELIVERABLE)[number % 3]
    died_at = NOON + timedelta(seconds=number)
    error = ("app.BusyError", None)[number // 3 % 2]
    return DeadLetter(
        death=Death("q", "", sequence, f"c{number % 2}", reason, died_at, error_class=error),
        subject=f"jobs.{number % 4}",
        body=b"",
        headers=(),
        time="",
        source=BodySource.QUEUE,
        entries=(),
        preserved=True,
        ready_at=died_at,
        parked="poison" if parked else None,
        origin=Origin("dag", f"run{number % 5}", "task") if number % 2 else None,
    )


letters = st.builds(dead_letter, st.integers(1, 30), st.integers(0, 200), parked=st.booleans())
selections: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "reasons": st.sets(st.sampled_from(Reason), min_size=1),
        "error_class": st.just("app.BusyError"),
        "consumer": st.sampled_from(["c0", "c1", "c2"]),
        "subject": st.sampled_from(["jobs.1", "jobs.*", "other.>"]),
        "run_id": st.sampled_from(["run1", "run9"]),
        "older_than": st.sampled_from([0, 60 * 10**9]),
        "younger_than": st.sampled_from([100 * 10**9, 1_000 * 10**9]),
        "parked": st.booleans(),
    },
)
groupings = st.lists(st.sampled_from(FIELDS), unique=True, max_size=3).map(tuple)


def without_examples(groups: LetterGroups) -> dict[Any, Any]:
    """Return what groups count."""
    return {key: (group.count, group.first, group.last) for key, group in groups.items()}


@given(st.lists(letters | st.integers(1, 30), max_size=60), selections, groupings)
def test_a_table_counts_what_single_letters_count(
    changes: list[DeadLetter | int], select: dict[str, Any], group_by: tuple[GroupField, ...]
) -> None:
    table, known = LetterTable(FIELDS), dict[int, DeadLetter]()
    selection, now = Selection(**select), NOON + timedelta(seconds=150)
    count = LetterCount(table, selection, group_by)
    for change in changes:
        if change == 1:
            # What was counted once is counted again as far as it has changed.
            asyncio.run(count.with_ranges(now, 5))
        if isinstance(change, int):
            table.remove(change)
            known.pop(change, None)
        else:
            table.put(change, change.death.consumer)
            known[change.sequence] = change
    groups = LetterGroups()
    matching = [letter for _, letter in sorted(known.items()) if selection.matches(letter, now)]
    for letter in matching:
        groups.add(letter, group_by)
    for _ in range(2):
        counted = asyncio.run(count.groups(now))
        assert without_examples(counted) == without_examples(groups)
        found, ranges, beyond = asyncio.run(count.with_ranges(now, 100))
        assert (found, beyond) == (groups, 0)
        sequences = [sequence for first, last in ranges for sequence in range(first, last + 1)]
        assert sequences == [each.sequence for each in matching]
    assert len(table) == len(known)
    assert all(sequence in table for sequence in known)
    stored = [letter for letter in known.values() if letter.death.consumer == "c1"]
    assert table.count_taken("c1") == len(stored)
    assert table.count_taken("c1", above=15) == sum(letter.sequence > 15 for letter in stored)


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(-1, 21), st.integers(-1, 21))
def test_times_of_death_are_kept_in_order(changes: list[int], after: int, until: int) -> None:
    times, known = DeathTimes(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(death_times, "_PART", 2)
        for time in changes:
            if time in known and time % 3 == 0:
                times.remove(time)
                known.remove(time)
            else:
                times.add(time)
                known.append(time)
    assert list(times) == sorted(known)
    within = [time for time in sorted(known) if after < time <= until]
    if after <= until:
        assert times.count(after, until) == len(within)
    assert (times.count(None, None), times.count(after, None)) == (len(known), sum(time > after for time in known))
    if within:
        assert (times.next_after(after), times.last_until(until)) == (within[0], within[-1])
    if known:
        assert (times.next_after(None), times.last_until(None)) == (min(known), max(known))
