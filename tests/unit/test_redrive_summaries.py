"""What a redrive in waves did, in a sentence: letters that died again and came back, or were parked, are known."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow_provider_jetstream.command.redrive_commands import redrive_text
from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes, Wave
from airflow_provider_jetstream.plugins.monitor.queue_actions import summary_of

NOW = datetime(2026, 11, 23, 2, 15, tzinfo=UTC)


def redrive(redriven: int, completed: int, *waves: Wave) -> Redrive:
    outcomes = RedriveOutcomes(completed=completed)
    fields = {"stream": "orders", "created": "", "run": "r", "began_at": NOW}
    return Redrive.model_validate(fields | {"id": "a", "redriven": redriven, "outcomes": outcomes, "waves": waves})


def wave(number: int, **fields: object) -> Wave:
    return Wave.model_validate({"number": number, "from_sequence": 1, "began_at": NOW, **fields})


def test_letters_that_were_brought_back_twice_or_parked_are_not_of_unknown_outcome() -> None:
    canary = wave(1, redriven=10, outcomes={"died_again": 10})
    rest = wave(2, redriven=100, brought_again=7, parked_again=3, outcomes={"completed": 97, "died_again": 3})
    done = redrive(110, 100, canary, rest)
    assert summary_of(done) == (
        "110 letters redriven, 7 of them once more after they had died again: 100 completed after redrive, 3 died again"
        " and were parked"
    )
    assert "110 redriven (7 of them once more after they had died again), 0 parked" in redrive_text(done)
