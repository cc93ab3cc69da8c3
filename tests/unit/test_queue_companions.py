"""The companions of a queue: defaults, forms of declaration, and conflicts."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.client.subjects import overlaps
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import Archive, Audit, Consumer, Events
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_DAY = 86_400 * 1_000_000_000
_MAX = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
_TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"
_METRIC = "$JS.EVENT.METRIC.CONSUMER.ACK"
_PARTS = {"archive": Archive, "audit": Audit}


def _queue(**changes: Any) -> WorkQueue:
    values = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "w", "max_deliver": 2}], "dead_letters": "dead"}
    return WorkQueue(**values | changes)


def _again(queue: WorkQueue) -> WorkQueue:
    return WorkQueue(**json.loads(json.dumps(queue.model_dump(mode="json", exclude_unset=True))))


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("declared", [None, True, {}], ids=["nothing", "true", "no fields"])
def test_a_queue_with_dead_letters_has_an_archive_and_an_audit(part: str, declared: object) -> None:
    queue = _queue() if declared is None else _queue(**{part: declared})
    stream = getattr(queue, part)
    reports = ("handled.q.*",) if part == "audit" else ()
    assert (stream.name, stream.subjects) == (f"q-{part}", (f"{part}.q.>", *reports))
    assert (stream.storage, stream.num_replicas, stream.allow_direct) == ("file", 1, True)
    # An audit that exists keeps what its stream has: it isn't made to drop records.
    assert stream.discard == {"archive": "old", "audit": None}[part]
    assert stream.max_age == {"archive": 7, "audit": 90}[part] * _DAY
    assert _again(queue) == queue


_COPIES = {"src": ">", "dest": "entries.q.>"}
_REMOVING_AUDIT = ("audit.q.>", "handled.q.*", "entries.q.>", f"{_TERMINATED}.dead.*")


@pytest.mark.parametrize(
    ("changes", "republish", "audited"),
    [
        ({"retention": "workqueue"}, _COPIES, _REMOVING_AUDIT),
        ({"retention": "interest"}, _COPIES, _REMOVING_AUDIT),
        ({"retention": "limits"}, None, ("audit.q.>", "handled.q.*")),
        ({"retention": "workqueue", "republish": None}, None, _REMOVING_AUDIT),
        # The server allows one stream per subject.
        ({"retention": "workqueue", "subjects": [f"{_MAX}.q.*"]}, _COPIES, _REMOVING_AUDIT),
        # Another work queue has its letters there, too.
        ({"retention": "workqueue", "subjects": [f"{_MAX}.*.*"]}, None, ("audit.q.>", "handled.q.*")),
    ],
)
def test_entries_are_copied_where_an_acknowledgement_removes_them(
    changes: dict[str, Any], republish: dict[str, str] | None, audited: tuple[str, ...]
) -> None:
    queue = _queue(dead_letters={"name": "dead", **changes})
    assert queue.dead_letters is not None
    assert queue.audit is not None
    assert queue.dead_letters.config().get("republish") == republish
    assert queue.audit.subjects == audited
    assert _again(queue) == queue


def test_entries_are_not_copied_where_nothing_captures_the_copies() -> None:
    letters = {"name": "dead", "retention": "workqueue"}
    for audit in (False, {"subjects": ["audit.q.>"]}):
        queue = _queue(dead_letters=letters, audit=audit)
        assert queue.dead_letters is not None
        assert queue.dead_letters.republish is None


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("off", [None, False])
def test_a_companion_can_be_disabled(part: str, off: object) -> None:
    queue = _queue(**{part: off})
    assert getattr(queue, part) is None
    assert getattr(_again(queue), part) is None
    assert (queue.archive_disabled, _again(queue).archive_disabled) == (part == "archive",) * 2


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize("form", ["name", "dict", "object"])
def test_a_companion_is_declared_by_its_name_or_its_fields(part: str, form: str) -> None:
    fields = {"name": "mine", "max_age": "30d", "max_bytes": "1MB"}
    declared: Any = {"name": "mine", "dict": fields, "object": _PARTS[part](**fields)}[form]
    queue = _queue(dead_letters=None, **{part: declared})
    stream = getattr(queue, part)
    assert (stream.name, stream.subjects) == ("mine", (f"{part}.q.>",))
    assert (stream.max_age == 30 * _DAY, stream.max_bytes == 1_048_576) == (form != "name",) * 2
    assert _again(queue) == queue
    assert queue.companions() == (stream,)


@pytest.mark.parametrize("part", _PARTS)
def test_a_companion_inherits_replicas_and_storage_unless_it_declares_others(part: str) -> None:
    alike = getattr(_queue(storage="memory", num_replicas="3"), part)
    assert (alike.storage, alike.num_replicas) == ("memory", 3)
    other = getattr(_queue(storage="memory", num_replicas=3, **{part: {"storage": "file", "num_replicas": 1}}), part)
    assert (other.storage, other.num_replicas) == ("file", 1)


def test_the_companions_are_in_the_order_of_provisioning_and_their_subjects_do_not_overlap() -> None:
    queue = _queue(events="events")
    assert [part.kind for part in queue.companions()] == [
        "dead letter queue",
        "events stream",
        "archive",
        "audit stream",
    ]
    streams = (queue, *queue.companions())
    assert len({stream.name for stream in streams}) == 5
    for one, other in combinations(streams, 2):
        assert [(a, b) for a in one.subjects for b in other.subjects if overlaps(a, b)] == []


def test_an_archived_queue_republishes_every_subject_and_its_archive_has_the_features_of_the_headers() -> None:
    queue = _queue(subjects=["a.>", "b"])
    assert queue.archive is not None
    assert queue.config()["republish"] == {"src": ">", "dest": "archive.q.>"}
    archive = queue.archive.config()
    assert (archive["duplicate_window"], archive["allow_msg_ttl"], archive["allow_atomic"]) == (100_000_000, True, True)
    assert "deny_delete" not in archive


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"archive": "q"}, "the work queue and the archive are both named q: each needs its own stream"),
        (
            {"audit": "dead"},
            "the dead letter queue and the audit stream are both named dead: each needs its own stream",
        ),
        ({"archive": {"name": "same"}, "audit": "same"}, "the archive and the audit stream are both named same"),
        (
            {"archive": {"subjects": ["archive.other.>"]}},
            "the archive q-archive doesn't capture archive.q.>, so no job would have a copy: add that subject",
        ),
        (
            {"audit": {"subjects": ["audit.other.>"]}},
            (
                "the audit stream q-audit doesn't capture audit.q.>, so what is done to dead letters would not be"
                " recorded: add that subject"
            ),
        ),
        (
            {"subjects": ["q.>", "archive.>"]},
            "subject archive.q.> of stream q-archive overlaps archive.> of q: the server allows one stream per subject",
        ),
        (
            {"archive": {"subjects": ["archive.q.>", "audit.>"]}},
            "subject audit.q.> of stream q-audit overlaps audit.> of q-archive: the server allows one stream per",
        ),
        ({"archive": {"retention": "limits"}}, "archive.retention: no such field"),
        ({"archive": 5}, "archive: Input should be a valid dictionary"),
        (
            {"atomic_redrive": True},
            "atomic_redrive: no such field any more: leave it out, and declare an archive (the default beside",
        ),
    ],
)
def test_conflicting_companions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QueueDeclarationError) as caught:
        _queue(**changes)
    assert any(problem.startswith(message) for problem in caught.value.problems), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({}, []),
        (
            {"archive": False},
            ["no archive: the body of a job that a worker terminates, or that the server deletes, is lost"],
        ),
        ({"archive": {"max_age": "1d"}}, []),
        (
            {"archive": {"max_age": "1d"}, "max_age": "2d"},
            [
                "max_age 2d removes waiting jobs and dead letters of that age without an advisory",
                (
                    "max_age 1d of q-archive is shorter than the queue's (2d): a job that waits longer has no copy when"
                    " it dies"
                ),
            ],
        ),
        (
            {"archive": {"discard": "new", "max_msgs": 5}},
            ["q-archive refuses copies once it is full (discard new): later jobs have none"],
        ),
        (
            {"archive": {"max_msg_size": "1MB"}},
            [
                (
                    "max_msg_size of q-archive may refuse copies: each is larger than its job by some hundred bytes of"
                    " headers; leave it out"
                )
            ],
        ),
        ({"archive": {"max_msg_size": "1MB"}, "max_msg_size": "512KB"}, []),
        ({"schedules": True}, []),
        (
            {"dead_letters": {"name": "dead", "max_age": "1d"}},
            ["max_age 1d of dead removes dead letters of that age unseen"],
        ),
        (
            {"dead_letters": {"name": "dead", "subjects": [f"{_MAX}.q.*"]}},
            [
                f"dead doesn't capture {_TERMINATED}.q.*: terminated jobs go unseen",
                "dead doesn't capture dead.q.>: a dead letter whose job the server removes has no copy there",
                "dead doesn't capture parked.q.>: a dead letter can't be parked",
            ],
        ),
    ],
)
def test_settings_that_cause_trouble_later_are_warned_of(changes: dict[str, Any], warnings: list[str]) -> None:
    limits = {"discard": "new", "max_bytes": "1GB"}
    consumers = [{"name": "w", "max_deliver": 2, "backoff": ["1s"]}]
    assert _queue(**limits | {"consumers": consumers} | changes).warnings() == warnings


@pytest.mark.parametrize(
    ("share", "captured"),
    [("100%", True), ("5", True), ("0", False), ("0%", False), (None, True)],
)
@pytest.mark.parametrize("form", [dict, Consumer], ids=["dict", "object"])
def test_the_events_capture_ack_metrics_unless_no_consumer_samples_them(
    share: str | None, form: Any, *, captured: bool
) -> None:
    consumers = [form(name="v", filter_subject="q.v", max_deliver=2, sample_freq="0")]
    consumers.append(form(name="w", filter_subject="q.w", max_deliver=2, sample_freq=share))
    queue = _queue(consumers=consumers, events="events")
    assert [consumer.sample_freq for consumer in queue.consumers] == ["0", share or "100%"]
    assert queue.events is not None
    assert queue.events.subjects == (
        "completed.q.>",
        "cancelled.q.>",
        "published.q.*",
        *([f"{_METRIC}.q.*"] if captured else []),
    )
    assert _again(queue) == queue


def test_consumers_are_sampled_only_where_the_events_capture_it() -> None:
    consumers = [{"name": "w", "max_deliver": 2}]
    assert _queue(consumers=consumers).consumer("w").sample_freq is None
    without = Events(name="events", subjects=("completed.q.>",))
    assert _queue(consumers=consumers, events=without).consumer("w").sample_freq is None
    wide = {"name": "events", "subjects": ["completed.q.>", "$JS.EVENT.METRIC.CONSUMER.ACK.>"]}
    assert _queue(consumers=consumers, events=wide).consumer("w").sample_freq == "100%"


@pytest.mark.parametrize(
    ("subjects", "events", "problem"),
    [
        ("q.done", "events", "subject q.done of stream events overlaps q.> of q"),
        ("audit.q.>", "events", "overlaps audit.q.>"),
        ("dead.*.>", "events", "dead.*.> of stream events overlaps dead.q.>"),
        ("completed.*.x.>", "events", "advisory subject completed.*.x.> overlaps completed.q.>, on which"),
        ("*.q.x", "events", "advisory subject *.q.x overlaps published.q.*, on which"),
        (">", "events", "subject > of stream events would capture JetStream's own API"),
        ("$SYS.ACCOUNT.x", "events", "subjects that begin with $ are the server's"),
        ("_INBOX.x", "events", "those with _INBOX are for answers to clients"),
        ("a..b", "events", "subject 'a..b' of stream events: it has an empty token"),
        ("advisory.>", None, "advisory_subjects (advisory.>) need events"),
        (
            "advisory.>",
            {"name": "e", "subjects": ["completed.q.>"]},
            "e doesn't capture the advisory subject advisory.>",
        ),
    ],
)
def test_advisory_subjects_that_can_not_be_used_are_refused(subjects: str, events: Any, problem: str) -> None:
    with pytest.raises(QueueDeclarationError, match=re.escape(problem)):
        _queue(subjects=["q.>"], events=events, dead_letters="dead", advisory_subjects=subjects)
