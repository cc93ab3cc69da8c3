from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import Record, read_record, record_headers
from airflow_provider_jetstream.jetstream.line_text import one_line

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.headers import Headers, Pairs

DIED = datetime(2026, 11, 21, 9, 4, 44, 670123, tzinfo=UTC)
CREATED = "2026-11-20T00:00:00.123456789Z"
STORED = "2026-11-21T09:04:40.1Z"
DEATH = Death("orders", CREATED, 17, "printer", Reason.TERMINATED, DIED)


def keep(death: Death = DEATH, *, headers: Pairs = (), parked: str | None = None) -> Headers:
    return record_headers(death, subject="orders.a", time=STORED, headers=headers, writer="worker", parked=parked)


def copy(headers: Pairs, subject: str = "dead.orders.printer.17", data: bytes = b"body") -> StoredMessage:
    return StoredMessage(subject, 3, "2026-11-21T09:04:45Z", headers, data)


def read(headers: Pairs, subject: str = "dead.orders.printer") -> Record:
    found = read_record(copy(headers, subject), "orders")
    assert found is not None
    return found


def by_name(pairs: Pairs) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    return dict(found)


def sent_unchanged(headers: Headers) -> bool:
    return all(
        name.isascii()
        and name.isprintable()
        and not {" ", ":"} & set(name)
        and value == value.strip()
        and not {"\r", "\n"} & set(value)
        and value.encode()
        for name, value in headers.items()
        if value
    )


moments = st.timedeltas(timedelta(days=-20_000), timedelta()).map(lambda delta: DIED + delta)
texts = st.none() | st.text(max_size=1_200)
# Bytes that aren't UTF-8 are read as surrogates.
stored_text = st.text(
    st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), max_size=12
).filter(lambda text: "\r\n" not in text)
names = st.sampled_from(["Tag", "X", "Nats-Msg-Id", "nats-TTL", "Dead-Letter-Reason", "Two Words", "größe"]) | (
    stored_text.filter(lambda name: ":" not in name)
)
job_headers = st.lists(st.tuples(names, stored_text.map(str.strip)), max_size=8).map(tuple)


@given(
    headers=job_headers,
    reason=st.sampled_from(Reason),
    texts_of_death=st.tuples(texts, texts, texts, texts),
    where=st.tuples(st.none() | st.from_regex(r"\A[0-9a-f]{12}\Z"), texts),
    moments=st.tuples(moments, st.none() | moments),
    deliveries=st.none() | st.integers(1, 2**63),
    sequence=st.integers(1, 2**64 - 1),
)
def test_a_record_is_read_as_it_was_built(
    headers: Pairs,
    reason: Reason,
    texts_of_death: tuple[str | None, str | None, str | None, str | None],
    where: tuple[str | None, str | None],
    moments: tuple[datetime, datetime | None],
    deliveries: int | None,
    sequence: int,
) -> None:
    explanation, error_class, error_message, parked = texts_of_death
    texts = (explanation, error_class, error_message)
    death = Death("orders", CREATED, sequence, "printer", reason, *moments, deliveries, *texts, *where)
    kept = keep(death, headers=headers, parked=parked)
    assert sent_unchanged(kept)
    found, job, why, _ = read(kept.items())
    expected = replace(
        death,
        explanation=one_line(explanation),
        error_class=one_line(error_class),
        error_message=one_line(error_message),
        error_place=one_line(death.error_place),
    )
    assert (found, why) == (expected, one_line(parked))
    assert found.fingerprint == kept["Dead-Letter-Fingerprint"]
    assert (job.subject, job.sequence, job.time, job.data) == ("orders.a", sequence, STORED, b"body")
    assert by_name(job.headers) == by_name(headers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"dag_id": "a"}',
        '{"dag_id": "a", "run_id": "b", "task_id": 3}',
        '{"dag_id": "a", "run_id": "b", "task_id": "c", "map_index": "4"}',
        '{"dag_id": "a", "run_id": "b", "task_id": "c", "map_index": ' + "9" * 6_000 + "}",
        '{"dag_id": "' + "a" * 20_000 + '", "run_id": "b", "task_id": "c"}',
        "[" * 9_000,
        '{"dag_id": "\\ud800", "run_id": "b", "task_id": "c"}',
        "\udcff",
    ],
)
def test_a_record_whose_origin_is_none_names_no_task(text: str) -> None:
    kept = keep()
    assert read((*kept.items(), ("Dead-Letter-Origin", text))).origin is None


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("Job-Id", "x"),),
        (("Dead-Letter-Sequence", "4"),),
        (("Dead-Letter-Sequence", ""),),
        (("Dead-Letter-Consumer", "b"),),
        (("Dead-Letter-Stream", "invoices"),),
    ],
)
def test_headers_that_contradict_the_subject_are_those_of_no_record(headers: Pairs) -> None:
    assert read_record(copy(headers), "orders") is None


@pytest.mark.parametrize("sequence", ["", "0", "-1", "1.0", "x", "²", "٣", "9" * 5_000])
def test_a_copy_that_does_not_identify_its_job_is_no_record(sequence: str) -> None:
    assert read_record(copy((("Dead-Letter-Sequence", sequence),), "dead.orders.printer"), "orders") is None
    assert read_record(copy((("Dead-Letter-Sequence", sequence),), "dead.orders.printer.x"), "orders") is None


def test_invalid_values_are_read_as_absent() -> None:
    garbage = {
        "Stream-Created": "yesterday",
        "Subject": "two words",
        "Time": "noon",
        "Deliveries": "many",
        "Reason": "felt like it",
        "Explanation": " \t ",
        "Traceback-Digest": "File spooler.py, line 9",
        "Error-Place": "\n",
        "First-Failure": "2026-13-01",
        "Last-Failure": "0001-01-01T00:00:00+23:59",
        "Kept-Headers": '[["a"]]',
    }
    headers = tuple((f"Dead-Letter-{name}", value) for name, value in garbage.items())
    death, job, *_ = read(headers, "dead.orders.printer.17")
    assert death == Death("orders", "", 17, "printer", Reason.TERMINATED, datetime(2026, 11, 21, 9, 4, 45, tzinfo=UTC))
    assert (job.subject, job.time, job.headers) == ("", "", ())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, None),
        (" \n ", None),
        ("bad\r\n printer\t1", "bad printer 1"),
        ("a\x00b\x1b[31mc", "a\ufffdb\ufffd[31mc"),
        ("K\udcf6ln", "K\ufffdln"),
        ("größe 👍", "größe 👍"),
        ("x" * 5_000, "x" * 1_000),
        ("x" * 999 + " y", "x" * 999),
    ],
)
def test_any_text_becomes_one_line(text: str | None, line: str | None) -> None:
    assert one_line(text) == line


@pytest.mark.parametrize("tray", [7, 8])
def test_the_fingerprint_is_the_one_that_the_documentation_works_out(tray: int) -> None:
    death = replace(DEATH, error_class="IOError", error_message=f"no paper in tray {tray}")
    assert keep(death)["Dead-Letter-Fingerprint"] == "a43206344335"
