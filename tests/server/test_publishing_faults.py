from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import PublishIncompleteError, connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from testbed.face import PreparedJobs, publish_prepared
from testbed.queues import eventually, make_queue, process_all, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import PublishReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_NAME = "q"
_JOBS = 3_000


@pytest.fixture
async def own(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to a server that the test may kill."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as opened:
        yield opened


def _jobs(count: int = _JOBS, *, at: int = -1, then: Callable[[], object] | None = None) -> Iterable[Any]:
    """Prepare jobs, and call ``then`` when the publisher reads job number ``at``."""

    def bodies() -> Iterator[str]:
        for number in range(count):
            if number == at and then is not None:
                then()
            yield f"job {number}"

    return PreparedJobs(bodies(), subject=f"{_NAME}.jobs.a", origin=None, batch=_NAME)


async def _process_all(connection: NatsPyConnection) -> Counter[str]:
    queue = await make_queue(connection, _NAME, consumer={"ack_wait": "1m", "max_ack_pending": -1})
    return await process_all(connection, queue, within=30)


def _check_unsent_and_unanswered(report: PublishReport, *, acknowledged: int) -> None:
    """Every job has one fate: stored, perhaps stored, or certainly not."""
    assert len(report.sequences) == _JOBS
    failed = {failure.index for failure in report.failures}
    assert len(failed) == len(report.failures)
    assert failed == {index for index, sequence in enumerate(report.sequences) if not sequence}
    assert report.stored >= acknowledged
    assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)
    for failure in report.failures:
        unsent = "it was not sent: the jobs before it got no answer" in str(failure.error)
        unanswered = "no acknowledgement after 3 attempts of 0.5 s" in str(failure.error)
        assert (unsent, unanswered) == (failure.certain, not failure.certain)


@pytest.mark.slow
async def test_every_job_is_stored_once_although_the_server_is_killed_and_restarted_during_the_call(
    own: NatsPyConnection, own_nats: NatsServer
) -> None:
    await make_queue(own, _NAME, consumer={"ack_wait": "1m"})
    killed, loop = asyncio.Event(), asyncio.get_running_loop()

    def kill() -> None:
        own_nats.kill()
        loop.call_soon_threadsafe(killed.set)

    task = asyncio.create_task(publish_prepared(own, _jobs(at=1_500, then=kill), window=200))
    await killed.wait()
    await asyncio.to_thread(own_nats.start)
    report = await asyncio.wait_for(task, 40)
    report.raise_for_failures()
    assert (report.stored, len(set(report.sequences))) == (_JOBS, _JOBS)
    assert await stored_count(own, _NAME) == _JOBS
    assert await _process_all(own) == Counter(f"job {number}" for number in range(_JOBS))


@pytest.mark.slow
async def test_a_call_that_failed_with_the_server_is_completed_by_the_same_call_after_a_restart(
    own: NatsPyConnection, own_nats: NatsServer
) -> None:
    await make_queue(own, _NAME, consumer={"ack_wait": "1m"})
    broken = await publish_prepared(own, _jobs(at=1_500, then=own_nats.kill), window=200, ack_timeout=0.2, attempts=2)
    assert 0 < broken.stored < _JOBS
    await asyncio.to_thread(own_nats.start)

    async def complete() -> bool:
        return (await publish_prepared(own, _jobs())).stored == _JOBS

    await eventually(complete, within=30)
    assert await _process_all(own) == Counter(f"job {number}" for number in range(_JOBS))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "stop", "freeze"])
async def test_a_server_that_stays_away_ends_the_call_with_the_fate_of_every_job(
    own: NatsPyConnection, own_nats: NatsServer, end: str
) -> None:
    await make_queue(own, _NAME)
    pid = own_nats.pid
    assert pid is not None
    ends = {"kill": own_nats.kill, "stop": own_nats.stop, "freeze": lambda: os.kill(pid, signal.SIGSTOP)}
    try:
        report = await publish_prepared(own, _jobs(at=1_500, then=ends[end]), window=200, ack_timeout=0.5, attempts=3)
    finally:
        if end == "freeze":
            os.kill(pid, signal.SIGCONT)
    _check_unsent_and_unanswered(report, acknowledged=1_000)
    assert sum(not failure.certain for failure in report.failures) <= 200
    with pytest.raises(PublishIncompleteError) as caught:
        report.raise_for_failures()
    first = min(report.failures, key=lambda failure: failure.index)
    assert str(caught.value).startswith(f"{report.stored} of {_JOBS} jobs are stored in {_NAME} (sequences 1-")
    assert f"job {first.index} (id {first.job_id}) may be stored: no acknowledgement after 3 attempts" in str(
        caught.value
    )
    assert f"; and {len(report.failures) - 5} more" in str(caught.value)


@pytest.mark.slow
async def test_jobs_reported_as_not_sent_are_really_not_stored(own: NatsPyConnection, own_nats: NatsServer) -> None:
    await make_queue(own, _NAME, consumer={"ack_wait": "1m"})
    report = await publish_prepared(own, _jobs(at=1_500, then=own_nats.kill), window=200, ack_timeout=0.2, attempts=2)
    unsent = {f"job {failure.index}" for failure in report.failures if failure.certain}
    assert unsent
    own_nats.start()
    await eventually(lambda: own.client.is_connected)
    stored = await _process_all(own)
    assert unsent & stored.keys() == set()
    acknowledged = {f"job {index}" for index, sequence in enumerate(report.sequences) if sequence}
    assert acknowledged <= stored.keys()
    assert max(stored.values()) == 1


@pytest.mark.slow
async def test_a_short_freeze_of_the_server_costs_nothing_but_time(own: NatsPyConnection, own_nats: NatsServer) -> None:
    await make_queue(own, _NAME, consumer={"ack_wait": "1m"})
    pid = own_nats.pid
    assert pid is not None
    loop = asyncio.get_running_loop()

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        loop.call_soon_threadsafe(loop.call_later, 1, os.kill, pid, signal.SIGCONT)

    report = await publish_prepared(own, _jobs(at=1_500, then=freeze), window=200, ack_timeout=0.3, attempts=20)
    report.raise_for_failures()
    assert await stored_count(own, _NAME) == _JOBS


async def test_a_stream_deleted_during_the_call_is_reported_for_the_other_jobs(own: NatsPyConnection) -> None:
    await make_queue(own, _NAME)
    loop = asyncio.get_running_loop()

    def delete() -> None:
        asyncio.run_coroutine_threadsafe(own.api(f"STREAM.DELETE.{_NAME}"), loop).result()

    report = await publish_prepared(own, _jobs(600, at=300, then=delete), window=50, ack_timeout=0.5)
    assert 200 <= report.stored < 600
    assert len(report.failures) == 600 - report.stored
    assert all(isinstance(failure.error, NotFoundError) for failure in report.failures)
    # A job in flight when the stream was deleted may have got no answer.
    assert sum(not failure.certain for failure in report.failures) <= 50


async def test_a_job_whose_first_answer_was_lost_before_the_stream_was_deleted_may_be_stored(
    own: NatsPyConnection,
) -> None:
    sent: list[bytes] = []

    async def answer_nothing(message: Msg) -> None:
        sent.append(message.data)
        await subscription.unsubscribe()

    subscription = await own.client.subscribe(f"{_NAME}.jobs.>", cb=answer_nothing)
    report = await publish_prepared(own, _jobs(1), ack_timeout=0.2)
    assert sent == [b"job 0"]
    (failure,) = report.failures
    assert (type(failure.error), failure.certain) == (NotFoundError, False)


@pytest.mark.slow
async def test_a_connection_closed_during_the_call_ends_it(own: NatsPyConnection) -> None:
    await make_queue(own, _NAME)
    loop = asyncio.get_running_loop()

    def close() -> None:
        asyncio.run_coroutine_threadsafe(own.client.close(), loop).result()

    report = await publish_prepared(own, _jobs(at=1_500, then=close), window=200, ack_timeout=0.5, attempts=3)
    assert report.stored + len(report.failures) == _JOBS
    assert all(isinstance(failure.error, UnreachableError) for failure in report.failures)
    assert ": nats: connection closed" in str(report.failures[-1].error)


async def test_a_connection_that_is_closed_already_publishes_nothing(own: NatsPyConnection) -> None:
    await own.client.close()
    with pytest.raises(UnreachableError, match="nothing was published: nats: connection closed"):
        await publish_prepared(own, _jobs(1))


async def test_a_cancelled_call_leaves_no_subscription(own: NatsPyConnection, own_nats: NatsServer) -> None:
    reached, loop = asyncio.Event(), asyncio.get_running_loop()
    # A subscriber that never answers, so the call waits.
    await own.client.subscribe(f"{_NAME}.jobs.>")
    # Once it is answered, the server has the subscription; the client's flush() may overtake it.
    await own.api("INFO")
    (before,) = own_nats.monitor("connz")["connections"]
    task = asyncio.create_task(
        publish_prepared(own, _jobs(at=100, then=lambda: loop.call_soon_threadsafe(reached.set)), window=100)
    )
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    def as_before() -> bool:
        (after,) = own_nats.monitor("connz")["connections"]
        return bool(after["subscriptions"] == before["subscriptions"])

    await eventually(as_before)
