from __future__ import annotations

import json
import sys
import zoneinfo
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from airflow_provider_jetstream.jetstream.errors import JobError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import Job, OutgoingJob
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.publishing.schedules import schedule_once, schedule_repeated
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_LIMITS = ("max_msgs", "max_msgs_per_subject", "max_bytes", "max_msg_size")
_UNREMOVABLE: dict[str, Any] = {"discard": "new", "deny_purge": True, "deny_delete": True}
_NOW = datetime(2026, 11, 21, 9, tzinfo=UTC)


def _queue(**changes: Any) -> WorkQueue:
    values = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "w", "max_deliver": 2}], "schedules": True}
    return WorkQueue(**values | changes)


def _prepared(job: Job, queue: WorkQueue | None, origin: Origin | None = None) -> OutgoingJob:
    (outgoing,) = PreparedJobs([job], subject="q.a", origin=origin, batch="batch", queue=queue)
    return outgoing


@pytest.mark.parametrize(
    ("at", "delay", "expected"),
    [
        (_NOW, None, "@at 2026-11-21T09:00:00Z"),
        (datetime(2026, 12, 1, 8, 30, 0, 1500, timezone(timedelta(hours=2))), None, "@at 2026-12-01T06:30:00.001500Z"),
        ("2026-12-01 08:30:00+02:00", None, "@at 2026-12-01T06:30:00Z"),
        (None, "90s", "@at 2026-11-21T09:01:30Z"),
        (None, timedelta(milliseconds=1), "@at 2026-11-21T09:00:00.001000Z"),
        (None, 60_000_000_000, "@at 2026-11-21T09:01:00Z"),
        (None, "0", "@at 2026-11-21T09:00:00Z"),
    ],
)
def test_a_time_or_delay_is_written_as_the_server_reads_it(at: Any, delay: Any, expected: str) -> None:
    assert schedule_once(at, delay, _NOW) == expected


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("30s", "@every 30s"),
        ("@every 1h30m", "@every 5400s"),
        ("7d", "@every 604800s"),
        (timedelta(minutes=5), "@every 300s"),
        ("1500ms", "@every 1500000000ns"),
        (" 0 30 3 * * mon-fri ", "0 30 3 * * mon-fri"),
        ("*/2 * * * * *", "*/2 * * * * *"),
        ("@daily", "@daily"),
    ],
)
def test_a_repetition_is_written_as_the_server_reads_it(every: Any, expected: str) -> None:
    assert schedule_repeated(every) == expected


@pytest.mark.parametrize(
    ("every", "message"),
    [
        (
            "60 * * * * *",
            "expected seconds of 0 to 59, ranges such as 0-1, steps such as */2, or lists of these, found",
        ),
        ("0 0 24 * * *", "expected hours of 0 to 23"),
        ("0 0 8 0 * *", "expected days of the month of 1 to 31"),
        ("0 0 8 * 13 *", "expected months of 1 to 12 or jan to dec"),
        ("0 0 8 * * 7", "expected weekdays of 0 to 6 or sun to sat, ranges such as 0-1"),
        ("0 0 8 * * sunday", "found 'sunday', in the cron expression '0 0 8 * * sunday'"),
        ("0 0 8 L * *", "found 'L'"),
        ("0 0 8 * * fri-sun", "found 'fri-sun'"),
        ("0 */0 8 * * *", "found '*/0'"),
        ("0 1, 8 * * *", "found '1,'"),
        (
            "0 0 8 31 4,jun *",
            "expected a date that exists, found day 31 of month 4,jun, which never comes, in the cron",
        ),
    ],
)
def test_a_cron_expression_that_the_server_would_refuse_is_refused_with_the_wrong_field(
    every: str, message: str
) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        schedule_repeated(every)
    assert message in str(caught.value)


@pytest.mark.parametrize("time_zone", ["Europe/Vienna", ZoneInfo("Europe/Vienna")])
@pytest.mark.parametrize("every", ["0 30 8 * * *", "@daily"])
def test_a_cron_expression_can_have_a_time_zone(every: str, time_zone: str | ZoneInfo) -> None:
    job = _prepared(Job(b"", id="a", every=every, time_zone=time_zone), _queue())
    schedule = {key: value for key, value in job.headers.items() if key.startswith("Nats-")}
    assert schedule == {
        "Nats-Schedule": every,
        "Nats-Schedule-Target": "due.q.q.a",
        "Nats-Schedule-Time-Zone": "Europe/Vienna",
    }


@pytest.mark.parametrize(
    ("job", "message"),
    [
        *(
            (
                Job(b"", id="a", every="@daily", time_zone=zone),
                f'expected the name of a time zone, such as "Europe/Vienna", found {zone!r}',
            )
            for zone in ("Nowhere/City", "+02:00", "", "../UTC", "/etc/localtime", "Local", "Europe")
        ),
        (
            Job(b"", id="a", every="30s", time_zone="UTC"),
            "expected a time zone with a cron expression only, found 'UTC' with '@every 30s': leave it out, or write",
        ),
        (Job(b"", at=_NOW, time_zone="UTC"), "found 'UTC' without every: leave it out; at has a zone of its own"),
        (Job(b"", time_zone="UTC"), "found 'UTC' without every: leave it out"),
    ],
)
def test_an_unusable_time_zone_is_refused(job: Job, message: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(job, _queue())
    assert message in str(caught.value)


def test_a_machine_without_a_time_zone_database_leaves_the_check_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither the system's folders nor the package tzdata, as in small images.
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath([])
    # Others compare zones that they have: each name has one object, as long as it stays in the cache.
    ZoneInfo.clear_cache(only_keys=["Nowhere/City"])
    try:
        job = _prepared(Job(b"", id="a", every="@daily", time_zone="Nowhere/City"), _queue())
        assert job.headers["Nats-Schedule-Time-Zone"] == "Nowhere/City"
        with pytest.raises(JobError, match="expected the name of a time zone"):
            _prepared(Job(b"", id="a", every="@daily", time_zone=""), _queue())
    finally:
        zoneinfo.reset_tzpath()


def test_a_repeated_job_has_one_schedule_for_its_id_whoever_publishes_it() -> None:
    job = Job(b"", id="nightly report", every="0 0 3 * * *")
    prepared = [_prepared(job, _queue(), Origin("d", run, "t")) for run in "12"]
    assert {job.subject for job in prepared} == {f"scheduled.q.every.{sha256(b'nightly report').hexdigest()}"}
    assert ["Nats-Msg-Id" in job.headers for job in prepared] == [False, False]
    assert (prepared[0].headers["Nats-Schedule"], prepared[0].api_level) == ("0 0 3 * * *", 4)


@pytest.mark.parametrize(
    ("job", "queue", "message"),
    [
        (
            Job(b"", delay="1h"),
            None,
            "job 0 has a schedule: pass the queue too, which declares the stream of schedules",
        ),
        (Job(b"", delay="1h"), _queue(schedules=False), "and q takes none: declare schedules: true"),
        (Job(b"", at=_NOW, delay="1h"), _queue(), "job 0 has several of at, delay and every: keep one"),
        (Job(b"", every="30s"), _queue(), "job 0 has a repeating schedule: give it an id"),
        (Job(b"", id="a", every="soon"), _queue(), "job 0: expected a duration of at least a second"),
        (Job(b"", delay="soon"), _queue(), "job 0: expected a duration such as"),
    ],
)
def test_a_scheduled_job_that_the_queue_cannot_have_is_refused(job: Job, queue: WorkQueue | None, message: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(job, queue)
    assert message in str(caught.value)


def test_schedules_are_a_stream_of_their_own_and_neither_queue_nor_archive_has_them() -> None:
    queue = _queue(dead_letters="dead", consumers=[{"name": "w", "max_deliver": 2}], max_msg_size=5_000)
    assert queue.schedules is not None
    assert (queue.subjects, queue.companions()[-1]) == (("q.>",), queue.schedules)
    assert queue.schedules.subjects == ("scheduled.q.>", "due.q.q.>")
    for stream in (queue, *queue.companions()):
        flags = stream.config().get("allow_msg_schedules"), stream.config()["allow_rollup_hdrs"]
        assert flags == ((True, True) if stream is queue.schedules else (None, False))
    assert WorkQueue(**json.loads(json.dumps(queue.model_dump(mode="json", exclude_unset=True)))) == queue
    assert _queue(schedules="later").companion_names()[-1] == "later"
    assert _queue(schedules={"storage": "memory"}).companion_names()[-1] == "q-schedules"
    plain = _queue(dead_letters="dead", schedules=False)
    assert plain.schedules is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"schedules": {field: value}}, "can't have discard") for field, value in _UNREMOVABLE.items()),
        *(({"schedules": {field: 5}}, "can't have max_msgs") for field in _LIMITS),
        ({"schedules": {"subjects": ["scheduled.q.>"]}}, "the schedules stream q-schedules doesn't capture due.q.q.>"),
        ({"schedules": {"subjects": ["due.q.>"]}}, "the schedules stream q-schedules doesn't capture scheduled.q.>"),
        ({"schedules": "q"}, "are both named q"),
        ({"subjects": ["scheduled.*.a"]}, "overlaps scheduled.*.a of q"),
        ({"schedules": 5}, "schedules"),
        ({"allow_rollup_hdrs": True}, "allow_rollup_hdrs of stream q would let whoever publishes to it remove all"),
        ({"archive": {"allow_rollup_hdrs": True}}, "allow_rollup_hdrs of stream q-archive would let"),
    ],
)
def test_settings_that_exclude_schedules_or_protect_nobody_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QueueDeclarationError) as caught:
        _queue(**changes)
    assert message in str(caught.value)
