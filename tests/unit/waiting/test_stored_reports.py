"""Reports of jobs as stored parts and as results: counted, bounded, parsed."""

from __future__ import annotations

import json

import pytest

from airflow_provider_jetstream.jetstream import (
    JobReport,
    WaitReport,
)
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JobReportsGoneError,
)
from airflow_provider_jetstream.jetstream.waiting.job_reports import (
    JobIds,
    JobReportSource,
    count_job_reports,
    plain_job_reports,
)
from airflow_provider_jetstream.jetstream.waiting.wait import RESULTS_BYTES
from airflow_provider_jetstream.tasks import job_reports
from airflow_provider_jetstream.tasks.job_reports import bounded_result, push_job_reports


def names(ids: dict[int, str]) -> JobIds:
    known = JobIds()
    known._extend([job_id.encode() for job_id in ids.values()])  # noqa: SLF001
    known.locate(list(ids))
    return known


def many(count: int) -> list[JobReport]:
    """Return reports of which every third is about a dead letter."""
    return [
        JobReport(f"job-{number}", number, "dead", 3, "shop.BankError", f"busy {number}")
        if number % 3 == 0
        else JobReport(f"job-{number}", number, "completed", 1, result={"row": number})
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("source", [None, 7, "job_reports", {}, [{"id": "a"}], {"parts": 3}, {"parts": [[1, 2]]}, b"x"])
def test_what_holds_no_reports_is_refused(source: object) -> None:
    with pytest.raises(ArgumentError, match="expected the reports on a task's jobs, found"):
        JobReportSource(source)


def test_reports_that_cant_be_stored_are_counted_and_the_failures_named() -> None:
    few = count_job_reports(many(3), queue="q", problem="no room")
    assert few.items() == [report.as_json() for report in many(3)]
    lots = count_job_reports(many(5_000), queue="q", problem="no room")
    assert lots.as_json()["states"] == {"completed": 3_334, "dead": 1_666}
    assert lots.as_json()["problem"] == "no room"
    assert "and 1661 more" in lots.describe("dead")
    with pytest.raises(JobReportsGoneError, match="no room"):
        lots.items()
    with pytest.raises(JobReportsGoneError, match="no room"):
        JobReportSource(lots.as_json())


def test_a_wait_alone_says_states_attempts_and_reasons() -> None:
    report = WaitReport({9}, completed={1, 2}, dead={3: "3 deliveries to w"}, unaccounted={4}, attempts={2: 5, 3: 3})
    ended = json.loads(json.dumps(report.as_json()))
    assert list(plain_job_reports(ended, names({1: "a", 9: "z"}))) == [
        JobReport("a", 1, "completed", 1),
        JobReport(None, 2, "completed", 5),
        JobReport(None, 3, "dead", 3, None, "3 deliveries to w"),
        JobReport(None, 4, "unaccounted", None, None, "it is gone without a stored end"),
        JobReport("z", 9, "awaited"),
    ]


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2], [2, 0, 1]])
def test_ids_are_found_by_sequence_in_whatever_order_jobs_were_stored(order: list[int]) -> None:
    known = JobIds()
    known._extend(["ä".encode(), "b\ud800".encode("utf-8", "surrogatepass"), b"ccc"])  # noqa: SLF001
    known.locate(order)
    found = dict(zip(order, ("ä", "b\ud800", "ccc"), strict=True))
    assert {sequence: known.get(sequence) for sequence in order if sequence} == {k: v for k, v in found.items() if k}
    assert known.get(0) is known.get(4) is None


def test_the_result_of_a_task_stays_below_64_kib() -> None:
    scattered = [[10**7 + 2 * number, 10**7 + 2 * number] for number in range(50_000)]
    states = {f"{state}_sequences": scattered for state in ("completed", "dead", "cancelled", "unaccounted")}
    result = bounded_result(
        {"sequences": scattered, "extra": scattered, **states, "results": {"a": "x" * RESULTS_BYTES}, "details": {}}
    )
    assert len(json.dumps(result)) < 64 * 2**10
    assert (len(result["sequences"]), result["sequences_left_out"]) == (600, 49_400)
    assert (len(result["dead_sequences"]), result["dead_sequences_left_out"]) == (100, 49_900)


def test_an_airflow_that_doesnt_store_the_reports_doesnt_change_how_the_task_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class TaskInstance:
        def xcom_push(self, *_: object) -> None:
            raise RuntimeError("no answer")

    monkeypatch.setattr(job_reports, "get_current_context", lambda: {"ti": TaskInstance()})
    push_job_reports(count_job_reports(many(3), queue="q", problem=""))
    assert "Airflow didn't store the reports on the jobs as an XCom: {'completed': 2, 'dead': 1}" in caplog.text
