"""The delay after which a worker has a failed job delivered again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy


def policy(ack_wait: float = 30, max_deliver: int = -1, backoff: tuple[float, ...] = ()) -> RedeliveryPolicy:
    steps = tuple(round(step * NANOSECONDS) for step in backoff)
    return RedeliveryPolicy(round(ack_wait * NANOSECONDS), steps, max_deliver)


def delays(policy: RedeliveryPolicy, attempts: int) -> list[float]:
    """Return the delays in seconds without the random part, which is at most a fifth."""
    found = []
    for attempt in range(1, attempts + 1):
        delay = policy.backoff_delay(attempt)
        assert delay is not None
        found.append(delay / NANOSECONDS)
    return found


def test_a_consumer_without_backoff_has_the_workers_own_which_doubles_up_to_thirty_seconds() -> None:
    for delay, least in zip(delays(policy(), 8), [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert least <= delay <= least * 1.2


def test_a_failure_is_not_retried_later_than_a_crash() -> None:
    for delay, least in zip(delays(policy(ack_wait=3), 4), [1, 2, 3, 3], strict=True):
        assert least <= delay <= least * 1.2


def test_the_last_delivery_has_no_delay() -> None:
    five = policy(max_deliver=5)
    assert five.backoff_delay(4) is not None
    assert five.backoff_delay(5) is None
    assert five.nak_delay(10, 5) is None


def test_a_declared_backoff_replaces_the_workers_own() -> None:
    steps = policy(backoff=(5, 60), max_deliver=3)
    for attempt in (1, 2):
        # The server adds this delivery's backoff minus the first.
        delay = steps.backoff_delay(attempt)
        assert delay is not None
        assert 5 <= delay / NANOSECONDS <= 5 + 0.2 * (5, 60)[attempt - 1]


@given(seconds=st.floats(min_value=1e-3, max_value=1e300), attempt=st.integers(1, 10**9))
def test_any_delay_fits_into_the_servers_times(seconds: float, attempt: int) -> None:
    for consumer in (policy(), policy(backoff=(1, 2, 3))):
        delay = consumer.nak_delay(seconds, attempt)
        assert delay is not None
        # Nanoseconds since 1970, with the time now.
        assert delay < 2**63 - 2_000_000_000 * NANOSECONDS
        assert (consumer.backoff_delay(attempt) or 0) <= 37 * NANOSECONDS
