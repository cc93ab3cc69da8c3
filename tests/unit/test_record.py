from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record import Record, read_record, record_headers

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
        "Traceback": " > ",
        "Worker": "\n",
        "Seconds": "nan",
        "First-Failure": "2026-13-01",
        "Last-Failure": "0001-01-01T00:00:00+23:59",
        "Kept-Headers": '[["a"]]',
    }
    headers = tuple((f"Dead-Letter-{name}", value) for name, value in garbage.items())
    death, job, *_ = read(headers, "dead.orders.printer.17")
    assert death == Death("orders", "", 17, "printer", Reason.TERMINATED, datetime(2026, 11, 21, 9, 4, 45, tzinfo=UTC))
    assert (job.subject, job.time, job.headers) == ("", "", ())


@pytest.mark.parametrize(("count", "kept"), [(3, 3), (40, 13)])
def test_a_traceback_keeps_its_innermost_functions(count: int, kept: int) -> None:
    functions = tuple(f"module:{'f' * 60}:{number:03}" for number in range(count))
    death = replace(DEATH, traceback=functions, worker="payments-1", seconds=0.25)
    found = read(keep(death).items()).death
    assert found == replace(death, traceback=functions[count - kept :], created=CREATED)


@pytest.mark.parametrize("tray", [7, 8])
def test_the_fingerprint_is_the_one_that_the_documentation_works_out(tray: int) -> None:
    death = replace(DEATH, error_class="IOError", error_message=f"no paper in tray {tray}")
    assert keep(death)["Dead-Letter-Fingerprint"] == "a43206344335"
