"""How much a batch of a query reads: at most so many sequences or bytes, and at least so many where that can wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.spark.source.byte_limit import last_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.query_stream import NewMessages

# As with Spark's Kafka source.
_MAX_DELAY = 15 * 60.0


class TriggerPace:
    """Divides a query's new messages into batches.

    :param raw_options: the data source's options, from which connections are made
    """

    def __init__(self, raw_options: Mapping[str, str]) -> None:
        self._raw_options = raw_options
        # When the last batch began; a query that has just started doesn't wait.
        self._last_batch: float | None = None

    def batch(self, streams: Sequence[NewMessages], limits: ReadOptions, *, may_wait: bool) -> list[NewMessages] | None:
        """Return what the next batch reads of each stream; ``None`` if it waits for more.

        A limit is divided among streams by how much there is of each, and lets at least one message of each pass, so
        that none of them waits forever.

        :param may_wait: whether there will be later triggers
        """
        if not any(new.pending for new in streams):
            return list(streams)
        found = [new.without_gap() for new in streams] if limits.limits else list(streams)
        total = sum(new.pending for new in found)
        if (
            may_wait
            and limits.min_offsets_per_trigger
            and total < limits.min_offsets_per_trigger
            and not self._is_due(limits.max_trigger_delay or _MAX_DELAY)
        ):
            return None
        self._last_batch = time.monotonic()
        if (most := limits.max_offsets_per_trigger) and total > most:
            found = [new.up_to(new.after + max(1, most * new.pending // total)) for new in found]
        return self._within_bytes(found, limits.max_bytes_per_trigger) if limits.max_bytes_per_trigger else found

    def _is_due(self, delay: float) -> bool:
        return self._last_batch is None or time.monotonic() - self._last_batch >= delay

    def _within_bytes(self, streams: Sequence[NewMessages], limit: int) -> list[NewMessages]:
        found = list(streams)
        weights = [new.estimated_bytes for new in streams]
        bytes_left, weight_left = limit, sum(weights)
        # What a stream leaves of its share goes to those with more.
        for index in sorted((index for index, weight in enumerate(weights) if weight), key=weights.__getitem__):
            new, stream = found[index], found[index].stream
            share = max(1, bytes_left * weights[index] // weight_left)
            last, size = last_within(self._raw_options, stream.options, stream.info, new.range(), share)
            found[index] = new.up_to(last)
            bytes_left, weight_left = max(0, bytes_left - size), weight_left - weights[index]
        return found
