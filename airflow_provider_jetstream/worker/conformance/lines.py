"""The lines of the contract that trials show, and what breaks each of them: without faults, and killed or cut off."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion
from airflow_provider_jetstream.jetstream.contract import JOB_DEADLINE, JOB_EXPIRES, MSG_ID, end_id
from airflow_provider_jetstream.jetstream.dead_letters.record import PREFIX
from airflow_provider_jetstream.jetstream.evidence import attempt_of
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.worker.conformance.trial import (
    ACK_WAIT_SECONDS,
    LARGEST_END,
    BreakOff,
    TrialJob,
    WhenCancelled,
    WorkerStep,
    nanoseconds_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.worker.conformance.trial import Trial


_ODD_ID: Final = "50%25/größer than.>"
_TAKEN: Final = "taken id"
_SLOW_SECONDS: Final = 5
_FEWEST_SIGNALS: Final = _SLOW_SECONDS // ACK_WAIT_SECONDS
_CANCELLED: Final = "io.airflow.jetstream.v1.cancelled"
_RECORD_HEADERS: Final = ("Sequence", "Subject", "Reason")
# In the order of their delivery; a worker that takes one job at a time may stay at the last one for ever.
JOBS: Final = (
    TrialJob("plain", "plain"),
    TrialJob("odd id", "plain", job_id=_ODD_ID),
    TrialJob(_TAKEN, "plain", is_id_taken=True),
    TrialJob("cancelled", "plain", job_id="c", cancelled=WhenCancelled.AFTER),
    TrialJob("cancelled by sequence", "plain", cancelled=WhenCancelled.BY_SEQUENCE),
    TrialJob("cancelled before", "plain", job_id="d", cancelled=WhenCancelled.BEFORE),
    TrialJob("expired", "plain", headers={JOB_EXPIRES: "2020-02-29T12:00:00+01:00"}),
    TrialJob("give up", "give up"),
    TrialJob("fail", "fail", failures=2),
    TrialJob("deadline", f"sleep {_SLOW_SECONDS}", headers={JOB_DEADLINE: "1s500ms"}, failures=1),
    TrialJob("slow", f"sleep {_SLOW_SECONDS}"),
    TrialJob("refused end", "plain", job_id="x" * (LARGEST_END + 500), is_end_refused=True),
)

_PROGRESS: Final = TrialJob(WorkerStep.PROGRESS.value, "sleep 3")
# For each step, a job whose worker takes it.
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
class Line:
    """A line of the contract, and whether a worker keeps it.

    :param name: for scripts; it stays the same
    :param text: what the contract says, in a sentence
    :param problem: what was found instead; empty where the worker keeps the line
    """

    name: str
    text: str
    problem: str = ""


def contract_lines(trial: Trial) -> list[Line]:
    """Return each line that :data:`JOBS` shows."""
    return [Line(name, text, one_line(check(trial)) or "") for name, text, check in _CHECKS]


def _ends(trial: Trial) -> Iterator[tuple[str, StoredMessage, dict[str, Any]]]:
    for job, messages in trial.ends.items():
        for message in messages:
            try:
                body = json.loads(message.data)
            except (ValueError, RecursionError):
                body = None
            yield job, message, body if isinstance(body, dict) else {}


def _done_once(trial: Trial, job: str) -> str:
    if job in trial.left:
        return f"expected that the job {job!r} leaves the queue, found it there still"
    if (count := len(trial.ends[job])) != 1:
        return f"expected one stored end of the job {job!r}, found {count}"
    return ""


def _plain_job(trial: Trial) -> str:
    return _done_once(trial, "plain")


def _any_end(trial: Trial, job: str) -> str:
    """Return the problem of a line about ends where no end is stored; empty where one is."""
    return "" if trial.ends[job] else f"expected a stored end of the job {job!r} to look at, found none"


def _required_fields(trial: Trial) -> str:
    for job, message, body in _ends(trial):
        model = Cancelled if body.get("type") == _CANCELLED else Completion
        if "type" not in body:
            return f"expected the field type, found {shown_value(message.data)}"
        try:
            end = model.model_validate_json(message.data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return f"expected the fields of an end, found at {'.'.join(map(str, first['loc']))}: {first['msg']}"
        expected = (trial.queue, trial.jobs[job].sequence)
        if (found := (end.stream, end.stream_seq)) != expected or end.deliveries < 1:
            return f"expected stream, stream_seq {expected} and deliveries from 1, found {found} and {end.deliveries}"
    return _any_end(trial, "plain")


def _id_in_nanoseconds(trial: Trial) -> str:
    for job, message, _ in _ends(trial):
        stored = trial.jobs[job]
        expected = end_id(trial.queue, stored.sequence, nanoseconds_of(stored.time))
        found = message.header(MSG_ID) or ""
        if found != expected and not (job == _TAKEN and found.startswith(f"{expected}:")):
            return f"expected the {MSG_ID} {expected}, found {shown_value(found)}"
    return _any_end(trial, "plain")


def _taken_id(trial: Trial) -> str:
    return _done_once(trial, _TAKEN)


def _result_left_out(trial: Trial) -> str:
    found = any("result" in body and body["result"] is None for _, _, body in _ends(trial))
    return 'expected no field result where there is none, found "result": null' if found else _any_end(trial, "plain")


def _percent_encoding(trial: Trial) -> str:
    for job, _, body in _ends(trial):
        found = body.get("job_id", body.get("id") or _ODD_ID)
        if job == "odd id" and found != _ODD_ID:
            return f"expected the id {_ODD_ID!r} as it is in the header, found {shown_value(found)}"
    return _any_end(trial, "odd id")


def _progress_in_time(trial: Trial) -> str:
    if (count := trial.steps("slow").count(WorkerStep.PROGRESS)) >= _FEWEST_SIGNALS:
        return ""
    return f"expected at least {_FEWEST_SIGNALS} signals in {_SLOW_SECONDS} s of work, found {count}"


def _cancelled_not_run(trial: Trial) -> str:
    for name in ("cancelled", "cancelled by sequence"):
        found = [body.get("type") for job, _, body in _ends(trial) if job == name]
        if found != [_CANCELLED]:
            return f"expected one end of type {_CANCELLED} of the job {name!r}, found {found}"
    return ""


def _earlier_cancellation(trial: Trial) -> str:
    if problem := _done_once(trial, "cancelled before"):
        return problem
    found = [body.get("type") for job, _, body in _ends(trial) if job == "cancelled before"]
    return f"expected that a job of a later time runs, found {found}" if found == [_CANCELLED] else ""


def _dead(trial: Trial, job: str, reason: str | None = None) -> str:
    if trial.ends[job]:
        return f"expected no stored end of the job {job!r}, found one"
    if job in trial.left:
        return f"expected that the job {job!r} is terminated, found it in the queue still"
    if not trial.records[job]:
        return f"expected a record of the job {job!r}, found none"
    record = trial.records[job][0]
    missing = [f"{PREFIX}{name}" for name in _RECORD_HEADERS if not record.header(f"{PREFIX}{name}")]
    if missing or record.data != trial.jobs[job].data:
        return f"expected the job's body and {', '.join(missing) or 'its headers'}, found {shown_value(record.data)}"
    if reason and (found := record.header(f"{PREFIX}Reason")) != reason:
        return f"expected a record of reason {reason}, found {shown_value(found)}"
    return ""


def _attempt_form(trial: Trial) -> str:
    for message in trial.attempts:
        if attempt_of(message, trial.queue) is None:
            found = shown_value(message.data)
            return f"expected an attempt with the fields of its subject {message.subject}, found {found}"
    return ""


def _record_before_termination(trial: Trial) -> str:
    if problem := _dead(trial, "give up"):
        return problem
    steps = [step for step in trial.steps("give up") if step in {WorkerStep.RECORD, WorkerStep.TERMINATION}]
    return (
        ""
        if steps[:1] == [WorkerStep.RECORD]
        else "expected the record first, found that the job was terminated before"
    )


def _completion_before_acknowledgement(trial: Trial) -> str:
    steps = trial.steps("refused end")
    acknowledged = WorkerStep.ACKNOWLEDGEMENT in steps or "refused end" not in trial.left
    if WorkerStep.COMPLETION not in steps and not acknowledged:
        return "expected that the worker tries to store an end, which the server refuses; found none"
    return "expected that a job whose end isn't stored stays, found it acknowledged" if acknowledged else ""


def _failure_comes_back(trial: Trial) -> str:
    return _failed(trial, "fail", 2)


def _deadline(trial: Trial) -> str:
    return _failed(trial, "deadline", 1)


def _failed(trial: Trial, job: str, times: int) -> str:
    if trial.ends[job] or job not in trial.left:
        return f"expected that the job {job!r} fails and stays in the queue, found that it has ended"
    if (count := trial.steps(job).count(WorkerStep.FAILURE)) < times:
        return f"expected at least {times} -NAK for the job {job!r}, found {count}"
    return ""


def _expired_not_run(trial: Trial) -> str:
    return _dead(trial, "expired", "expired")


_CHECKS: Final[tuple[tuple[str, str, Callable[[Trial], str]], ...]] = (
    ("plain-job", "the end of a job is stored once, and the job is acknowledged", _plain_job),
    ("required-fields", "an end has the required fields, of the right types", _required_fields),
    ("id-in-nanoseconds", "the id of an end has the job's time in whole nanoseconds", _id_in_nanoseconds),
    ("taken-id", "an end is stored also where another message has used its id", _taken_id),
    ("result-left-out", "an end without a result has no field for it", _result_left_out),
    ("percent-encoding", "ids are compared and sent as they are", _percent_encoding),
    ("progress-in-time", "a job that takes long is reported as in progress in each wait", _progress_in_time),
    ("cancelled-not-run", "a cancelled job isn't run, and its end says so", _cancelled_not_run),
    ("earlier-cancellation", "a cancellation that is older than a job doesn't count for it", _earlier_cancellation),
    ("failure-comes-back", "a job that fails is delivered again, and has no end", _failure_comes_back),
    ("deadline", "an attempt longer than the job's deadline fails", _deadline),
    ("expired-not-run", "a job delivered after its expiry is terminated with a record", _expired_not_run),
    ("attempt-form", "what is stored of an attempt has its form, if anything is", _attempt_form),
    ("record-before-termination", "a job is terminated only after its record is stored", _record_before_termination),
    (
        "completion-before-acknowledgement",
        "a job is acknowledged only after its end is stored",
        _completion_before_acknowledgement,
    ),
)


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
        """The prefix of the names of its lines."""
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
