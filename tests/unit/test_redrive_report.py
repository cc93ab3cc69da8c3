from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport, SequenceMap


def test_each_sequence_is_reported_once_in_any_order() -> None:
    sequences = SequenceMap({5: 15})
    for key, value in ((7, 17), (6, 16), (5, 25), (7, 27), (8, 18)):
        sequences.add(key, value)
    assert sequences == {5: 25, 7: 27, 6: 16, 8: 18}
    assert list(sequences) == [5, 7, 6, 8]
    assert list(sequences.new_sequences()) == [25, 27, 16, 18]
    assert repr(sequences) == "{5: 25, 7: 27, 6: 16, 8: 18}"
    found = (9 in sequences, "7" in sequences, 7 in sequences)  # type: ignore[comparison-overlap]
    assert found == (False, False, True)
    with pytest.raises(KeyError):
        sequences[1]


def test_a_stopped_redrive_reports_how_many_letters_it_handled() -> None:
    report = RedriveReport(cancelled=True)
    report.redriven.add(1, 2)
    report.add_parked(3)
    with pytest.raises(
        RedriveError, match=r"^stopped after 2 dead letters, as requested; .* running it again goes on with"
    ):
        report.raise_for_failures()
    RedriveReport().raise_for_failures()
