"""The server's times are parsed with their nanoseconds."""

from __future__ import annotations

from airflow_provider_jetstream.spark.source.source_stream import parse_time


def test_times_of_the_server_are_exact() -> None:
    assert parse_time("2026-11-21T15:10:11.609070807Z") == 1795273811609070807
    assert parse_time("2026-11-21T15:10:11.6Z") == 1795273811600000000
    assert parse_time("2026-11-21T15:10:11Z") == 1795273811000000000
