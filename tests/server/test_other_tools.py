"""What other tools set on a queue's stream and consumers is refused or named by all who work with the queue."""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    WorkQueue,
    diagnose_dead_letters,
    discover_queue,
    find_dead_letters,
    plan,
    provision,
    publish,
    running_warnings,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import DriftError, QueueDeclarationError
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed.dead_letters import change_consumer, change_stream
from testbed.face import consumer_info, known_queue, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    running_worker,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

SECOND = 10**9


async def set_consumer(connection: NatsPyConnection, queue: str, changes: dict[str, Any], name: str = CONSUMER) -> None:
    """Change a consumer as another tool does."""
    config = (await connection.api(f"CONSUMER.INFO.{queue}.{name}"))["config"]
    await connection.api(f"CONSUMER.CREATE.{queue}.{name}", {"stream_name": queue, "config": config | changes})


async def recreate_consumer(connection: NatsPyConnection, queue: str, changes: dict[str, Any]) -> None:
    """Create the consumer anew, with what no update can set."""
    config = (await connection.api(f"CONSUMER.INFO.{queue}.{CONSUMER}"))["config"]
    await connection.api(f"CONSUMER.DELETE.{queue}.{CONSUMER}")
    for removed in ("max_waiting",) if "deliver_subject" in changes else ():
        config.pop(removed)
    request = {"stream_name": queue, "config": config | changes}
    await connection.api(f"CONSUMER.CREATE.{queue}.{CONSUMER}", request)


async def start(queue: WorkQueue, settings: ConnectionSettings) -> None:
    """Start a worker, and stop it once it takes jobs."""
    worker = Worker(queue, CONSUMER, lambda job: None, settings)
    async with running_worker(worker) as running:
        await asyncio.wait([running], timeout=0.3)


REFUSED: dict[str, dict[str, Any]] = {
    "headers_only": {"headers_only": True},
    "deliver_subject": {"deliver_subject": "d"},
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_workers_would_do_wrong_is_refused_before_a_job_is_taken(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, field: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3})
    await (set_consumer if field == "headers_only" else recreate_consumer)(connection, name, REFUSED[field])
    await publish(connection, queue, [Job(b"body", id="1")], subject=f"{name}.jobs.x")
    ran: list[Delivery] = []
    with pytest.raises(WorkerSetupError, match=field):
        await asyncio.wait_for(Worker(queue, CONSUMER, ran.append, settings).run(), 5)
    assert (ran, await stored_count(connection, name), await stored_count(connection, f"{name}-events")) == ([], 1, 0)
    blocked = (await plan(connection, queue)).blocked
    assert [field in step.blocked[0] for step in blocked] == [True]
    with pytest.raises(DriftError, match=field):
        await provision(connection, queue)
    for found in (
        await running_warnings(connection, queue),
        (await find_dead_letters(connection, queue)).risks,
        (await diagnose_dead_letters(connection, queue)).risks,
    ):
        assert any(field in sentence for sentence in found)


NAMED: dict[str, dict[str, Any]] = {
    "inactive_threshold": {"inactive_threshold": 3_600 * SECOND},
    "mem_storage": {"mem_storage": True},
    "replay_policy original": {"replay_policy": "original"},
    "max_waiting": {"max_waiting": 1},
    "max_expires": {"max_expires": SECOND // 2},
}
NOT_SCANNED = {"max_waiting", "max_expires"}


@pytest.mark.slow
@pytest.mark.parametrize("field", NAMED)
async def test_what_other_tools_set_on_a_consumer_is_named(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name)
    await recreate_consumer(connection, name, NAMED[field])
    caplog.set_level(logging.WARNING)
    await start(queue, settings)
    assert any(field in line for line in caplog.messages)
    assert any(field in str(warning) for warning in await running_warnings(connection, queue))
    if field != "replay_policy original":
        assert any(field in note for step in (await plan(connection, queue)).steps for note in step.notes)
    named = any(field in risk for risk in (await find_dead_letters(connection, queue)).risks)
    assert named is (field not in NOT_SCANNED)


STREAM: dict[str, dict[str, Any]] = {
    "allow_rollup_hdrs": {"allow_rollup_hdrs": True},
    "republishes headers only": {"republish": {"src": ">", "dest": "jobs.{name}.>", "headers_only": True}},
    "has no copy|have no copy": {"republish": {"src": "{name}.jobs.a.>", "dest": "jobs.{name}.>"}},
    "subject_delete_marker_ttl": {
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "subject_delete_marker_ttl": SECOND,
    },
    "persist_mode": {"persist_mode": "async"},
    "discard_new_per_subject": {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 3},
    "takes jobs from": {"sources": [{"name": "up-{name}"}]},
}


def named_after(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: named_after(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [named_after(item, name) for item in value]
    return value.replace("{name}", name) if isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.parametrize("field", STREAM)
async def test_what_other_tools_set_on_a_stream_is_named(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name)
    words = field.split("|")
    if field == "persist_mode":
        config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
        await connection.api(f"STREAM.DELETE.{name}")
        await connection.api(f"STREAM.CREATE.{name}", config | STREAM[field])
        await provision(connection, queue)
    else:
        await connection.api(f"STREAM.CREATE.up-{name}", {"name": f"up-{name}", "subjects": [f"up.{name}"]})
        await change_stream(connection, name, **named_after(STREAM[field], name))

    def says(sentences: Any) -> bool:
        return any(word in str(sentence) for sentence in sentences for word in words)

    caplog.set_level(logging.WARNING)
    await start(queue, settings)
    assert says(caplog.messages)
    assert says(await running_warnings(connection, queue))
    assert says((await find_dead_letters(connection, queue)).risks)
    planned = await plan(connection, queue)
    if field in ("allow_rollup_hdrs", "subject_delete_marker_ttl"):
        # Provisioning switches it off.
        assert any(difference.field == field for step in planned.changes for difference in step.differences)
    elif "republish" not in STREAM[field]:
        assert says(note for step in planned.steps for note in step.notes)


@pytest.mark.slow
async def test_a_marker_of_an_expired_job_is_no_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    # The server keeps a marker for as long, and lets no job expire earlier.
    await change_stream(connection, name, allow_msg_ttl=True, allow_rollup_hdrs=True, subject_delete_marker_ttl=SECOND)
    await publish_jobs(connection, queue, ["gone"], kind="a", headers={"Nats-TTL": "1s"})

    async def marker() -> dict[str, Any] | None:
        state = (await connection.api(f"STREAM.INFO.{name}"))["state"]
        if state["first_seq"] != 2:
            return None
        message: dict[str, Any] = (await connection.api(f"STREAM.MSG.GET.{name}", {"seq": 2}))["message"]
        return message

    stored = await eventually(marker)
    assert "data" not in stored
    headers = dict(line.split(": ") for line in base64.b64decode(stored["hdrs"]).decode().strip().splitlines()[1:])
    # Once more, since the server's own may be gone before the worker has started.
    await publish_jobs(connection, queue, [""], kind="a", headers={"Nats-Marker-Reason": headers["Nats-Marker-Reason"]})
    # Whoever publishes a job may give it the header: its job is one.
    await publish_jobs(connection, queue, ["body"], kind="b", headers={"Nats-Marker-Reason": "MaxAge"})
    ran: list[bytes] = []

    async def handle(job: Delivery) -> None:
        ran.append(job.body)

    caplog.set_level(logging.INFO)
    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await until_stored(connection, name, 0)
    assert ran == [b"body"]
    assert any("message 3 on" in line and "marker of an expired job" in line for line in caplog.messages)
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_a_queue_that_other_streams_feed_is_discovered_provisioned_and_worked(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    await connection.api(f"STREAM.CREATE.edge-{name}", {"name": f"edge-{name}", "subjects": [f"edge.{name}.>"]})
    source = {"name": name, "retention": "workqueue", "sources": [{"name": f"edge-{name}"}]}
    await connection.api(f"STREAM.CREATE.{name}", source)
    consumer = {"name": CONSUMER, "filter_subject": f"edge.{name}.jobs", "max_deliver": 2, "ack_wait": "30s"}
    queue = WorkQueue(
        name=name, subjects=[], consumers=[consumer], dead_letters=f"{name}-dead", events=f"{name}-events"
    )
    await provision(connection, queue)
    assert not (await plan(connection, queue)).changes
    discovered = await discover_queue(connection, name)
    assert (discovered.subjects, discovered.consumers[0].filter_subjects) == ((), (f"edge.{name}.jobs",))
    ran: list[bytes] = []

    async def handle(job: Delivery) -> None:
        ran.append(job.body)

    await connection.publish_acknowledged(f"edge.{name}.jobs", b"from the edge")
    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await eventually(lambda: ran)
    assert ran == [b"from the edge"]
    # Its jobs come from elsewhere, so letters come back in place.
    assert "no-copies" in {risk.name for risk in (await find_dead_letters(connection, queue)).risks}


async def test_a_queue_without_subjects_that_nothing_feeds_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = WorkQueue(name=name, subjects=[], consumers=[{"name": CONSUMER, "max_deliver": 2}])
    with pytest.raises(DriftError, match="it has no subjects, and no sources or mirror"):
        await provision(connection, queue)
    with pytest.raises(QueueDeclarationError, match="has no subjects"):
        WorkQueue(name=name, consumers=[{"name": CONSUMER, "max_deliver": 2}])
    # Subjects of a queue that nothing else feeds aren't taken away.
    await make_queue(connection, name)
    with pytest.raises(DriftError, match="it has no subjects"):
        await provision(connection, queue)


@pytest.mark.parametrize(
    ("transform", "right", "wrong"),
    [
        ({"src": "{name}.jobs.>", "dest": "{name}.stored.>"}, "{name}.stored.a", "{name}.jobs.a"),
        (
            {"src": "{name}.jobs.*", "dest": "{name}.{{partition(2,1)}}.{{wildcard(1)}}"},
            "{name}.1.*",
            "{name}.jobs",
        ),
        ({"src": "{name}.jobs.*", "dest": "{name}.words.{{split(1,-)}}"}, "{name}.words.a.b", "{name}.other.a"),
    ],
)
async def test_filters_are_compared_with_what_is_stored(
    connection: NatsPyConnection, name: str, transform: dict[str, str], right: str, wrong: str
) -> None:
    queue = await make_queue(connection, name, consumers=[], dead_letters=None, archive=False)
    await change_stream(connection, name, subject_transform=named_after(transform, name))
    declared = {"name": name, "subjects": list(queue.subjects), "events": f"{name}-events"}

    def with_filter(subject: str) -> WorkQueue:
        return WorkQueue(
            **declared, consumers=[{"name": CONSUMER, "filter_subject": named_after(subject, name), "max_deliver": 2}]
        )

    with pytest.raises(DriftError, match="so it would never get a job"):
        await provision(connection, with_filter(wrong))
    await provision(connection, with_filter(right))
    assert not [
        warning.name
        for warning in await running_warnings(connection, with_filter(right))
        if warning.name == "filter-outside-subjects"
    ]


@pytest.mark.slow
async def test_a_filter_that_matches_nothing_is_named_by_lint_and_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    await set_consumer(connection, name, {"filter_subject": f"{name}.typo"})
    assert "filter-outside-subjects" in {warning.name for warning in await running_warnings(connection, queue)}
    await start(queue, settings)
    assert any("so it would never get a job" in line for line in caplog.messages)
    other = WorkQueue(name="q", subjects=["q.>"], consumers=[{"name": "w", "filter_subject": "z", "max_deliver": 1}])
    assert "filter-outside-subjects" in {warning.name for warning in other.warnings()}


# What other tools set on a queue is named, with what it means, by whoever relies on the queue next.


CHANGES_SECOND = 1_000_000_000
HOUR = 3_600 * CHANGES_SECOND
ENDLESS = "never becomes a dead letter"


@dataclass(frozen=True)
class Change:
    """What another tool sets.

    :param stream: what follows the queue's name in the name of the stream; ``None`` for the consumer
    :param found: what is said about it
    """

    fields: dict[str, Any]
    found: str
    stream: str | None = None
    declared: dict[str, Any] = field(default_factory=dict)
    consumer: dict[str, Any] = field(default_factory=dict)


def on_stream(suffix: str, found: str, declared: dict[str, Any] | None = None, **fields: Any) -> Change:
    return Change(fields, found, suffix, declared or {})


def on_consumer(found: str, declared: dict[str, Any] | None = None, **fields: Any) -> Change:
    return Change(fields, found, consumer=declared or {})


CHANGES = {
    "republish": on_stream("", "republish is unset", republish=None),
    "subjects narrowed": on_stream("", "subjects is", subjects=["{}.jobs.a.>"]),
    "subjects added": on_stream("", "subjects is", subjects=["{}.jobs.>", "{}.more"]),
    "duplicate window": on_stream(
        "", "duplicate_window is 1s, declared 10m", {"duplicate_window": "10m"}, duplicate_window=CHANGES_SECOND
    ),
    "max age": on_stream("", "max_age is 1h, declared 0", {"max_age": -1}, max_age=HOUR),
    "fewer jobs": on_stream("", "max_msgs is 5, declared 100", {"max_msgs": 100}, max_msgs=5),
    "dropping": on_stream("", "discard is old, declared new", {"discard": "new", "max_msgs": 100}, discard="old"),
    "letters' subjects": on_stream("-dead", "subjects is", subjects=["dead.{}.>"]),
    "letters' age": on_stream(
        "-dead", "max_age is", {"dead_letters": {"name": "{}-dead", "max_age": -1}}, max_age=HOUR
    ),
    "letters' mark": on_stream("-dead", "metadata is", metadata={}),
    "events' subjects": on_stream("-events", "subjects is", subjects=["cancelled.{}.>"]),
    "events' age": on_stream("-events", "max_age is 1h, declared 7d", max_age=HOUR),
    "archive's age": on_stream("-archive", "max_age is 1h, declared 7d", {"archive": {"max_age": "7d"}}, max_age=HOUR),
    "audit's subjects": on_stream("-audit", "subjects is", subjects=["audit.{}.redrives.>"]),
    "max deliver": on_consumer(ENDLESS, {"max_deliver": 5}, max_deliver=-1),
    "fewer deliveries": on_consumer("max_deliver is 2, declared 5", {"max_deliver": 5}, max_deliver=2),
    "sampling": on_consumer("sample_freq is unset, declared 100%", {"sample_freq": "100%"}, sample_freq=""),
    "ack wait": on_consumer("ack_wait is 1s, declared 30s", {"ack_wait": "30s"}, ack_wait=CHANGES_SECOND),
    "backoff": on_consumer(
        "backoff is [1s], declared [5s]",
        {"backoff": ["5s"], "max_deliver": 2, "ack_wait": None},
        backoff=[CHANGES_SECOND],
    ),
    "no backoff": on_consumer(
        "backoff is unset", {"backoff": ["5s"], "max_deliver": 2, "ack_wait": None}, backoff=None
    ),
    "filter": on_consumer(
        "filter_subject is {}.jobs.a.>", {"filter_subject": "{}.jobs.>"}, filter_subject="{}.jobs.a.>"
    ),
    "in flight": on_consumer("max_ack_pending is 1, declared 50", {"max_ack_pending": 50}, max_ack_pending=1),
}


def named(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace("{}", name)
    if isinstance(value, list):
        return [named(item, name) for item in value]
    return {key: named(item, name) for key, item in value.items()} if isinstance(value, dict) else value


async def declared_queue(connection: NatsPyConnection, name: str, change: Change) -> WorkQueue:
    consumer = {key: value for key, value in named(change.consumer, name).items() if value is not None}
    if "backoff" in consumer:
        queue = small_queue(name, consumers=[{"name": CONSUMER, "sample_freq": "0", **consumer}])
    else:
        queue = small_queue(name, consumer=consumer, **named(change.declared, name))
    await provision(connection, queue)
    return queue


async def apply_change(connection: NatsPyConnection, name: str, change: Change) -> str:
    """Set what the other tool sets; return how the stream or consumer is called."""
    fields = named(change.fields, name)
    if change.stream is None:
        await change_consumer(connection, name, **fields)
        return f"consumer {CONSUMER} of {name}"
    await change_stream(connection, f"{name}{change.stream}", **fields)
    return f"{name}{change.stream}"


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
async def test_scans_lint_and_page_name_each_change_until_it_is_provisioned_again(
    connection: NatsPyConnection, name: str, change: Change
) -> None:
    queue = await declared_queue(connection, name, change)
    assert changes_in((await find_dead_letters(connection, queue)).risks) == []
    noted = (await stream_info(connection, f"{name}-events"))["config"]["metadata"]["provisioned_at"]
    label = await apply_change(connection, name, change)
    (found,) = changes_in((await find_dead_letters(connection, queue)).risks)
    assert label in found
    assert named(change.found, name) in found
    # By when: since what was provisioned, by the server's clock.
    assert f"since it was provisioned at {datetime.fromisoformat(noted):%Y-%m-%dT%H:%M:%SZ}" in found
    assert "Provision the queue before work" in found
    assert found in [str(warning) for warning in await running_warnings(connection, queue)]
    # The page and the commands have no declaration: they compare with what was provisioned.
    by_name = await known_queue(connection, name)
    assert found in changes_in((await find_dead_letters(connection, by_name)).risks)
    assert found in (await diagnose_dead_letters(connection, by_name)).text
    await provision(connection, queue)
    assert changes_in((await find_dead_letters(connection, queue)).risks) == []
    assert changes_in((await find_dead_letters(connection, await discover_queue(connection, name))).risks) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["letters' subjects", "events' subjects", "audit's subjects", "max deliver"])
@pytest.mark.parametrize("own_first", [True, False], ids=["own first", "the other first"])
@pytest.mark.parametrize("wide", ["{}-advisory.>", "{}-reports.*.>"])
async def test_what_another_queue_has_noted_hides_nothing(
    connection: NatsPyConnection, name: str, kind: str, wide: str, *, own_first: bool
) -> None:
    # A list by the queue's subjects has the other events stream as well: a subject with wildcards overlaps.
    other = f"{'z' if own_first else 'a'}{name}"
    await provision(connection, small_queue(other, advisory_subjects=[wide.replace("{}", other)]))
    queue = await declared_queue(connection, name, CHANGES[kind])
    await apply_change(connection, name, CHANGES[kind])
    (found,) = changes_in((await find_dead_letters(connection, queue)).risks)
    assert changes_in((await find_dead_letters(connection, await known_queue(connection, name))).risks) == [found]
    assert changes_in((await find_dead_letters(connection, await known_queue(connection, other))).risks) == []
    await connection.api(f"STREAM.DELETE.{other}-events")


def changes_in(risks: Any) -> list[str]:
    return [str(risk) for risk in risks if risk.name == "not-as-declared"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["republish", "duplicate window", "subjects narrowed"])
async def test_a_publisher_names_what_its_queue_lacks_without_another_request(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    queue, origin = await declared_queue(connection, name, CHANGES[kind]), Origin("dag", "run", "task", max_tries=1)
    await apply_change(connection, name, CHANGES[kind])
    for number in range(2):
        await publish(connection, queue, [b"job"], subject=f"{name}.jobs.a.{number}", origin=origin)
    texts = [record.getMessage() for record in caplog.records if "isn't as declared" in record.getMessage()]
    (text,) = texts
    assert f"queue {name} isn't as declared" in text
    assert named(CHANGES[kind].found, name) in text
    await provision(connection, queue)
    await publish(connection, queue, [b"job"], subject=f"{name}.jobs.a.x", origin=origin)
    await apply_change(connection, name, CHANGES[kind])
    await publish(connection, queue, [b"job"], subject=f"{name}.jobs.a.y", origin=origin)
    # Once each time that it is so.
    assert len([record for record in caplog.records if "isn't as declared" in record.getMessage()]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["max deliver", "sampling", "filter", "ack wait", "republish", "letters' subjects"])
async def test_a_wait_names_what_its_queue_lacks_as_it_begins(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    change = CHANGES[kind]
    queue = await declared_queue(connection, name, change)
    await apply_change(connection, name, change)
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [b"job"], subject=f"{name}.jobs.a.x")
    task = asyncio.create_task(wait(connection, cursor, report.sequences))
    try:
        await eventually(lambda: "isn't as declared" in caplog.text)
    finally:
        task.cancel()
    assert named(change.found, name) in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["max deliver", "ack wait", "backoff", "republish", "events' subjects", "letters' age"]
)
async def test_a_worker_names_at_its_start_what_its_queue_lacks(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    caplog.set_level(logging.WARNING)
    queue = await declared_queue(connection, name, CHANGES[kind])
    await apply_change(connection, name, CHANGES[kind])

    async def handle(_: Delivery) -> None:
        """Do nothing."""

    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await eventually(lambda: "isn't as declared" in caplog.text)
    assert named(CHANGES[kind].found, name) in caplog.text


async def test_a_consumer_that_was_created_anew_is_named_with_the_time(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 5, "ack_wait": "30s"})
    config = (await consumer_info(connection, name, CONSUMER))["config"]
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    config = {key: config[key] for key in ("durable_name", "name", "ack_policy", "deliver_policy", "ack_wait")}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
    (found,) = changes_in((await find_dead_letters(connection, queue)).risks)
    created = datetime.fromisoformat((await consumer_info(connection, name, CONSUMER))["created"])
    assert f"created anew at {created:%Y-%m-%dT%H:%M:%SZ}, after the queue was provisioned at" in found


async def test_dead_letters_of_a_queue_whose_deliveries_became_endless_are_still_found_by_its_name(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    letters = await make_dead_letters(connection, queue, "ab")
    await change_consumer(connection, name, max_deliver=-1)
    found = await find_dead_letters(connection, await known_queue(connection, name))
    assert {letter.sequence for letter in found.letters} <= set(letters)
    assert ENDLESS in "".join(changes_in(found.risks))


async def test_a_declaration_that_has_changed_since_is_told_from_a_change_of_the_server(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, consumer={"ack_wait": "30s"})
    later = small_queue(name, consumer={"ack_wait": "1m"})
    (found,) = changes_in((await find_dead_letters(connection, later)).risks)
    assert "isn't provisioned as it is declared now: ack_wait is 30s, declared 1m" in found
    assert "isn't as declared" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "note",
    ["{", "[]", "[" * 20_000, '{"name": 7}', '{"name": "other"}', '{"name": "{}", "max_msgs": 1e999}', "x" * 70_000],
)
async def test_a_note_that_another_tool_has_changed_is_no_declaration(
    connection: NatsPyConnection, name: str, note: str
) -> None:
    queue = await make_queue(connection, name)
    await change_stream(
        connection, f"{name}-events", metadata={"declaration": note.replace("{}", name), "provisioned_at": "yesterday"}
    )
    assert changes_in((await find_dead_letters(connection, queue)).risks) == []
    await change_stream(connection, name, republish=None)
    (found,) = changes_in((await find_dead_letters(connection, queue)).risks)
    assert "republish is unset" in found
    await provision(connection, queue)
    assert (await plan(connection, queue)).changes == ()
