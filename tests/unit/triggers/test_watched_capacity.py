"""Which consumers the watchers of a message trigger can share."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_jetstream.worker.errors import WorkerSetupError

pytest.importorskip("airflow.triggers.shared_stream", reason="the mode payload needs Airflow 3.3")

from airflow_provider_jetstream.triggers.message_producer import watched_capacity


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"deliver_subject": "d"}, "a push consumer"),
        ({"ack_policy": "none"}, "ack_policy none"),
        ({"ack_policy": "all"}, "ack_policy all"),
        ({"priority_policy": "pinned_client"}, "the priority policy pinned_client"),
        ({"max_ack_pending": None}, "no max_ack_pending"),
    ],
)
def test_a_consumer_that_watchers_cant_share_is_refused(config: dict[str, Any], problem: str) -> None:
    suitable = {"ack_policy": "explicit", "max_ack_pending": 1_000}
    assert watched_capacity(suitable, "q/c") == 1_000
    with pytest.raises(WorkerSetupError, match=problem):
        watched_capacity(suitable | config, "q/c")
