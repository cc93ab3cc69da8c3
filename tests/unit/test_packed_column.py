"""Columns of whole numbers: what was added is what is there, in few bytes."""

from __future__ import annotations

import sys
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.dead_letters.entry_index import PackedColumn

numbers = st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.integers(1_700_000_000_000_000, 1_700_000_000_999_999)
PART = 1_024


@given(
    st.lists(numbers, max_size=60),
    st.lists(numbers, max_size=30),
    st.integers(0, PART),
    st.lists(st.tuples(st.integers(0, PART), numbers), max_size=5),
    st.integers(0, PART),
    st.integers(0, PART),
)
def test_a_column_is_a_list_of_its_numbers(
    added: list[int], more: list[int], alike: int, replaced: list[tuple[int, int]], start: int, stop: int
) -> None:
    column, expected = PackedColumn([7] * alike), [7] * alike
    for number in added:
        column.append(number)
    expected += added
    column.extend(more)
    expected += more
    for position, number in replaced:
        if position < len(expected):
            column[position] = expected[position] = number
    # The last part still grows.
    column.append(3)
    expected.append(3)
    assert (list(column), len(column), column[-1]) == (expected, len(expected), 3)
    assert [column[position] for position in range(len(expected))] == expected
    assert column[start:stop] == expected[start:stop]
    assert column[start:] == expected[start:]
    for positions in ([], [0], range(len(expected)), range(start, min(stop, len(expected))), [1, 0, 2, 2]):
        if all(position < len(expected) for position in positions):
            assert column.at(positions) == [expected[position] for position in positions]
    with pytest.raises(IndexError):
        column[len(expected)]


@given(st.lists(numbers, max_size=80), numbers, st.integers(1, PART))
def test_a_place_is_found_in_a_rising_column(values: list[int], value: int, alike: int) -> None:
    expected = sorted([*values, *[200] * alike])
    column = PackedColumn()
    for number in expected:
        column.append(number)
    for each in (value, 200, 201, *values[:3]):
        assert column.bisect_left(each) == bisect_left(expected, each)


def test_numbers_below_zero_are_held() -> None:
    column = PackedColumn([-(2**62), 2**62, -1])
    column.append(-5)
    assert list(column) == [-(2**62), 2**62, -1, -5]


@pytest.mark.parametrize(
    ("values", "most"),
    [
        (range(1, 100_001), 2.5),
        ([3] * 100_000, 0.2),
        (range(10**15, 10**15 + 10**9, 10**4), 4.5),
    ],
)
def test_numbers_that_differ_little_take_few_bytes(values: range | list[int], most: float) -> None:
    column = PackedColumn()
    for value in values:
        column.append(value)
    size = sum(map(sys.getsizeof, (*column._parts, *column._bases, column._parts, column._bases)))  # noqa: SLF001
    assert size / len(values) < most
    assert column[:] == list(values)
