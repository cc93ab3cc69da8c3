"""What a watcher has reported survives its own form in JSON."""

from __future__ import annotations

import json

import pytest

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.dead_letters import letter_watch
from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import ReportedLetters


@pytest.mark.parametrize("value", ["\udcff\udcfe", "a\x00b", None])
def test_values_of_groups_are_text_that_can_be_stored(value: str | None) -> None:
    arrived = letter_watch._Arrived()  # noqa: SLF001
    arrived.add(1, 1)
    arrivals = letter_watch.Arrivals("q", 1, ("error_class",), {(value,): arrived}, ReportedLetters())
    assert json.dumps(arrivals.as_json(), ensure_ascii=False).encode()


@pytest.mark.parametrize("state", [None, "", {}, {"sequences": "x"}, {"created": 1, "sequences": None, "until": 1}])
def test_a_state_that_cannot_be_read_means_that_nothing_was_told(state: object) -> None:
    assert ReportedLetters.of_json(state) == ReportedLetters()
    reported = ReportedLetters("c", SequenceRanges.of([1, 2, 9]), 7)
    assert ReportedLetters.of_json(json.loads(json.dumps(reported.as_json()))) == reported
