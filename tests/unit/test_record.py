from __future__ import annotations

import json
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
from airflow_provider_jetstream.jetstream.origin import Origin

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.headers import Headers, Pairs

DIED = datetime(2026, 11, 21, 9, 4, 44, 670123, tzinfo=UTC)
CREATED = "2026-11-20T00:00:00.123456789Z"
STORED = "2026-11-21T09:04:40.1Z"
# A message without any header of a record is none.
VERSIONED = ("Dead-Letter-Version", "1")
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


@given(st.lists(st.tuples(st.sampled_from([name for name, _ in keep(parked="x").items()]), st.text()), max_size=6))
def test_no_garbage_in_a_foreign_copy_raises(headers: list[tuple[str, str]]) -> None:
    own = ("Dead-Letter-Stream", "Dead-Letter-Consumer", "Dead-Letter-Sequence")
    death, job, *_ = read((*(pair for pair in headers if pair[0] not in own), VERSIONED), "dead.orders.printer.17")
    assert (death.sequence > 0, death.died_at.tzinfo, job.time == "" or bool(job.stored_at)) == (True, UTC, True)
    assert death.fingerprint


def test_a_job_keeps_the_order_of_a_repeated_name_and_what_cannot_be_sent() -> None:
    headers = (("Tag", "b"), ("City", "K\udcf6ln"), ("Tag", "a\udcff"), ("Nats-TTL", "1s"), ("Tag", "b"), ("Empty", ""))
    kept = keep(headers=headers)
    assert kept.items()[0] == ("Empty", "")
    assert "Nats-TTL" not in kept
    assert by_name(read(kept.items())[1].headers) == by_name(headers)


names_of_a_task = st.tuples(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80), st.integers(-1, 2**40))


@given(task=names_of_a_task, headers=job_headers)
def test_a_record_names_the_task_whose_key_its_job_has(task: tuple[str, str, str, int], headers: Pairs) -> None:
    origin = Origin(*task, round=2)
    keyed = (*headers, ("Airflow-Task", origin.key))
    kept = record_headers(DEATH, subject="a", time=STORED, headers=keyed, writer="scan", origin=origin)
    assert sent_unchanged(kept)
    record = read(kept.items())
    assert record.origin == replace(origin, round=0)
    with_round = {**json.loads(kept["Dead-Letter-Origin"]), "round": 7}
    assert read((("Dead-Letter-Origin", json.dumps(with_round)),), "dead.orders.a.1").origin == record.origin
    assert by_name(record.job.headers) == by_name(keyed)
    # Other jobs have no use for it.
    others = record_headers(DEATH, subject="a", time=STORED, headers=headers, writer="scan", origin=origin)
    assert "Dead-Letter-Origin" not in others


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


def test_a_record_has_one_id_per_writer_and_delivery() -> None:
    assert keep()["Nats-Msg-Id"] == f"dead:worker:orders:17:{STORED}:0"
    assert keep(replace(DEATH, deliveries=3))["Nats-Msg-Id"] == f"dead:worker:orders:17:{STORED}:3"


@pytest.mark.parametrize("subject", ["dead.orders.printer.17", "dead.orders.printer", "parked.orders.printer.17"])
def test_a_foreign_copy_needs_only_its_sequence_and_reason(subject: str) -> None:
    headers = (("Job-Id", "x"), ("Dead-Letter-Sequence", "17"), ("Dead-Letter-Reason", "max_deliveries"))
    death, job, parked, _ = read(headers, subject)
    told_at = datetime(2026, 11, 21, 9, 4, 45, tzinfo=UTC)
    assert death == Death("orders", "", 17, "printer", Reason.MAX_DELIVERIES, told_at)
    assert (job.subject, job.time, job.headers, parked) == ("", "", (("Job-Id", "x"),), None)


def test_consumer_and_sequence_are_read_from_the_subject_where_headers_lack_them() -> None:
    death, *_ = read((VERSIONED,), "dead.orders.printer.17")
    assert (death.sequence, death.consumer, death.reason) == (17, "printer", Reason.TERMINATED)
    assert read((VERSIONED,), "dead.orders._.17")[0].consumer is None
    assert read((("Dead-Letter-Consumer", "b"),), "dead.orders._.17")[0] == replace(death, consumer="b")


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


def test_server_headers_that_a_foreign_worker_copied_are_not_the_jobs() -> None:
    headers = (("Nats-Msg-Id", "a"), ("Nats-Expected-Stream", "letters"), ("Dead-Letter-Later", "?"), ("Tag", "a"))
    assert read(headers, "dead.orders.printer.17")[1].headers == (("Tag", "a"),)


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    kept = keep(replace(DEATH, error_message="no paper"), headers=(("Nats-TTL", "1s"),))
    later = tuple((name, "2" if name == "Dead-Letter-Version" else value) for name, value in kept.items())
    assert read((*later, ("Dead-Letter-Severity", "high"))) == read(kept.items())


def test_a_time_without_zone_is_utc_and_others_are_converted() -> None:
    headers = (
        ("Dead-Letter-First-Failure", "2026-11-21T09:04:44"),
        ("Dead-Letter-Last-Failure", "2026-11-21T11:04:44.123456789+02:00"),
    )
    death, *_ = read(headers, "dead.orders.printer.17")
    assert death.first_failed_at == DIED.replace(microsecond=0)
    assert death.died_at == death.first_failed_at + timedelta(microseconds=123456)


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
