"""Of which jobs of a queue an end would have left evidence: by the consumers' sampling and by what the events store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.audit.ledger_checkpoint import LedgerCheckpoint
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

_ALWAYS = datetime.min.replace(tzinfo=UTC)
# A checkpoint's time is that of its storage, a moment after the events were read.
_MARGIN = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class EndCoverage:
    """What evidence to expect of the jobs of one queue.

    :param events: the server's STREAM.INFO of the events stream, if it exists
    :param checkpoint: where an earlier scan left the ledger, if one did
    """

    snapshot: QueueSnapshot
    events: Mapping[str, Any] | None
    checkpoint: LedgerCheckpoint | None

    def sampled(self) -> dict[str, bool]:
        """Return by consumer whether the server reports each of its acknowledgements, and the events store that."""
        subjects = (self.events["config"].get("subjects") or []) if self.events else []
        every = sampled_percent(ALL_SAMPLED)
        is_captured = covered_by_any(subjects, ack_metric_filter(self.snapshot.queue))
        if self.events and self.events["config"].get("max_msgs_per_subject", -1) > 0:
            # All metrics of a consumer have one subject.
            is_captured = False
        return {
            name: is_captured and sampled_percent(consumer.sample_freq) >= every
            for name, consumer in self.snapshot.consumers.items()
        }

    def unproved_consumers(self, completing: Collection[str]) -> set[str]:
        """Return the consumers whose jobs may have ended without evidence since the last look.

        :param completing: the consumers whose workers store completions
        """
        if self.events is None:
            return set(self.snapshot.consumers)
        before = self.checkpoint.consumers if self.checkpoint else {}
        sampled = {name for name, is_sampled in self.sampled().items() if is_sampled and before.get(name, True)}
        return self.snapshot.consumers.keys() - sampled - set(completing)

    def complete_since(self) -> datetime:
        """Return since when the events stream has every event that was published to it and no scan has read yet."""
        if self.events is None:
            return self.snapshot.taken_at
        config, state, now = self.events["config"], self.events["state"], self.snapshot.taken_at
        read = self.checkpoint if self.checkpoint and self.checkpoint.events_created == self.events["created"] else None
        since, first = _ALWAYS if read else datetime.fromisoformat(self.events["created"]), int(state["first_seq"])
        max_age = timedelta(microseconds=config.get("max_age", 0) / 1_000)
        if max_age > timedelta() and not (read and now - read.at < max_age - _MARGIN):
            since = max(since, now - max_age)
        is_limited = any(config.get(limit, -1) > 0 for limit in ("max_msgs", "max_bytes", "max_msgs_per_subject"))
        # Records of tasks are removed when nothing names the tasks any more: without a limit nothing else is missing.
        if is_limited and first > (read.events_to if read else 0) + 1:
            since = max(since, datetime.fromisoformat(state["first_ts"]) if state["messages"] else now)
        return since
