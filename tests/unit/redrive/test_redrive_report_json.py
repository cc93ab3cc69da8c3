"""The report of a redrive as it goes into an XCom."""

from __future__ import annotations

from array import array

from airflow_provider_jetstream.jetstream import (
    RedriveReport,
)
from airflow_provider_jetstream.jetstream.redrive.report import SequenceMap


async def test_the_report_fits_an_xcom() -> None:
    gone = array("Q", [8, 9])
    redriven = SequenceMap({1: 11, 2: 12, 4: 13})
    report = RedriveReport(redriven=redriven, failed={7: "full"}, failures=1, gone=gone, entries_left=1)
    expected = {
        "protocol": "copy",
        "target": None,
        "redriven": 3,
        "parked": 0,
        "failed": 1,
        "gone": 2,
        "left_to_handlers": 0,
        "entries_left": 1,
        "uncertain": 0,
        "undeliverable": 0,
        "resumed": 0,
        "from_sequences": [(1, 2), (4, 4)],
        "to_sequences": [(11, 13)],
        "failures": {7: "full"},
        "risks": [],
        "redrive": "",
        "state": "planned",
        "reason": "",
        "outcomes": {"completed": 0, "died_again": 0, "still_running": 0, "unknown": 0},
        "waves": [],
    }
    assert report.as_json() == expected
