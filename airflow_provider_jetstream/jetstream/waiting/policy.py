"""When waiting is over, which ends of jobs are acceptable, and what is done about jobs that no consumer delivers.

Pure functions of reports and facts: nothing here reads, waits or knows the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JobsCancelledError,
    JobsDeadError,
    JobsIncompleteError,
    JobsStalledError,
    JobsUnaccountedError,
    QueueGoneError,
)
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.task_values import TaskValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.jetstream.errors import TerminalError
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

OnStall: TypeAlias = Literal["fail", "wait"]

FAIL: Final = "fail"
RECONCILE_SECONDS = 300.0

_REMEDY = "provision the queue again, resume the consumer, or correct the subject of the jobs"
_UNKNOWN_ENDS = (
    "they expired or were purged, or they are done and the evidence is missing: it was lost with a server that was"
    " killed, or never stored, as where a worker only acknowledges and the sample_freq of its consumer isn't 100%. Find"
    " out which of them are done before you publish any of them again, which would run those twice; allow them with"
    " max_unaccounted"
)

# By state: the error of too many such jobs, what they are, and what to do.
_TOO_MANY: Final[dict[str, tuple[type[TerminalError], str, str]]] = {
    "dead": (JobsDeadError, "dead letters", "see the dead letter queue, fix the cause, then redrive"),
    "cancelled": (
        JobsCancelledError,
        "cancelled jobs",
        "allow them with max_cancelled, or publish again the jobs that are still wanted",
    ),
    "unaccounted": (JobsUnaccountedError, "jobs that are gone without a stored end", _UNKNOWN_ENDS),
}
_LEAST = {"max_dead": 0, "max_cancelled": 0, "max_unaccounted": 0, "min_completed": 1}


@checked_field_names(ArgumentError)
@dataclass(frozen=True, slots=True)
class WaitPolicy(TaskValue):
    """Which ends of jobs are acceptable.

    :param max_dead: accepted dead letters; ``None`` for any number
    :param max_cancelled: accepted cancelled jobs; ``None`` for any number
    :param max_unaccounted: accepted jobs that are gone without a stored end; ``None`` for any number
    :param min_completed: how many jobs have to complete, whatever the others' ends; ``None`` for all but the accepted
    :raises ArgumentError: one is no whole number, or too small
    """

    max_dead: int | None = 0
    max_cancelled: int | None = 0
    max_unaccounted: int | None = 0
    min_completed: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
                raise ArgumentError(
                    f"expected a whole number of at least {least} as {name}, found {count!r}: correct it"
                )

    def is_finished(self, report: WaitReport) -> bool:
        """Return whether waiting longer can't change the outcome: all ended, enough completed, or too many can't."""
        if not report.awaited:
            return True
        if self.min_completed is not None:
            completed = len(report.completed)
            return completed >= self.min_completed or completed + len(report.awaited) < self.min_completed
        if not (report.dead or report.cancelled or report.unaccounted):
            return False
        return any(self._exceeds(state, len(getattr(report, state))) for state in _TOO_MANY)

    def is_attainable_without(self, report: WaitReport, stalled: int) -> bool:
        """Return whether the wait can still succeed if a number of the awaited jobs never end."""
        if self.min_completed is None:
            return False
        return len(report.completed) + len(report.awaited) - stalled >= self.min_completed

    def violation(
        self, report: Mapping[str, Any], describe: Callable[[str], str] = lambda _state: ""
    ) -> TerminalError | None:
        """Return the error of ends that aren't acceptable; ``None`` where all are.

        :param report: what :meth:`WaitReport.as_json` returns
        :param describe: returns the first jobs of a state with their errors, and how many more there are
        """
        completed, unseen = report["completed"], _unseen_ends(report)
        if self.min_completed is not None:
            if completed >= self.min_completed:
                return None
            unaccounted = report["unaccounted"]
            return JobsIncompleteError(
                f"expected at least {self.min_completed} jobs to complete, found {completed}; {report['dead']} became"
                f" dead letters, {report['cancelled']} were cancelled, {unaccounted} are unaccounted for: "
                + (unseen or (_UNKNOWN_ENDS if unaccounted else "fix the cause, then redrive"))
                + "".join(f"; {state}: {jobs}" for state in ("dead", "cancelled") if (jobs := describe(state)))
            )
        for state, (error, jobs, remedy) in _TOO_MANY.items():
            if self._exceeds(state, count := report[state]):
                found = describe(state) or report.get(f"{state}_reasons") or f"sequences {report[f'{state}_sequences']}"
                cure = unseen if unseen and error is JobsUnaccountedError else remedy
                return error(f"expected at most {getattr(self, f'max_{state}')} {jobs}, found {count}: {found}; {cure}")
        return None

    def _exceeds(self, state: str, count: int) -> bool:
        limit = getattr(self, f"max_{state}")
        return limit is not None and count > limit


def _unseen_ends(report: Mapping[str, Any]) -> str | None:
    """Return what to do about unaccounted jobs that are probably done; ``None`` where their ends would be seen."""
    if not (unsampled := report.get("unsampled_consumers")):
        return None
    consumers = "; ".join(f"{name}: {reason}" for name, reason in sorted(unsampled.items()))
    return (
        "they may well be done, and publishing them again would run them twice: a job that a worker only acknowledges"
        f" leaves no evidence where the server doesn't report every acknowledgement ({consumers}). Find out whether"
        " they are done; then provision the queue again, which sets sample_freq to 100%, and let a worker that creates"
        " its consumer without it bind to the one that exists; or let workers store completions; or name an advisory"
        " subject of the queue in each job"
    )


@dataclass(frozen=True, slots=True)
class Stall:
    """Why a job isn't delivered, and since when that has been so.

    :param reason: a clause about the job, for people
    :param since: in seconds of the monotonic clock
    """

    reason: str
    since: float


@checked_field_names(ArgumentError)
@dataclass(frozen=True, slots=True)
class StallPolicy:
    """What a wait does about jobs that no consumer delivers.

    :param reconcile: how many seconds a job has to be stalled
    :param on_stall: ``fail`` to end the wait with an error, ``wait`` to go on with a warning
    :raises ArgumentError: one of them can't be used
    """

    reconcile: float = RECONCILE_SECONDS
    on_stall: OnStall = FAIL

    def __post_init__(self) -> None:
        is_number = isinstance(self.reconcile, int | float) and not isinstance(self.reconcile, bool)
        if not is_number or not self.reconcile > 0:
            raise ArgumentError(f"expected seconds above 0 as reconcile, found {self.reconcile!r}: correct it")
        if self.on_stall not in get_args(OnStall):
            raise ArgumentError(
                f"expected on_stall to be 'fail' or 'wait', found {self.on_stall!r}: choose one of them"
            )

    def is_due(self, stall: Stall, now: float) -> bool:
        """Return whether a stall has lasted long enough to say so.

        :param now: in seconds of the monotonic clock
        """
        return now - stall.since >= self.reconcile

    def failure(self, queue: str, sequence: int | None, stall: Stall) -> JobsStalledError | QueueGoneError | None:
        """Return the error of a stall that has lasted long enough; ``None`` where the wait goes on.

        :param sequence: the stalled job; ``None`` where the queue's stream doesn't exist, which stalls every job
        """
        if self.on_stall != FAIL:
            return None
        if sequence is None:
            return QueueGoneError(
                f"expected stream {queue} with the awaited jobs, found for {self.reconcile:g} s that it doesn't exist:"
                " how jobs ended that are still awaited can't be known; find out which of them are done before you"
                " publish any of them again"
            )
        return JobsStalledError(
            f"expected every awaited job of {queue} to be delivered, found for {self.reconcile:g} s that job {sequence}"
            f" isn't: {stall.reason}; {_REMEDY}. The jobs stay stored, so don't publish them again"
        )

    @staticmethod
    def warning(queue: str, sequence: int | None, stall: Stall) -> str:
        """Return what is said of a stall where the wait goes on."""
        job = f"every job of {queue}" if sequence is None else f"job {sequence} of {queue}"
        return f"{job} isn't delivered, and the wait goes on: {stall.reason}"
