from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from spark_streams import METHODS, delete, make_stream, publish, publish_numbers, purge, read_all

from airflow_provider_jetstream.spark.errors import DataLossError
from testbed import seams
from testbed.spark_face import NatsSocket, read_batches

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from testbed.spark_face import SourceStream


def _numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["value"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_gaps_are_skipped(stream_options: dict[str, str], stream: SourceStream, method: str) -> None:
    make_stream(stream)
    publish_numbers(stream, 400)
    deleted = {1, 2, 50, *range(100, 290), 399, 400}
    delete(stream, [*sorted(deleted - {1}), 1])
    stream_options = {**stream_options, "fetchMethod": method, "failOnDataLoss": "false"}
    rows = read_all(stream_options, first=1, last=400)
    assert [row["seq"] for row in rows] == [sequence for sequence in range(1, 401) if sequence not in deleted]
    assert read_all(stream_options, first=120, last=200) == []


def test_messages_purged_after_planning_are_reported(
    stream_options: dict[str, str], stream: SourceStream, caplog: pytest.LogCaptureFixture
) -> None:
    make_stream(stream)
    publish_numbers(stream, 10)
    purge(stream, 5)
    with pytest.raises(DataLossError, match="begins at 5 now, and 1 was to be read"):
        read_all(stream_options, first=1)
    assert "missing" not in caplog.text
    assert _numbers(read_all({**stream_options, "failOnDataLoss": "false"}, first=1)) == [4, 5, 6, 7, 8, 9]
    assert (
        f"Messages are missing: {stream.name} begins at 5 now, and 1 was to be read: the messages 1 to 4" in caplog.text
    )


def test_a_purge_of_all_that_was_pending_ends_a_consumers_read(
    stream_options: dict[str, str], stream: SourceStream, mocker: MockerFixture
) -> None:
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 20_000) for _ in range(3000)))
    sockets = mocker.patch(seams.PARTITION_READER_NATS_SOCKET, side_effect=NatsSocket)
    options = {**stream_options, "fetchMethod": "consumer", "fetchBatch": "50", "failOnDataLoss": "false"}
    first, rest = _read_while_purging(options, stream, 3001)
    rows = first + [sequence for batch in rest for sequence in batch.column("seq").to_pylist()]
    assert rows == list(range(1, len(rows) + 1))
    # One to read and one to look at the stream: nothing was tried again after a time limit.
    assert sockets.call_count == 2


def _read_while_purging(stream_options: dict[str, str], stream: SourceStream, first_left: int) -> tuple[list[int], Any]:
    batches = read_batches(stream_options, ("seq", "value"))
    first = next(batches).column("seq").to_pylist()
    purge(stream, first_left)
    return first, batches
