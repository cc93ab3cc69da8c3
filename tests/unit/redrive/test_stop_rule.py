"""Whether a wave's outcomes stop a redrive."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream import RedriveOutcomes, StopWhen


@pytest.mark.parametrize(("died_again", "stops"), [(0, False), (2, False), (3, True), (10, True)])
def test_more_than_the_allowed_share_stops(died_again: int, stops: object) -> None:
    outcomes = RedriveOutcomes(completed=10 - died_again, died_again=died_again, still_running=0, unknown=0)
    assert StopWhen(died_again=0.2).exceeds(outcomes) is stops


@pytest.mark.parametrize(("still_running", "unknown", "is_unknown"), [(0, 2, False), (0, 3, True), (1, 0, True)])
def test_jobs_whose_end_is_not_known_stop_as_those_that_died_again(
    still_running: int, unknown: int, is_unknown: object
) -> None:
    completed = 10 - still_running - unknown
    outcomes = RedriveOutcomes(completed=completed, died_again=0, still_running=still_running, unknown=unknown)
    assert StopWhen(died_again=0.2).is_unknown(outcomes) is is_unknown
