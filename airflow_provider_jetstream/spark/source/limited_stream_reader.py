"""Reading a stream as it grows in batches of bounded size, which Spark can ask for since 4.2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
from typing_extensions import override

from airflow_provider_jetstream.spark.source.stream_reader import JetStreamStreamReader

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from airflow_provider_jetstream.spark.source.stream_api import SourceStream


class JetStreamLimitedStreamReader(JetStreamStreamReader, SupportsTriggerAvailableNow):
    """The same with limits, and with an end that is fixed when a query is to read what is available now."""

    _target: dict[str, Any] | None = None

    @override
    def latestOffset(  # type: ignore[override]
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """Find where the next batch ends.

        :param start: the last sequence of the batch before
        :param limit: at most how much
        :return: the last sequence of the next batch; the start where there is nothing
        """
        return self._ask(lambda stream: self._limited(stream, start, limit))

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        """Tell Spark how much a batch may be.

        :return: the option ``maxOffsetsPerTrigger``, or everything
        """
        most = self._options.max_per_trigger
        return ReadMaxRows(most) if most else ReadAllAvailable()

    @override
    def reportLatestOffset(self) -> dict[str, Any]:
        """Tell Spark how far the stream has come, for its progress reports.

        :return: its last sequence
        """
        return self._ask(self._end)

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query."""
        self._target = self._ask(self._end)

    def _limited(self, stream: SourceStream, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        facts = stream.info()
        end = self._end(stream)
        if self._target and self._target["created"] == end["created"]:
            end = min(end, self._target, key=lambda offset: int(offset["seq"]))
        begun = self._begun(stream, start, facts)
        if begun >= end["seq"]:
            # Nothing new, unless the stream was made anew and its start means nothing here.
            return start if start["created"] == facts.created else {**end, "seq": begun}
        if isinstance(limit, ReadMaxRows):
            # A limit counts sequences; a gap is leapt over so that it doesn't make for empty batches.
            found = stream.next_sequence(begun + 1, self._options.filters or (">",))
            if found is not None:
                end["seq"] = min(int(end["seq"]), found - 1 + limit.max_rows)
        return end
