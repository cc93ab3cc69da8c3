"""The events that were read last are kept, the older ones are dropped together."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.waiting.follower import RecentEvents


def test_nothing_is_left_of_a_stream_that_is_created_anew() -> None:
    events: RecentEvents[int, int] = RecentEvents(1)
    for number in (5, 6, 7):
        events.put(number, number, number)
    events.clear()
    assert (len(events), events.get(7), events.dropped_upto) == (0, None, 0)
