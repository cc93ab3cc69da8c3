from __future__ import annotations

import json
from copy import deepcopy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import (
    Archive,
    Audit,
    Consumer,
    DeadLetterQueue,
    Events,
    Retention,
)
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_GOOD: dict[str, Any] = {
    "name": "q",
    "subjects": ["q.>"],
    "consumers": [{"name": "w", "filter_subject": "q.w.>", "max_deliver": 5, "ack_wait": "30s"}],
    "dead_letters": "q_dead",
    "events": "q_events",
}
_MAX = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"


@pytest.fixture(params=["python", "dict", "yaml"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Any]], WorkQueue]:
    """Load a declaration in one of its three forms."""

    def from_yaml(values: dict[str, Any]) -> WorkQueue:
        file = tmp_path / "queue.yaml"
        file.write_text(yaml.safe_dump(values))
        return WorkQueue.load(str(file))

    loaders: dict[str, Callable[[dict[str, Any]], WorkQueue]] = {
        "python": lambda values: WorkQueue(**values),
        "dict": WorkQueue.load,
        "yaml": from_yaml,
    }
    return loaders[request.param]


def _with(**changes: Any) -> dict[str, Any]:
    return deepcopy(_GOOD) | changes


def _consumers(*changes: dict[str, Any]) -> dict[str, Any]:
    return _with(consumers=[{"name": f"w{index}", "max_deliver": 5} | change for index, change in enumerate(changes)])


def _consumer(**changes: Any) -> dict[str, Any]:
    return _with(consumers=[_GOOD["consumers"][0] | changes])


_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "overlapping filters": (
        _consumers({"filter_subject": "q.*.x"}, {"filter_subject": "q.a.*"}),
        (
            "the filters q.*.x (consumer w0) and q.a.* (consumer w1) overlap: in a work queue every job has one"
            " consumer; make them disjoint"
        ),
    ),
    "overlapping filters of one consumer": (
        _consumers({"filter_subjects": ["q.a.>", "q.a.b"]}),
        "the filter subjects q.a.> and q.a.b of consumer w0 overlap: keep one",
    ),
    "no max_deliver": (
        _with(consumers=[{"name": "w"}]),
        (
            "consumer w has no max_deliver, so the server would retry a poison job for ever and no job could become a"
            " dead letter: set it (5, say), or -1 where endless retries are wanted"
        ),
    ),
    "max_deliver of zero": (_consumer(max_deliver=0), "consumer w: expected max_deliver of at least 1, found 0"),
    "unfiltered beside others": (
        _consumers({}, {"filter_subject": "q.a"}),
        (
            "consumer w0 has no filter subject and would get every job: the server refuses other consumers beside it;"
            " give each its own filter"
        ),
    ),
    "ack_wait against backoff": (
        _consumer(backoff=["5s", "10s"]),
        "consumer w: the server replaces ack_wait (30s) by the first backoff (5s): drop ack_wait",
    ),
    "backoff longer than the deliveries": (
        _consumers({"backoff": ["1s", "2s", "3s"], "max_deliver": 2}),
        "consumer w0: expected at most max_deliver (2) backoff steps, found 3",
    ),
    "ack_wait of microseconds": (
        _consumer(ack_wait="10us"),
        "consumer w: expected ack_wait and backoff of at least 1ms, found 10us",
    ),
    "dedup window longer than max age": (
        _with(duplicate_window="2h", max_age="1h"),
        (
            "duplicate_window (2h) of stream q is longer than its max_age (1h): the server refuses that; shorten the"
            " window"
        ),
    ),
    "dedup window of zero": (
        _with(duplicate_window=0),
        "duplicate_window of stream q: expected at least 100ms, found 0; leave it out for the server's 2 minutes",
    ),
    "max age too short": (
        _with(max_age="5ms"),
        "max_age of stream q: expected at least 100ms, or -1, found 5ms",
    ),
    "dead letter queue that captures no advisory": (
        _with(dead_letters={"name": "q_dead", "subjects": [f"{_MAX}.other.*"]}),
        f"the dead letter queue q_dead doesn't capture {_MAX}.q.*, so dead letters would go unseen: add that subject",
    ),
    "events that capture no completion": (
        _with(events={"name": "q_events", "subjects": ["completed.other.>"]}),
        (
            "the events stream q_events doesn't capture completed.q.>, so the ends of jobs would not be stored: add"
            " that subject"
        ),
    ),
    "endless retries with a dead letter queue": (
        _consumer(max_deliver=-1),
        (
            "consumer w retries for ever (max_deliver -1), so the dead letter queue q_dead would never see a letter of"
            " it: set max_deliver, or drop dead_letters"
        ),
    ),
    "misspelt field": (
        _with(max_mesages=5),
        "max_mesages: no such field: check its spelling, it is JetStream's own name",
    ),
    "misspelt field of a consumer": (
        _consumer(ackwait="30s"),
        "consumers.0.ackwait: no such field: check its spelling, it is JetStream's own name",
    ),
    "queue name with a dot": (
        _with(name="q.1", subjects=["q.>"]),
        "'q.1' can't name a stream: expected no white space, dots, wildcards or slashes, at most 255 of them",
    ),
    "consumer name with a star": (_consumer(name="w*"), "'w*' can't name a consumer: expected no white space, dots"),
    "empty consumer name": (_consumer(name=""), "'' can't name a consumer: expected no white space, dots"),
    "no name": ({"subjects": ["q.>"]}, "name: Field required"),
    "no subjects": (_with(subjects=[], consumers=[]), "stream q has no subjects: name at least one"),
    "subject with an empty token": (
        _with(subjects=["q..x"], consumers=[]),
        "subject 'q..x' of stream q: it has an empty token (two dots together, or a dot at an end)",
    ),
    "subjects that overlap": (
        _with(subjects=["q.>", "q.w.*"]),
        "the subjects q.> and q.w.* of stream q overlap: keep one",
    ),
    "JetStream's own API": (
        _with(subjects=["q.>", "$JS.API.STREAM.>"]),
        "subject $JS.API.STREAM.> of stream q would capture JetStream's own API: narrow it",
    ),
    "acknowledgements": (
        _with(subjects=["q.>", "$JS.ACK.>"]),
        "subject $JS.ACK.> of stream q would capture JetStream's own API: narrow it",
    ),
    "any two tokens": (_with(subjects=["*.*"]), "subject *.* of stream q would capture JetStream's own API: narrow it"),
    "system events": (
        _with(subjects=["q.>", "$SYS.>"]),
        "subject $SYS.> of stream q would capture the server's system API: narrow it",
    ),
    "no job in flight": (
        _consumer(max_ack_pending=0),
        "consumer w: expected max_ack_pending of at least 1, or -1 for no limit, found 0",
    ),
    "fewer jobs than none": (_with(max_msgs=-2), "max_msgs: Input should be greater than or equal to -1"),
    "everything": (_with(subjects=[">"]), "subject > of stream q would capture JetStream's own API: narrow it"),
    "dead letters within the queue": (
        _with(subjects=["q.>", "dead.>"]),
        "subject dead.q.> of stream q_dead overlaps dead.> of q: the server allows one stream per subject",
    ),
    "dead letters within the events": (
        _with(events={"name": "q_events", "subjects": ["completed.q.>", "dead.>"]}),
        "subject dead.> of stream q_events overlaps dead.q.> of q_dead: the server allows one stream per subject",
    ),
    "a queue that is its own dead letter queue": (
        _with(dead_letters="q"),
        "the work queue and the dead letter queue are both named q: each needs its own stream",
    ),
    "one stream for dead letters and events": (
        _with(events="q_dead"),
        "the dead letter queue and the events stream are both named q_dead: each needs its own stream",
    ),
    "two consumers of one name": (
        _consumers({"name": "w", "filter_subject": "q.a"}, {"name": "w", "filter_subject": "q.b"}),
        "two consumers are named w",
    ),
    "both spellings of a filter": (
        _consumer(filter_subjects=["q.x"]),
        "consumers.0: expected filter_subject or filter_subjects, found both: keep one",
    ),
    "sample_freq that is no share": (
        _consumer(sample_freq="short_interval"),
        "consumer w: expected sample_freq such as \"100%\", found 'short_interval'",
    ),
    "bare seconds": (
        _consumer(ack_wait=30),
        (
            "consumers.0.ack_wait: a bare number is nanoseconds, as in JetStream's own configuration, and 30 ns is"
            ' shorter than any limit: write "30s" for seconds'
        ),
    ),
    "size that is none": (_with(max_bytes="plenty"), 'max_bytes: expected a size such as "256MB"'),
    "retention": (_with(retention="limits"), "retention: no such field"),
    "kept by no reason": (
        _with(dead_letters={"name": "d", "keep": {"undeliverable": "1d"}}),
        (
            "dead_letters.keep: expected ages by max_deliveries, terminated, deadline, expired, orphan, default,"
            " parked, found 'undeliverable': jobs that are undeliverable or unaccounted for are no dead letters, and"
            " are kept"
        ),
    ),
    "kept for nothing": (
        _with(dead_letters={"name": "d", "keep": {}}),
        "dead_letters.keep: expected an age for at least one reason, found none: leave keep out",
    ),
    "kept for no time": (
        _with(dead_letters={"name": "d", "keep": {"default": 0}}),
        "dead_letters.keep: default: expected an age above 0, or -1 to keep these letters, found 0",
    ),
    "kept for no duration": (
        _with(dead_letters={"name": "d", "keep": {"default": "a week"}}),
        "dead_letters.keep.default: expected a duration such as",
    ),
    "kept longer than stored": (
        _with(dead_letters={"name": "d", "max_age": "30d", "keep": {"default": "30d"}}),
        "dead_letters: keep.default: expected an age below the max_age (30d) of d, found 30d: the stream would drop",
    ),
    "kept without a limit": (
        _with(dead_letters={"name": "d", "max_age": "30d", "keep": {"terminated": "7d", "parked": -1}}),
        "dead_letters: keep.parked: expected an age below the max_age (30d) of d, found none",
    ),
    "kept without an audit": (
        _with(dead_letters={"name": "d", "keep": {"default": "30d"}}, audit=False),
        "expected an audit beside dead_letters.keep, found none: it records what is discarded",
    ),
}


@pytest.mark.parametrize("case", _BAD)
def test_an_invalid_declaration_is_refused_with_what_to_do(
    case: str, load: Callable[[dict[str, Any]], WorkQueue]
) -> None:
    values, message = _BAD[case]
    with pytest.raises(QueueDeclarationError) as caught:
        load(deepcopy(values))
    assert any(message in problem for problem in caught.value.problems), str(caught.value)
    assert f"the declaration of work queue '{values.get('name', '?')}' can't be used:\n  - " in str(caught.value)


@pytest.mark.parametrize(
    ("declare", "kind"),
    [
        (Consumer, "consumer"),
        (DeadLetterQueue, "dead letter queue"),
        (Events, "events stream"),
        (Archive, "archive"),
        (Audit, "audit stream"),
    ],
)
def test_a_declaration_outside_a_queue_is_named_by_its_kind(declare: Callable[..., object], kind: str) -> None:
    with pytest.raises(QueueDeclarationError, match=f"the declaration of {kind} 'part' can't be used:\n  - bogus: no"):
        declare(name="part", bogus=1)


def test_a_declaration_survives_json_unchanged(load: Callable[[dict[str, Any]], WorkQueue]) -> None:
    queue = load(_with(max_age="7d", max_bytes="256MB", metadata={"team": "a"}, num_replicas=3))
    dumped = json.loads(json.dumps(queue.model_dump(mode="json", exclude_unset=True)))
    again = WorkQueue.load(dumped)
    assert again == queue
    assert again.model_dump(mode="json", exclude_unset=True) == dumped
    assert queue.dead_letters is not None
    assert queue.dead_letters.num_replicas == 3


def test_how_long_letters_are_kept_is_declared_as_a_model_a_dict_or_yaml(tmp_path: Path) -> None:
    keep: dict[str, Any] = {"max_deliveries": "30d", "terminated": timedelta(days=7), "default": "90d", "parked": -1}
    letters = {"name": "q-dead", "keep": Retention(**keep)}
    queue = WorkQueue.load(_with(dead_letters=letters))
    assert WorkQueue.load(_with(dead_letters={"name": "q-dead", "keep": keep})) == queue
    file = tmp_path / "q.yaml"
    file.write_text(queue.to_yaml())
    assert "max_deliveries: 30d" in file.read_text()
    assert WorkQueue.load(str(file)) == WorkQueue.load(queue.as_values()) == queue
    assert queue.dead_letters is not None
    assert queue.dead_letters.keep is not None
    described = queue.dead_letters.keep.describe()
    assert described == "max_deliveries 30d, terminated 7d, default 90d, parked without a limit"
    assert "keep" not in queue.dead_letters.config()
    problem = r"the declaration of retention of dead letters '\?' can't be used:\n  - expected ages by"
    with pytest.raises(QueueDeclarationError, match=problem):
        Retention(poison="1d")
