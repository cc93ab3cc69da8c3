from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport, SequenceMap


def test_a_sequence_is_noted_once_in_whatever_order_they_come() -> None:
    found = SequenceMap({5: 15})
    for key, value in ((7, 17), (6, 16), (5, 25), (7, 27), (8, 18)):
        found.add(key, value)
    assert found == {5: 25, 7: 27, 6: 16, 8: 18}
    assert list(found) == [5, 7, 6, 8]
    assert list(found.new_sequences()) == [25, 27, 16, 18]
    assert repr(found) == "{5: 25, 7: 27, 6: 16, 8: 18}"
    assert (9 in found, "7" in found, 7 in found) == (False, False, True)
    with pytest.raises(KeyError):
        found[1]


def test_what_a_redrive_did_itself_is_not_gone() -> None:
    report = RedriveReport()
    report.redriven.add(1, 11)
    for sequence in (2, 5, 2, 5):
        report.add_parked(sequence)
    for sequence in (1, 2, 4, 3, 4, 5):
        report.add_gone(sequence)
    assert (list(report.parked), list(report.gone)) == ([2, 5], [4, 3])


def test_many_failures_are_counted_and_some_are_named() -> None:
    report = RedriveReport()
    for sequence in range(1, 1_501):
        report.add_failure(sequence, "full")
    assert (report.failures, len(report.failed)) == (1_500, 1_000)
    shown = report.as_json()
    assert (shown["failed"], list(shown["failures"])) == (1_500, [*range(1, 21)])
    with pytest.raises(RedriveError, match=r"0 dead letters were redriven, 1500 stayed .* 5: full; running it again"):
        report.raise_for_failures()


def test_a_redrive_that_was_stopped_says_how_far_it_came() -> None:
    report = RedriveReport(cancelled=True)
    report.redriven.add(1, 2)
    report.add_parked(3)
    with pytest.raises(
        RedriveError, match=r"^stopped after 2 dead letters, as asked; .* running it again goes on with"
    ):
        report.raise_for_failures()
    RedriveReport().raise_for_failures()
