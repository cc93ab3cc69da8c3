"""The lint: each best practice and anti-pattern of work queues by its name, with a place that explains it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from source_code import ROOT

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.field_rules import RULES
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_PAGE = Path(__file__).parents[2] / "docs" / "queue-warnings.md"
_DAY = 86_400 * 1_000_000_000


def _queue(**changes: Any) -> WorkQueue:
    """Declare a queue of which nothing is warned, with changes."""
    values: dict[str, Any] = {
        "name": "q",
        "subjects": ["q.>"],
        "consumers": [{"name": "w", "max_deliver": 3, "backoff": ["1s", "10s"]}],
        "discard": "new",
        "max_bytes": "256MB",
        "dead_letters": "dead",
        "events": "events",
    }
    return WorkQueue(**values | changes)


def _consumer(**changes: Any) -> dict[str, Any]:
    return {"consumers": [{"name": "w", "max_deliver": 3, "backoff": ["1s"]} | changes]}


_CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "AckWait of ten minutes": (
        _consumer(backoff=(), ack_wait="10m", max_deliver=1),
        "long-ack-wait",
        (
            "consumer w: an ack_wait of 10m delays the redelivery of a crashed worker's jobs by that time; use a"
            " shorter one and let workers report progress"
        ),
    ),
    "a backoff that is the AckWait": (
        _consumer(backoff=["10m"]),
        "long-ack-wait",
        (
            "consumer w: a first backoff of 10m delays the redelivery of a crashed worker's jobs by that time; use a"
            " shorter one and let workers report progress"
        ),
    ),
    "no MaxDeliver": (
        _consumer(max_deliver=-1) | {"dead_letters": None, "archive": False},
        "no-max-deliver",
        "consumer w retries for ever (max_deliver -1): a poison job is run again and again",
    ),
    "no backoff": (
        _consumer(backoff=()),
        "no-backoff",
        (
            "consumer w has no backoff: a job that a worker naks without a delay uses up its deliveries at once;"
            ' declare waits such as ["1s", "5s", "30s"]'
        ),
    ),
    "stateful workers": (
        _consumer(priority_groups=["g"], priority_policy="pinned_client"),
        "stateful-workers",
        (
            "consumer w gives all its jobs to one worker (pinned_client), as only workers with state of their own need:"
            " keep the state outside, and let any worker do any job"
        ),
    ),
    "no limit of jobs in flight": (
        _consumer(max_ack_pending=-1),
        "unlimited-ack-pending",
        (
            "consumer w has no limit of jobs in flight (max_ack_pending -1): one worker that pulls too many keeps them"
            " from all others for the ack wait"
        ),
    ),
    "one job in flight": (
        _consumer(max_ack_pending=1),
        "one-job-at-a-time",
        (
            "consumer w has one job in flight at a time (max_ack_pending 1), whatever the number of its workers:"
            " declare partitions, each with an order of its own"
        ),
    ),
    "long window": (
        {"duplicate_window": "1h"},
        "duplicate-window",
        (
            "duplicate_window 1h: a job that is published again with its message id within that time isn't stored, even"
            " if the first one is done; give what shall run again another id"
        ),
    ),
    "short window": (
        {"duplicate_window": "1s"},
        "duplicate-window",
        (
            "duplicate_window 1s: a publisher that repeats an unanswered request after that time stores the job twice;"
            " use the server's 2m"
        ),
    ),
    "unmarked": (
        {"dead_letters": {"name": "dead", "metadata": {}}},
        "unmarked-dead-letters",
        'dead has no metadata dead_letter_queue: "true", by which tools find dead letter queues',
    ),
    "unbounded archive": (
        {"max_bytes": None},
        "unbounded-archive",
        (
            "q-archive has no limit of size, since neither it nor the queue declares max_bytes or max_msgs: it holds"
            " the copies of all jobs of the last 7d, done or not; declare a max_bytes"
        ),
    ),
    "short-lived copies": (
        {"archive": {"max_age": "1h"}},
        "archive-max-age",
        (
            "q-archive keeps copies for 1h: the body of a terminated job is lost after that, unless a scan has copied"
            " it; declare a longer max_age of the archive"
        ),
    ),
    "a time in a header": (
        {"execute_at_header": True},
        "execute-at-ack-pending",
        (
            "execute_at_header: a job that waits for its time counts as in flight, so consumer w delivers nothing else"
            " while as many wait as max_ack_pending allows (1,000)"
        ),
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_what_violates_a_best_practice_is_warned_of_by_its_name(case: str) -> None:
    changes, name, sentence = _CASES[case]
    warnings = [warning for warning in _queue(**changes).warnings() if warning.name != "no-dead-letters"]
    assert [(warning.name, warning) for warning in warnings if warning.name == name] == [(name, sentence)]
    assert {warning.name for warning in warnings} <= {name, "no-backoff"}


@pytest.mark.parametrize(
    "changes",
    [
        _consumer(ack_wait="5m", backoff=(), max_deliver=1),
        _consumer(max_deliver=1, backoff=()),
        {"max_bytes": None, "max_msgs": 10},
        {"max_bytes": None, "archive": {"max_bytes": "1GB"}},
        # Declared, so it is wanted.
        {"max_bytes": None, "archive": {"max_bytes": -1}},
        {"duplicate_window": "10m"},
        {"consumers": [_consumer(filter_subject="q.{partition}", partitions=2, max_ack_pending=1)["consumers"][0]]},
    ],
)
def test_what_is_good_practice_is_not_warned_of(changes: dict[str, Any]) -> None:
    assert _queue(**changes).warnings() == []


@pytest.mark.parametrize(
    ("consumers", "rule"),
    [
        ([{"name": "a", "max_deliver": 2}, {"name": "b", "max_deliver": 2}], "several-unfiltered-consumers"),
        ([{"name": "a"}], "no-max-deliver"),
    ],
)
def test_an_anti_pattern_that_loses_jobs_is_refused_with_its_rule(consumers: list[dict[str, Any]], rule: str) -> None:
    with pytest.raises(QueueDeclarationError, match=rf"\(docs/(?:queue-warnings|reference/server-fields)\.md#{rule}\)"):
        _queue(consumers=consumers)


def _warning_names() -> set[str]:
    """Return the names of all warnings that the package makes."""
    names: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "QueueWarning":
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}"
                names.add(str(node.args[0].value))
    return names


def test_every_warning_has_its_place_in_the_documentation() -> None:
    anchors = re.findall(r'<a id="([a-z-]+)"></a>', _PAGE.read_text(encoding="utf-8"))
    assert sorted(anchors) == sorted(set(anchors))
    assert set(anchors) == _warning_names() | {"several-unfiltered-consumers"}
    assert QueueWarning("message-size", "too small").rule == "docs/queue-warnings.md#message-size"
    # What follows from one field is explained where the table of these has it.
    assert QueueWarning("max-age", "old jobs are removed").rule == "docs/reference/server-fields.md#max-age"
    page = (_PAGE.parent / "reference" / "server-fields.md").read_text(encoding="utf-8")
    named = re.findall(r'<a id="([a-z-]+)"></a>', page)
    assert set(named) == {rule.name for rule in RULES} | {"unknown-field"}


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, {"max_bytes": 256 << 20}),
        ({"max_msgs": 20_000, "max_age": "7d"}, {"max_bytes": 256 << 20, "max_msgs": 20_000, "max_age": 14 * _DAY}),
        ({"max_bytes": -1, "max_msgs": -1, "max_age": -1}, {}),
        ({"max_msgs": 10, "archive": {"max_bytes": "1GB"}}, {"max_msgs": 10}),
        ({"max_msgs": 10, "archive": {"max_bytes": -1, "max_msgs": -1}}, {}),
        ({"archive": False}, {}),
    ],
)
def test_a_new_archive_has_the_limits_of_its_queue_that_it_does_not_declare(
    changes: dict[str, Any], limits: dict[str, int]
) -> None:
    queue = _queue(**changes)
    assert queue.new_archive_limits() == limits
    again = WorkQueue(**queue.model_dump(mode="json", exclude_unset=True))
    assert (again, again.new_archive_limits()) == (queue, limits)


def test_waiting_for_the_time_in_a_header_needs_a_second_delivery() -> None:
    with pytest.raises(
        QueueDeclarationError, match=r"consumer w delivers each job once .* set max_deliver to at least"
    ):
        _queue(execute_at_header=True, **_consumer(max_deliver=1))
