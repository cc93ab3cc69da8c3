from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker import Delivery
from example_workers.tasks import RESULTS, process

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RESULTS, str(tmp_path))
    return tmp_path


def delivery(job_id: str, attempt: int = 1, sequence: int = 17) -> Delivery:
    return Delivery(job_id, "tasks.0.email", b"to ann", {}, sequence, attempt)


def test_a_task_that_has_a_result_is_not_processed_again(results: Path) -> None:
    first = process(delivery("email-1"))
    # Another worker gets it after its redrive, under another sequence.
    assert process(delivery("email-1", attempt=2, sequence=40)) == first
    assert first == {"type": "email", "task": "to ann", "sequence": 17}
    assert len(list(results.iterdir())) == 1


def test_an_id_of_any_characters_has_a_result_of_its_own(results: Path) -> None:
    for job_id in ("../email", "email/1", "e-mail ü", "e" * 300):
        process(delivery(job_id))
    assert len(list(results.iterdir())) == 4
