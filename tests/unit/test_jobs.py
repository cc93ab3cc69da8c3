from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import JobError, JobNotSerializableError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import Job, OutgoingJob, job_id_of
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs

_ORIGIN = Origin("orders", "manual__2026-01-01T00:00:00+00:00", "publish", 3)

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def _prepared(*items: object, subject: str | None = "q.a", origin: Origin | None = _ORIGIN) -> list[OutgoingJob]:
    return list(PreparedJobs(items, subject=subject, origin=origin, batch="batch"))


@given(_json.filter(lambda value: not isinstance(value, str)))
def test_a_json_body_comes_back_as_it_was(body: object) -> None:
    assert json.loads(Job(body).payload()) == body


@given(st.binary())
def test_bytes_are_published_as_they_are(body: bytes) -> None:
    assert Job(body).payload() == body


def _endless() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("body", "description"),
    [
        (object(), "object: Object of type object is not JSON serializable"),
        ({1, 2}, "set: Object of type set is not JSON serializable"),
        ({"a": float("nan")}, "dict: Out of range float values"),
        ([float("inf")], "list: Out of range float values"),
        ({(1, 2): 3}, "dict: keys must be str"),
        (bytearray(b"x"), "bytearray: Object of type bytearray"),
        ("\ud800", "str: 'utf-8' codec can't encode"),
        # The reason differs between versions of Python.
        (_endless(), "list: "),
    ],
    ids=["object", "set", "NaN", "infinity", "tuple key", "bytearray", "lone surrogate", "too deep"],
)
def test_a_body_that_cannot_be_serialised_is_refused_with_its_type(body: object, description: str) -> None:
    with pytest.raises(JobNotSerializableError) as caught:
        Job(body).payload()
    assert str(caught.value).startswith(f"expected a body of bytes, text or JSON values, found {description}")
    assert str(caught.value).endswith("; convert it before publishing")


@pytest.mark.parametrize(
    ("job", "job_id", "headers"),
    [
        (Job({"id": "a"}, id="a"), "a", {}),
        (Job({"id": 7}, id="7"), "7", {}),
        (Job('{"id": " a "}', id="a"), "a", {"Job-Id": "a"}),
        (Job({"id": " a "}), " a ", {}),
        (Job({"id": "  "}), None, {}),
        (Job({"id": "a"}, id="b"), "b", {"Job-Id": "b"}),
        (Job(b"x", id="b"), "b", {"Job-Id": "b"}),
        (Job({"id": True}, id="True"), "True", {"Job-Id": "True"}),
        (Job(b"x"), None, {}),
        # The body's id is the job's name, though it identifies nothing.
        (Job({"id": "a"}), "a", {}),
        (Job({"advisory": "a.b"}, advisory="a.b"), None, {}),
        (Job({"advisory": "a.b"}, advisory="c"), None, {"Job-Advisory": "c"}),
    ],
)
def test_a_header_says_only_what_nothing_else_says(job: Job, job_id: str | None, headers: dict[str, str]) -> None:
    (prepared,) = PreparedJobs([job], subject="orders.new", origin=_ORIGIN, batch="", by_key=True)
    identity = {name: value for name, value in prepared.headers.items() if name.startswith("Job-")}
    assert identity == headers
    assert prepared.body is not None
    read = job_id_of(prepared.headers.items(), prepared.body, 1)
    assert read == prepared.job_id == (job_id or prepared.message_id)


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b'{"id": null}',
        b'{"id": ""}',
        b'{"id": [1]}',
        b'{"id": "\\ud800"}',
        b'{"id": "\xff"}',
        b'{"id": "' + b"x" * 1_001 + b'"}',
        b'{"id": ' + b"9" * 5_000 + b"}",
        b'{"id":' + b"[" * 100_000,
        b'"id"',
        b"",
    ],
)
def test_a_body_whose_id_cannot_be_used_states_none(body: bytes) -> None:
    assert job_id_of([], body, 9) == "9"
    assert job_id_of([("Nats-Msg-Id", "m")], body, 9) == "m"


@pytest.mark.parametrize("message_id", ["a\udcff", "x" * 1_001, ""])
def test_a_message_id_that_cannot_be_sent_in_an_event_is_no_id(message_id: str) -> None:
    assert job_id_of([("Nats-Msg-Id", message_id)], b"", 9) == "9"


@pytest.mark.parametrize("job_id", ["a\r\nX: y", "a\nb", "\ud800"])
def test_an_id_that_no_header_can_hold_is_refused(job_id: str) -> None:
    with pytest.raises(JobError, match="expected text in one line, which a header can hold"):
        _prepared(Job(b"x", id=job_id))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Job(b"", subject="q.*"), "job 1 can't be published to 'q.*': a job's subject can't have wildcards"),
        (Job(b"", subject="q..a"), "job 1 can't be published to 'q..a': it has an empty token"),
        (Job(b"", subject="q a"), "job 1 can't be published to 'q a': it contains white space"),
        (
            Job(b"", headers={"nats-msg-id": "x"}),
            "job 1 sets nats-msg-id: headers starting with Nats- belong to the server",
        ),
        (
            Job(b"", headers={"Retry After": "x"}),
            "job 1 has a header 'Retry After': expected a name of letters, digits and dashes",
        ),
        (
            Job(b"", headers={"Retries": 3}),  # type: ignore[dict-item]
            "job 1, header Retries: expected text without line breaks, found 3",
        ),
        (
            Job(b"", headers={"Note": "a\r\nb"}),
            "job 1, header Note: expected text without line breaks, found 'a\\r\\nb'",
        ),
        (
            {"advisory": "call me"},
            (
                "job 1 can't be reported on 'call me': it contains white space or control characters; publish"
                " Job(body) where the body's advisory means something else"
            ),
        ),
    ],
)
def test_a_job_that_cannot_be_published_is_named_by_its_index(item: object, message: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(b"fine", item)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("header", "instead"),
    [
        ("Job-Id", "give the id as Job(id=…), or by job_id"),
        ("job-id", "give the id as Job(id=…), or by job_id"),
        ("Job-Advisory", "give the subject as Job(advisory=…)"),
        ("Scheduled-Msg-Id", "leave it out"),
        *((f"Airflow-{name}", "leave it out") for name in ("Task", "Dag-Id", "Run-Id", "Task-Id", "Map-Index")),
        *((f"Redrive-{name}", "leave it out") for name in ("Count", "Stream", "Sequence", "Consumer")),
    ],
)
@pytest.mark.parametrize("job", [Job(b""), Job(b"", id="a"), Job({"id": 1}), Job(b"", delay="1h")])
def test_a_header_that_the_publisher_writes_itself_is_refused(job: Job, header: str, instead: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(b"fine", replace(job, headers={"Own": "a", header: "mine"}))
    expected = f"job 1 sets the header {header}: expected none that the publisher or a redrive writes; {instead}"
    assert str(caught.value).startswith(expected)
