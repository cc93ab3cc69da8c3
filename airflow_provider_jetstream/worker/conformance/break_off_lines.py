"""The trials in which the worker is killed or cut off at each of its steps, and what they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.worker.conformance.lines import Line
from airflow_provider_jetstream.worker.conformance.steps import WorkerStep
from airflow_provider_jetstream.worker.conformance.trial import BreakOff, TrialJob

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.conformance.trial import Trial

_PROGRESS: Final = TrialJob(WorkerStep.PROGRESS.value, "sleep 3")
# What a job has to be for its worker to take a step.
_JOBS: Final = (
    _PROGRESS,
    TrialJob(WorkerStep.COMPLETION.value, "plain"),
    TrialJob(WorkerStep.ACKNOWLEDGEMENT.value, "plain"),
    TrialJob(WorkerStep.FAILURE.value, "fail", failures=2),
    TrialJob(WorkerStep.RECORD.value, "give up"),
    TrialJob(WorkerStep.TERMINATION.value, "give up"),
)
_GIVEN_UP: Final = {WorkerStep.RECORD, WorkerStep.TERMINATION}


@dataclass(frozen=True, slots=True)
class BreakOffTrial:
    """A trial whose worker is broken off at each step, once.

    :param after: whether the server still gets the step
    :param kills: whether the worker is killed, or only its connection cut
    """

    after: bool
    kills: bool

    @property
    def name(self) -> str:
        """What the names of its lines begin with."""
        return f"{'killed' if self.kills else 'cut'}-{'after' if self.after else 'before'}"

    @property
    def jobs(self) -> tuple[TrialJob, ...]:
        """One job for each step."""
        # Nothing answers a signal, so a loss of the answer would show nothing.
        return tuple(job for job in _JOBS if not (self.after and job is _PROGRESS))

    @property
    def break_offs(self) -> list[BreakOff]:
        """Where the worker is broken off."""
        return [BreakOff(job.name, WorkerStep(job.name), self.after) for job in self.jobs]

    def lines(self, trial: Trial) -> list[Line]:
        """Return a line for each step."""
        return [self._line(trial, job) for job in self.jobs]

    def _line(self, trial: Trial, job: TrialJob) -> Line:
        what = "killed" if self.kills else "cut off"
        when = "when the server has got, but not answered," if self.after else "just before"
        text = f"a worker that is {what} {when} its {job.name} loses no job, and none has two ends"
        return Line(f"{self.name}-{job.name}", text, _problem(trial, WorkerStep(job.name)))


def _problem(trial: Trial, step: WorkerStep) -> str:
    job = step.value
    if any(fault.at.sequence == trial.jobs[job].sequence for fault in trial.proxy.faults):
        return f"expected the worker's {job} within the time limit, found none"
    ends, is_left = len(trial.ends[job]), job in trial.left
    if step is WorkerStep.FAILURE:
        return "" if is_left and not ends else "expected that the job stays in the queue, found that it has ended"
    if is_left:
        return "expected that the job leaves the queue within the time limit, found it there still"
    if step in _GIVEN_UP:
        return "" if trial.records[job] and not ends else f"expected a record and no end, found {ends} ends"
    return "" if ends == 1 else f"expected one stored end, found {ends}"
