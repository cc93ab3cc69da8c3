"""The sizes of jobs and their copies, and the warning of a limit that leaves little room for bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.headers import wire_size
from airflow_provider_jetstream.jetstream.errors import JobTooLargeError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
from testbed.queues import small_queue

_ORIGIN = Origin("d" * 60, "r" * 60, "t" * 60)


def _size_warnings(**fields: Any) -> list[str]:
    return [warning for warning in small_queue("q", **fields).warnings() if warning.name == "message-size"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"max_msg_size": -1}, []),
        ({"max_msg_size": 512}, []),
        ({"max_msg_size": 280}, []),
        (
            {"max_msg_size": 279},
            [
                (
                    "max_msg_size 279: the headers of a DAG's job take 97 bytes, and those of its redriven copy 140,"
                    " which leaves 139 bytes for its body; raise the limit"
                )
            ],
        ),
        (
            {"max_msg_size": 140},
            [
                (
                    "max_msg_size 140: the headers of a DAG's job take 97 bytes, and those of its redriven copy 140,"
                    " which leaves nothing for its body; raise the limit"
                )
            ],
        ),
        (
            {"max_msg_size": 193, "dead_letters": None},
            [
                (
                    "max_msg_size 193: the headers of a DAG's job take 97 bytes, which leaves 96 bytes for its body;"
                    " raise the limit"
                )
            ],
        ),
        ({"max_msg_size": 194, "dead_letters": None}, []),
        (
            {"max_msg_size": 295, "schedules": True},
            [
                (
                    "max_msg_size 295: the headers of a DAG's job take 97 bytes, and those of its redriven copy 140,"
                    " and those of a scheduled job 148, which leaves 147 bytes for its body; raise the limit"
                )
            ],
        ),
        ({"max_msg_size": 296, "schedules": True}, []),
    ],
)
def test_a_limit_that_leaves_less_for_the_body_than_the_headers_need(
    fields: dict[str, Any], expected: list[str]
) -> None:
    assert _size_warnings(**fields) == expected


def test_the_numbers_are_documented() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert "those of a DAG's job take 97 bytes" in (docs / "queue-warnings.md").read_text()
    assert "a job of 372 bytes without an id in its body" in (docs / "redrive.md").read_text()


@given(
    st.builds(
        Job,
        st.text(max_size=60).map(lambda text: {"id": text, "n": "x"}) | st.binary(max_size=200),
        id=st.none() | st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=30),
        headers=st.dictionaries(
            st.sampled_from(["A", "traceparent", "Kind"]), st.text("ab é", max_size=40), max_size=3
        ),
    ),
    st.integers(100, 500),
    st.booleans(),
)
def test_what_is_prepared_fits_and_what_is_refused_does_not(job: Job, size: int, by_key: bool) -> None:  # noqa: FBT001
    limit = SizeLimit("q", size, redriven=False)
    (unlimited,) = PreparedJobs([job], subject="q.a", origin=_ORIGIN, batch="", by_key=by_key)
    assert unlimited.body is not None
    try:
        (outgoing,) = PreparedJobs([job], subject="q.a", origin=_ORIGIN, batch="", by_key=by_key, limit=limit)
    except JobTooLargeError:
        assert len(unlimited.body) + wire_size(unlimited.headers) > size
    else:
        assert len(unlimited.body) + wire_size(outgoing.headers) <= size
