"""How long a trigger delays its event, by how long Airflow and its machine take."""

from __future__ import annotations

import os

import pytest

from airflow_provider_jetstream.triggers.triggerer import shortest_delay


@pytest.mark.parametrize(
    ("load", "elapsed", "delay"),
    [
        pytest.param(0.2, 0.5, 8.0, id="idle"),
        pytest.param(0.2, 6.0, 11.0, id="the trigger was started late"),
        pytest.param(4.0, 0.5, 11.0, id="two processes for a core"),
        pytest.param(9.0, 0.5, 15.0, id="more than four"),
        pytest.param(0.2, 50.0, 15.0, id="the trigger was started very late"),
    ],
)
def test_the_busier_airflow_is_the_longer_is_the_delay(
    load: float, elapsed: float, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "5")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert shortest_delay(elapsed) == delay


def test_a_machine_that_does_not_tell_its_load_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setenv("AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL", "5")
    monkeypatch.setattr(os, "getloadavg", unknown)
    assert shortest_delay() == 8.0
