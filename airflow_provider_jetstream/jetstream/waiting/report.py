"""How far awaited jobs are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd

_NAMED = 20


@dataclass(slots=True)
class WaitReport:
    """How far the awaited jobs are.

    :param awaited: stream sequences not ended yet
    :param completed: stream sequences that ended well
    :param dead: stream sequences that became dead letters, with what the server said
    :param cancelled: stream sequences of jobs that workers found cancelled, with the reason that was given
    :param vanished: stream sequences of jobs that are gone, and nothing is stored that tells how they ended
    :param results_at: where the results are of jobs that have any: sequences in the events stream
    :param results: what handlers returned, by the job's id
    :param results_left_out: how many results were too large to be held
    """

    awaited: set[int]
    completed: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)
    cancelled: dict[int, str] = field(default_factory=dict)
    vanished: set[int] = field(default_factory=set)
    results_at: dict[int, int] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    results_left_out: int = 0

    def record(self, end: JobEnd) -> bool:
        """Take note of an end.

        :param end: how a job ended
        :return: whether that is news about an awaited job
        """
        sequence = end.sequence
        # A worker slower than its ack wait may finish a job that was already given up: it is done all the same.
        final = end.kind in (EndKind.COMPLETED, EndKind.CANCELLED)
        if sequence not in self.awaited and not (final and (sequence in self.dead or sequence in self.vanished)):
            return False
        self.awaited.discard(sequence)
        self.dead.pop(sequence, None)
        self.vanished.discard(sequence)
        match end.kind:
            case EndKind.COMPLETED:
                self.completed.add(sequence)
                if end.has_result:
                    self.results_at[sequence] = end.event_sequence
            case EndKind.CANCELLED:
                self.cancelled[sequence] = end.note
            case EndKind.DEAD:
                self.dead[sequence] = end.note
            case EndKind.VANISHED:
                self.vanished.add(sequence)
        return True

    def unsettled(self) -> list[int]:
        """Give the jobs about which there may be news.

        :return: stream sequences of those that are awaited, and of those that may have been finished after all
        """
        return [*self.awaited, *self.dead, *self.vanished]

    def as_json(self) -> dict[str, Any]:
        """Give the report in a form that fits an event or an XCom.

        :return: counts, sequences as ranges, and results by job id
        """
        return {
            "awaited": len(self.awaited),
            "completed": len(self.completed),
            "dead": len(self.dead),
            "completed_sequences": sequence_ranges(self.completed),
            "dead_sequences": sequence_ranges(self.dead),
            "dead_reasons": dict(sorted(self.dead.items())[:_NAMED]),
            "cancelled": len(self.cancelled),
            "cancelled_sequences": sequence_ranges(self.cancelled),
            "cancelled_reasons": dict(sorted(self.cancelled.items())[:_NAMED]),
            "vanished": len(self.vanished),
            "vanished_sequences": sequence_ranges(self.vanished),
            "results": self.results,
            "results_left_out": self.results_left_out,
        }
