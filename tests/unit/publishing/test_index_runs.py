"""Runs of indexes in a report of publishing."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.publishing.report import index_runs


def test_runs_of_jobs_stored_one_after_another() -> None:
    assert index_runs([]) == []
    assert index_runs([7, 8, 9]) == [(0, 7, 3)]
    assert index_runs([0, 8, 9, 0, 11, 13]) == [(1, 8, 2), (4, 11, 1), (5, 13, 1)]
