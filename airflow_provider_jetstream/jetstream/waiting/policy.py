"""When waiting is over, and whether what came of it is good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import (
    JobsCancelledError,
    JobsDeadError,
    JobsIncompleteError,
    JobsVanishedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.errors import TerminalError
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """What to put up with while waiting for jobs.

    :param max_dead: dead letters; ``None`` for any number
    :param max_cancelled: cancelled jobs; ``None`` for any number
    :param max_vanished: jobs that are gone without a word of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, whatever becomes of the others; ``None`` for all but those
        that are put up with
    """

    max_dead: int | None = 0
    max_cancelled: int | None = 0
    max_vanished: int | None = 0
    min_completed: int | None = None

    def is_finished(self, report: WaitReport) -> bool:
        """Tell whether more waiting can't change the outcome.

        :param report: how far the jobs are
        :return: whether all have ended, enough have completed, or too many can't
        """
        if not report.awaited:
            return True
        if self.min_completed is not None:
            done = len(report.completed)
            return done >= self.min_completed or done + len(report.awaited) < self.min_completed
        return (
            _exceeds(len(report.dead), self.max_dead)
            or _exceeds(len(report.cancelled), self.max_cancelled)
            or _exceeds(len(report.vanished), self.max_vanished)
        )

    def violation(self, report: Mapping[str, Any]) -> TerminalError | None:
        """Tell what is wrong with the ends of jobs.

        :param report: how they ended, as :meth:`WaitReport.as_json` gives it
        :return: the error; ``None`` where they are good enough
        """
        completed, dead = report["completed"], report["dead"]
        # A task that was deferred before this package knew of these has a report without them.
        cancelled, vanished = report.get("cancelled", 0), report.get("vanished", 0)
        if self.min_completed is not None:
            if completed >= self.min_completed:
                return None
            return JobsIncompleteError(
                f"expected at least {self.min_completed} jobs to complete, found {completed}; {dead} became dead"
                f" letters, {cancelled} were cancelled, {vanished} vanished: mend the cause, then redrive or publish"
                " again"
            )
        if _exceeds(dead, self.max_dead):
            return JobsDeadError(
                f"expected at most {self.max_dead} dead letters, found {dead}: {report['dead_reasons']};"
                " see the dead letter queue, mend the cause, then redrive"
            )
        if _exceeds(cancelled, self.max_cancelled):
            return JobsCancelledError(
                f"expected at most {self.max_cancelled} cancelled jobs, found {cancelled}:"
                f" {report['cancelled_reasons']}; allow them with max_cancelled, or publish again what is to be"
                " done all the same"
            )
        if _exceeds(vanished, self.max_vanished):
            return JobsVanishedError(
                f"expected at most {self.max_vanished} jobs that are gone without a word of how they ended, found"
                f" {vanished} (sequences {report['vanished_sequences']}): they expired, were purged, or their"
                " completions were lost with a server or a worker that tells none; allow them with max_vanished, or"
                " publish them again"
            )
        return None


def _exceeds(found: int, limit: int | None) -> bool:
    return limit is not None and found > limit
