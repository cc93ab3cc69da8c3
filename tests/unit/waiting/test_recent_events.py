"""The events that were read last are kept, the older ones are dropped together."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.waiting.follower import RecentEvents


def test_at_least_a_generation_is_kept_and_what_is_dropped_is_known() -> None:
    events: RecentEvents[int, str] = RecentEvents(3)
    for number in range(1, 9):
        events.put(number, f"event {number}", number * 10)
    assert list(events.values()) == [f"event {number}" for number in range(4, 9)]
    assert [events.get(number) for number in (3, 4, 8)] == [None, "event 4", "event 8"]
    assert (len(events), events.dropped_upto) == (5, 30)


def test_a_later_event_takes_the_place_of_an_earlier_one_of_its_key() -> None:
    events: RecentEvents[str, int] = RecentEvents(2)
    for position, key in enumerate("ababab", start=1):
        events.put(key, position, position)
    assert sorted(events.values()) == [5, 6]
    assert events.dropped_upto == 4


def test_nothing_is_left_of_a_stream_that_is_created_anew() -> None:
    events: RecentEvents[int, int] = RecentEvents(1)
    for number in (5, 6, 7):
        events.put(number, number, number)
    events.clear()
    assert (len(events), events.get(7), events.dropped_upto) == (0, None, 0)
