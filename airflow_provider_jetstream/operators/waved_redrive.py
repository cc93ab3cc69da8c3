"""The part of the redrive operator that redrives in waves: it holds no worker slot while jobs or people are awaited."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.assets.stream_asset import StreamUse
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.errors import DeadlineError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.redrive.redrive import advance_gates, advance_redrive
from airflow_provider_jetstream.jetstream.redrive.report import problem_of
from airflow_provider_jetstream.jetstream.redrive.waves import ANY_END
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.operators.spark_redrive import SPARK, SparkRedrivingOperator
from airflow_provider_jetstream.tasks.airflow_metrics import send_redrive_metrics
from airflow_provider_jetstream.tasks.context import deferral_limit, json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.tasks.redrives import log_outcomes, log_report
from airflow_provider_jetstream.triggers.redrive import STEERING_SECONDS, RedriveStateTrigger, RedriveWaveTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.next_letters import WaveWait
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.jetstream.redrive.stop_rule import StopWhen
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

_BACKSTOP = timedelta(minutes=2)
# How long a deferrable task waits on its worker slot before it defers, unless defer_after says otherwise.
_PATIENCE = 2.0
_IN_WAVES: Final = "in_waves"
_RESUMED: Final = "resumed"
_WITHIN = "stop_when"


class WavedRedriveOperator(SparkRedrivingOperator):
    """An operator that can redrive in waves.

    :param waves: how many letters each wave brings back, ``rest`` as the last one, such as ``[10, 100, "rest"]``: the
        ends of a wave's jobs are awaited before the next
    :param stop_when: when the redrive stops at the gate after a wave: the share of a wave's jobs that may die again, or
        a :class:`~airflow_provider_jetstream.jetstream.StopWhen` or its dict; where absent, 0.2
    """

    template_fields_renderers: ClassVar[dict[str, str]] = {
        "work_queue": "json",
        "select": "json",
        "sequences": "json",
        "target_queue": "json",
        "patch": "json",
        "waves": "json",
        "stop_when": "json",
        "spark_conf": "json",
    }
    event_fields = (
        *("redriven", "parked", "redrive", "from_sequences", "to_sequences"),
        *("completed", "dead", "cancelled", "unaccounted"),
    )
    wave_fields: Sequence[str] = ("waves", "stop_when")

    def __init__(
        self,
        *,
        waves: Sequence[int | str] | str | None = None,
        stop_when: StopWhen | Mapping[str, Any] | float | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.waves = waves
        self.stop_when = stop_when
        self._killed = False
        # How many letters earlier tries had handled, where this one was deferred since it began.
        self._resumed: int | None = None
        self._jobs_ended = False
        if waves is not None and self.wait_for_completion:
            raise RedriveRequestError("expected either waves or wait_for_completion, found both: waves await all jobs")

    def stream_use(self, queue: WorkQueue, work: Mapping[str, Any]) -> StreamUse:
        """Return the dead letter queue, and the stream that has the new jobs."""
        letters = [queue.dead_letters.name] if queue.dead_letters else []
        return StreamUse(letters, [(work.get("target") or queue.name, work.get("redriven"))])

    def redrive_in_waves(
        self, hook: JetStreamHook, context: Context, queue: WorkQueue, request: RedriveRequest
    ) -> TaskResult:
        """Redrive as far as that goes without waiting, then defer; return the result once the redrive is over.

        :raises AirflowFailException: a person has aborted the redrive
        :raises DeadlineError: a wave, or a person, was awaited for longer than ``wait_timeout``
        :raises RedriveError: some letters stayed where they were
        """
        limit = self._limits().timeout.total_seconds()
        patience = limit if not self.deferrable else min(limit, self._parsed_defer_after() or _PATIENCE)
        advance = self._advance_with_spark if self.engine == SPARK else self._advance
        summary, problem, wait = advance(hook, context, queue, request, patience)
        state = RedriveState(summary["state"])
        summary["resumed"] = self._resumed = summary["resumed"] if self._resumed is None else self._resumed
        log_outcomes(self.log, summary)
        send_redrive_metrics(queue.name, summary)
        self.log_redrive(summary)
        del summary["guarantee"]
        if problem and (self._killed or state == RedriveState.FAILED):
            raise RedriveError(problem)
        if state == RedriveState.FINISHED:
            self.note_work(summary)
            return json_result(summary | {"run": request.run})
        if not self.deferrable:
            raise self._awaited_too_long(summary["redrive"], state, summary["reason"])
        self._defer_for_wave(queue, summary, wait) if wait else self._defer_for_person(queue, summary)
        raise AssertionError("deferring raises")

    def _is_killed(self) -> bool:
        return self._killed

    def _advance(
        self, hook: JetStreamHook, _: Context, queue: WorkQueue, request: RedriveRequest, patience: float
    ) -> tuple[dict[str, Any], str, WaveWait | None]:
        """Redrive as far as that goes; return the report as JSON, the problem, and the wave to be awaited."""
        advance = partial(advance_redrive, stopped=self._is_killed, patience=patience, ended=self._jobs_ended)
        report, wait = hook.blocking(advance, queue, request)
        return *self._summary(report), wait

    def _advance_with_spark(
        self, hook: JetStreamHook, context: Context, queue: WorkQueue, request: RedriveRequest, patience: float
    ) -> tuple[dict[str, Any], str, WaveWait | None]:
        """Do the same with an application for each wave; none runs while jobs or people are awaited."""
        while True:
            advance = partial(advance_gates, stopped=self._is_killed, patience=patience, ended=self._jobs_ended)
            report, wait, are_due = hook.blocking(advance, queue, request)
            self._resumed = report.resumed if self._resumed is None else self._resumed
            if not are_due:
                return *self._summary(report), wait
            self._jobs_ended = False
            result = self.run_spark(context, queue, request)
            state = RedriveState(result["report"]["state"])
            if state.is_over or state == RedriveState.FAILED:
                return result["report"], result["problem"], None

    def _summary(self, report: RedriveReport) -> tuple[dict[str, Any], str]:
        report.cancelled |= self._killed
        return report.as_json() | {"guarantee": report.guarantee}, problem_of(report)

    def log_redrive(self, report: Mapping[str, Any]) -> None:
        """Write what a redrive has done into the task's log.

        :param report: as JSON, with its guarantee
        :raises AirflowFailException: a person has aborted it; a retry would begin another one
        """
        log_report(self.log, report)
        if report["state"] == RedriveState.ABORTED:
            raise AirflowFailException(f"the redrive {report['redrive']} was aborted: {report['reason']}")

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Send what became of the redriven jobs to Airflow's stats, and turn it into the outcome of the task.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        """
        send_redrive_metrics(load_queue(self.work_queue, self).name, summary)
        return super().finish(summary, report)

    def is_in_waves(self, event: Mapping[str, Any] | None) -> bool:
        """Whether a trigger's event is about a redrive in waves that goes on.

        :raises DeadlineError: a wave, or a person, was awaited for longer than ``wait_timeout``
        """
        found = (event or {}).get("found")
        if found and "redrive" in found:
            if found["overdue"]:
                raise self._awaited_too_long(found["redrive"], found["state"], found["reason"])
            self._resumed = found.get("resumed")
            return True
        summary = (event or {}).get("summary", {})
        redrive, self._resumed = summary.get(_IN_WAVES), summary.get(_RESUMED)
        if redrive and event and event["status"] == "timeout" and event.get("limited_by") != _WITHIN:
            raise self._awaited_too_long(redrive, RedriveState.RUNNING, "its wave's jobs haven't ended")
        # Unless a person ended the wait. The ends are in the streams, and are read there.
        self._jobs_ended = bool(redrive and event and (event["status"] != "ended" or not event["report"]["awaited"]))
        return bool(redrive)

    def _awaited_too_long(self, redrive: str, state: str, reason: str) -> DeadlineError:
        return DeadlineError(
            f"expected the redrive {redrive} to go on within {self._limits().timeout}, found it {state} ({reason}):"
            " resume or abort it, see whether workers take the jobs, or raise wait_timeout; a retry goes on with it"
        )

    def _defer_for_wave(self, queue: WorkQueue, report: Mapping[str, Any], wait: WaveWait) -> NoReturn:
        now = time.time()
        limit = deferral_limit(self, self._limits().timeout, "wait_timeout")
        seconds, argument = limit.left.total_seconds(), limit.argument
        if (within := math.inf if wait.within is None else max(1.0, wait.within)) < seconds:
            seconds, argument = within, _WITHIN
        self.log.info("Waiting in the triggerer for %d jobs of wave %d", len(wait.sequences), len(report["waves"]))
        self.defer(
            trigger=RedriveWaveTrigger(
                nats_conn_id=self.nats_conn_id,
                redrive=report["redrive"],
                work_queue=queue.model_dump(mode="json", exclude_unset=True),
                handle=JobsHandle(cursor=wait.cursor, sequences=sequence_ranges(wait.sequences)),
                tolerance=asdict(ANY_END),
                deadline=now + seconds,
                limited_by=argument,
                stalls=asdict(self._limits().stalls),
                deferred_at=now,
                summary={_IN_WAVES: report["redrive"], _RESUMED: report["resumed"]},
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=seconds) + _BACKSTOP,
        )

    def _defer_for_person(self, queue: WorkQueue, report: Mapping[str, Any]) -> NoReturn:
        now, limit = time.time(), deferral_limit(self, self._limits().timeout, "wait_timeout").left
        self.log.warning(
            "The redrive %s is %s (%s): waiting for a person who resumes or aborts it",
            *(report["redrive"], report["state"], report["reason"]),
        )
        self.defer(
            trigger=RedriveStateTrigger(
                nats_conn_id=self.nats_conn_id,
                work_queue=queue.model_dump(mode="json", exclude_unset=True),
                poll_interval=STEERING_SECONDS,
                deferred_at=now,
                redrive=report["redrive"],
                state=report["state"],
                deadline=now + limit.total_seconds(),
                resumed=report["resumed"],
            ),
            method_name="execute_complete",
            timeout=limit + _BACKSTOP,
        )
