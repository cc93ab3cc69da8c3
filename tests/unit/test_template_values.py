from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.tasks.arguments import (
    parse_number,
    parse_selection,
    selection_as_json,
)


@pytest.mark.parametrize(
    ("value", "kind", "number"),
    [
        (5, float, 5.0),
        ("5", float, 5.0),
        (" 0.5 ", float, 0.5),
        ("3", int, 3),
        (0, int, 0),
        (None, int, None),
        ("None", int, None),
        ("", float, None),
    ],
)
def test_a_number_may_be_text(value: object, kind: type[Any], number: float | None) -> None:
    assert parse_number("rate", value, kind) == number


@pytest.mark.parametrize(
    "sequences",
    [
        [3, 4, 5, 9],
        (3, 4, 5, 9),
        ["3", "4", "5", "9"],
        "[3, 4, 5, 9]",
        "3, 4, 5, 9",
        "[[3, 5], [9, 9]]",
        [[3, 5], 9],
        [(3, 5), ("9", "9")],
        "((3, 5), 9)",
    ],
)
def test_sequences_are_parsed_in_every_form(sequences: object) -> None:
    expected = Selection(sequences=frozenset({3, 4, 5, 9}))
    assert parse_selection(None, sequences) == parse_selection({"sequences": sequences}) == expected


def test_one_sequence_needs_no_list() -> None:
    assert parse_selection(None, "7") == parse_selection(None, 7) == Selection(sequences=frozenset({7}))


def test_an_empty_list_of_sequences_selects_nothing_rather_than_everything() -> None:
    assert parse_selection(None, []) == parse_selection(None, "[]") == Selection(sequences=frozenset())


@pytest.mark.parametrize("sequences", ["all", "None", {"first": 1}, [0], [[5, 3]], [[1, 2, 3]], ["x"], 1.5, "", [True]])
def test_values_that_are_no_sequences_are_refused(sequences: object) -> None:
    with pytest.raises(SelectionError, match=r"expected stream sequences such as \[3, 5\], or pairs of first and last"):
        parse_selection(None, sequences)


SELECTION = Selection.of({"reasons": [Reason.TERMINATED, Reason.EXPIRED], "older_than": "10m", "parked": True})


@pytest.mark.parametrize(
    "select",
    [
        SELECTION,
        {"reasons": ["terminated", "expired"], "older_than": timedelta(minutes=10), "parked": True},
        {"reasons": "['terminated', 'expired']", "older_than": "10m", "parked": "true"},
        '{"reasons": ["terminated", "expired"], "older_than": "10m", "parked": true}',
        "{'reasons': {'terminated', 'expired'}, 'older_than': '10m', 'parked': True}",
        selection_as_json(SELECTION),
    ],
)
def test_a_selection_is_parsed_in_each_form(select: object) -> None:
    assert parse_selection(select) == SELECTION


@pytest.mark.parametrize(
    ("select", "sequences", "message"),
    [
        ("everything", None, "expected a selection of dead letters such as"),
        (["terminated"], None, "expected a selection of dead letters such as"),
        ({"colour": "red"}, None, "expected a selection of dead letters by sequences, reasons"),
        ({"reasons": ["boredom"]}, None, "reasons"),
        ({"subject": ""}, None, "expected a value to select subject by, found '': leave subject out to select any"),
        ({"error_class": None}, None, "expected a value to select error_class by, found None"),
        ({"sequences": [1]}, [2], "expected sequences once, found them in select and as an argument"),
    ],
)
def test_a_selection_that_is_not_understood_is_refused(select: object, sequences: object, message: str) -> None:
    with pytest.raises(SelectionError) as raised:
        parse_selection(select, sequences)
    assert message in str(raised.value)
