from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, SelectionError
from airflow_provider_jetstream.tasks.template_values import (
    absent,
    number,
    require_rendered,
    selection_as_json,
    selection_of,
    templated,
    text,
)


class FromAnotherTask:
    def resolve(self) -> None:
        """As Airflow's own have it."""


@pytest.mark.parametrize(
    ("value", "later"),
    [
        ("{{ params.rate }}", True),
        ("{% if a %}1{% endif %}", True),
        (FromAnotherTask(), True),
        ({"sequences": ["{{ one }}"]}, True),
        ({"subject": FromAnotherTask()}, True),
        ([[1, "{{ two }}"]], True),
        ("orders.>", False),
        ({"reasons": ["terminated"]}, False),
        (Selection(), False),
        (timedelta(1), False),
        (None, False),
        (5, False),
    ],
)
def test_what_is_only_known_later_is_recognised(value: object, *, later: bool) -> None:
    assert templated(value) is later


@pytest.mark.parametrize(
    ("given", "kind", "found"),
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
def test_numbers_may_arrive_as_text(given: object, kind: type[Any], found: float | None) -> None:
    assert number("rate", given, kind) == found


@pytest.mark.parametrize(
    ("given", "kind", "wanted"),
    [
        ("fast", float, "a number"),
        (True, int, "a whole number"),
        ("2.5", int, "a whole number"),
        ([1], float, "a number"),
        ("nan", float, "a number"),
        ("inf", int, "a whole number"),
    ],
)
def test_what_is_no_number_is_named(given: object, kind: type[Any], wanted: str) -> None:
    with pytest.raises(RedriveRequestError) as refused:
        number("rate", given, kind)
    assert str(refused.value) == f"expected {wanted} for rate, found {given!r}"


@pytest.mark.parametrize("value", [None, "", "None", " null "])
def test_nothing_is_nothing_however_it_is_written(value: object) -> None:
    assert absent(value)
    assert text(value) is None
    with pytest.raises(SelectionError, match="expected select to say which dead letters are meant, found that its"):
        require_rendered("select", value)


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
def test_sequences_are_taken_as_users_write_them(sequences: object) -> None:
    expected = Selection(sequences=frozenset({3, 4, 5, 9}))
    assert selection_of(None, sequences) == selection_of({"sequences": sequences}) == expected


def test_one_sequence_needs_no_list() -> None:
    assert selection_of(None, "7") == selection_of(None, 7) == Selection(sequences=frozenset({7}))


def test_no_sequence_at_all_selects_nothing_rather_than_everything() -> None:
    assert selection_of(None, []) == selection_of(None, "[]") == Selection(sequences=frozenset())


@pytest.mark.parametrize("sequences", ["all", "None", {"first": 1}, [0], [[5, 3]], [[1, 2, 3]], ["x"], 1.5, "", [True]])
def test_what_are_no_sequences_is_shown(sequences: object) -> None:
    with pytest.raises(SelectionError, match=r"expected stream sequences such as \[3, 5\], or pairs of first and last"):
        selection_of(None, sequences)


SELECTION = Selection(reasons=frozenset({Reason.TERMINATED, Reason.EXPIRED}), older_than="10m", parked=True)


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
def test_a_selection_is_taken_in_each_form(select: object) -> None:
    assert selection_of(select) == SELECTION


def test_one_reason_needs_no_list() -> None:
    assert selection_of({"reasons": "orphan"}) == Selection(reasons=frozenset({Reason.ORPHAN}))


def test_a_selection_is_written_the_same_each_time() -> None:
    written = json.dumps(selection_as_json(SELECTION))
    assert written == '{"reasons": ["expired", "terminated"], "older_than": 600000000000, "parked": true}'
    assert selection_as_json(Selection()) == {}


@pytest.mark.parametrize(
    ("select", "sequences", "message"),
    [
        ("everything", None, "expected a selection of dead letters such as"),
        (["terminated"], None, "expected a selection of dead letters such as"),
        ({"colour": "red"}, None, "expected a selection of dead letters by sequences, reasons"),
        ({"reasons": ["boredom"]}, None, "reasons"),
        ({"subject": ""}, None, "expected a value to select subject by, found '': leave subject out to select any"),
        ({"error_class": None}, None, "expected a value to select error_class by, found None"),
        ({"sequences": [1]}, [2], "expected sequences in one place, found them in select and as an argument"),
    ],
)
def test_a_selection_that_is_not_understood_is_refused(select: object, sequences: object, message: str) -> None:
    with pytest.raises(SelectionError) as refused:
        selection_of(select, sequences)
    assert message in str(refused.value)
