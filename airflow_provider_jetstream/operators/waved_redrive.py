"""The part of the redrive operator that redrives in waves, or with Spark.

It holds no worker slot while the jobs of a wave, or a person, are awaited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, TypeAlias, Unpack

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.assets.stream_asset import StreamUse
from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE
from airflow_provider_jetstream.jetstream.errors import DeadlineError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.operators.job_waiting import JobMakingOperator
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    check_function,
    check_optional_text,
    check_text,
    is_templated,
    require_rendered,
    selection_as_json,
)
from airflow_provider_jetstream.tasks.context import deferral_limit, json_result
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.tasks.redrives import log_outcomes, log_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.next_letters import WaveWait
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.tasks.argument_types import (
        JobMakingArguments,
        Properties,
        SparkRedriveArguments,
        StopRule,
        Text,
        Waves,
    )
    from airflow_provider_jetstream.tasks.job_reports import TaskResult
    from airflow_provider_jetstream.tasks.spark import SparkApplication

Engine: TypeAlias = Literal["python", "spark"]
PYTHON: Final = "python"
SPARK: Final = "spark"

_DEFAULT_SPARK: Final = "spark_default"
_ENGINES = (PYTHON, SPARK)
_SPARK_ONLY = ("repair", "letters", "directory", "spark_conf")


class SparkRedrivingOperator(JobMakingOperator):
    """An operator that redrives dead letters in its own process or in a Spark application.

    :param engine: ``python``, or ``spark``
    :param repair: for Spark: a function that takes a ``DataFrame`` of letters and returns what is to be redriven
    :param letters: for Spark: the folder in which a report stored the letters; the queue is scanned where absent
    :param directory: for Spark: a folder for letters and repaired letters, shared by driver and executors
    :param spark_conn_id: the Airflow connection of type ``spark``; Spark runs on this machine where the default one
        doesn't exist
    :param spark_conf: further properties of Spark; ``spark.jetstream.…`` says how executors elsewhere find NATS
    """

    spark_fields: Sequence[str] = ("letters", "directory", "spark_conn_id", "spark_conf")

    def __init__(
        self,
        *,
        engine: Engine = PYTHON,
        repair: Callable[[Any], Any] | None = None,
        letters: Text | None = None,
        directory: Text | None = None,
        spark_conn_id: str = _DEFAULT_SPARK,
        spark_conf: Properties | None = None,
        **kwargs: Unpack[JobMakingArguments],
    ) -> None:
        super().__init__(**kwargs)
        self.engine = engine
        self.repair = repair
        self.letters = letters
        self.directory = directory
        self.spark_conn_id = spark_conn_id
        self.spark_conf = spark_conf
        self._spark: SparkApplication | None = None
        self._reads_report = letters is not None
        if engine not in _ENGINES:
            raise RedriveRequestError(f"expected an engine among {', '.join(_ENGINES)}; found {engine!r}")
        if engine != SPARK and (found := [name for name in _SPARK_ONLY if getattr(self, name) is not None]):
            raise RedriveRequestError(f'expected {", ".join(found)} with engine="spark" only, found {engine!r}: add it')
        check_function("repair", repair, "DataFrame", RedriveRequestError)
        check_optional_text(letters=letters, directory=directory)
        check_text(spark_conn_id=spark_conn_id)
        if engine == SPARK:
            # Few redrives need Spark.
            from airflow_provider_jetstream.tasks.spark import SparkApplication, spark_properties

            self._spark = SparkApplication(self.log)
            if not is_templated(spark_conf):
                spark_properties(spark_conf)

    def redrive_on_spark(
        self, context: Context, queue: WorkQueue, request: RedriveRequest
    ) -> tuple[dict[str, Any], set[int], str]:
        """Redrive with Spark.

        :return: the report as JSON with its guarantee, the sequences to wait for, and the problem or an empty text
        :raises AirflowFailException: the request isn't possible
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        result = self.run_spark(context, queue, request)
        runtime.send_redrive_metrics(queue.name, result["report"])
        awaited = {sequence for first, last in result["awaited"] for sequence in range(first, last + 1)}
        return result["report"], awaited, result["problem"]

    def preview_on_spark(self, context: Context, queue: WorkQueue, request: RedriveRequest) -> dict[str, Any]:
        """Preview a redrive, repair included, as JSON.

        :raises AirflowFailException: the request isn't possible
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        return self.run_spark(context, queue, request, dry_run=True)

    def run_spark(
        self, context: Context, queue: WorkQueue, request: RedriveRequest, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Run an application that redrives letters, those of the next wave of a request with waves, or previews that.

        :return: the application's result
        """
        refuse_beside_spark(
            None, BY_CAUSE, selection_as_json(request.selection), None, count_under_pause=request.count_under_pause
        )
        if self._reads_report:
            require_rendered("letters", self.letters)
        arguments = {
            "queue": queue.model_dump(mode="json", exclude_unset=True),
            "letters": self.letters,
            "directory": self.directory,
            "dry_run": dry_run,
            "request": {
                "selection": selection_as_json(request.selection),
                "subject": request.subject,
                "rate": request.rate,
                "protocol": request.protocol.value,
                "max_redrives": request.max_redrives,
                "why": request.why,
                "who": request.who,
                "run": request.run,
                "lease_timeout": request.lease_timeout,
                "keep_open": request.keep_open,
                "waves": list(request.waves),
                "stop_when": asdict(request.stop_rule) if request.waves else None,
            },
        }
        if self._spark is None:
            raise RedriveRequestError(f'expected engine="spark" for a Spark application, found {self.engine!r}')
        return self._spark.run_for(context, self, "redrive", arguments, self.repair)

    def on_kill(self) -> None:
        """End the Spark application; called at any point of :meth:`execute`."""
        if self._spark is not None:
            self._spark.kill()
        super().on_kill()


def refuse_target_and_order(**arguments: object) -> None:
    """Refuse where new jobs would go, in which order, with a patch, or discards, which Spark's tasks can't see to.

    :param arguments: the values of these arguments; absent ones are ``None`` or ``False``
    :raises RedriveRequestError: says what to use instead
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise RedriveRequestError(f'expected no {name} with engine="spark", found {value!r}: leave engine out')


def refuse_beside_spark(
    transform: object, group_by: object, select: object, sequences: object, *, count_under_pause: object = False
) -> None:
    """Refuse arguments that only the engine ``python`` takes.

    :raises RedriveRequestError: says what to use instead
    """
    if transform is not None:
        raise RedriveRequestError(
            'expected repair, a function from DataFrame to DataFrame, with engine="spark", found transform: rewrite it,'
            " or leave engine out"
        )
    if group_by != BY_CAUSE:
        raise RedriveRequestError(
            f"expected a dry run with Spark to group by {', '.join(BY_CAUSE)}: leave group_by out"
        )
    if count_under_pause is True:
        raise RedriveRequestError(
            'expected no count under a pause with engine="spark", found one: leave one of the two out'
        )
    if sequences is not None or (isinstance(select, Mapping) and "sequences" in select):
        raise RedriveRequestError(
            'expected no sequences with engine="spark", found some: select by anything else, filter in a repair, or'
            " leave engine out"
        )


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
        waves: Waves | None = None,
        stop_when: StopRule | None = None,
        **kwargs: Unpack[SparkRedriveArguments],
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
        state = runtime.RedriveState(summary["state"])
        summary["resumed"] = self._resumed = summary["resumed"] if self._resumed is None else self._resumed
        log_outcomes(self.log, summary)
        runtime.send_redrive_metrics(queue.name, summary)
        self.log_redrive(summary)
        del summary["guarantee"]
        if problem and (self._killed or state == runtime.RedriveState.FAILED):
            raise RedriveError(problem)
        if state == runtime.RedriveState.FINISHED:
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
        advance = partial(runtime.advance_redrive, stopped=self._is_killed, patience=patience, ended=self._jobs_ended)
        report, wait = hook.blocking(advance, queue, request)
        return *self._summary(report), wait

    def _advance_with_spark(
        self, hook: JetStreamHook, context: Context, queue: WorkQueue, request: RedriveRequest, patience: float
    ) -> tuple[dict[str, Any], str, WaveWait | None]:
        """Do the same with an application for each wave; none runs while jobs or people are awaited."""
        while True:
            advance = partial(runtime.advance_gates, stopped=self._is_killed, patience=patience, ended=self._jobs_ended)
            report, wait, are_due = hook.blocking(advance, queue, request)
            self._resumed = report.resumed if self._resumed is None else self._resumed
            if not are_due:
                return *self._summary(report), wait
            self._jobs_ended = False
            result = self.run_spark(context, queue, request)
            state = runtime.RedriveState(result["report"]["state"])
            if state.is_over or state == runtime.RedriveState.FAILED:
                return result["report"], result["problem"], None

    def _summary(self, report: RedriveReport) -> tuple[dict[str, Any], str]:
        report.cancelled |= self._killed
        return report.as_json() | {"guarantee": report.guarantee}, runtime.problem_of(report)

    def log_redrive(self, report: Mapping[str, Any]) -> None:
        """Write what a redrive has done into the task's log.

        :param report: as JSON, with its guarantee
        :raises AirflowFailException: a person has aborted it; a retry would begin another one
        """
        log_report(self.log, report)
        if report["state"] == runtime.RedriveState.ABORTED:
            raise AirflowFailException(f"the redrive {report['redrive']} was aborted: {report['reason']}")

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> TaskResult:
        """Send what became of the redriven jobs to Airflow's stats, and turn it into the outcome of the task.

        :raises AirflowFailException: more jobs died, were cancelled or are unaccounted for than tolerated
        """
        runtime.send_redrive_metrics(load_queue(self.work_queue, self).name, summary)
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
            raise self._awaited_too_long(redrive, runtime.RedriveState.RUNNING, "its wave's jobs haven't ended")
        # Unless a person ended the wait. The ends are in the streams, and are read there.
        self._jobs_ended = bool(redrive and event and (event["status"] != "ended" or not event["report"]["awaited"]))
        return bool(redrive)

    def _awaited_too_long(self, redrive: str, state: str, reason: str) -> DeadlineError:
        return DeadlineError(
            f"expected the redrive {redrive} to go on within {self._limits().timeout}, found it {state} ({reason}):"
            " resume or abort it, see whether workers take the jobs, or raise wait_timeout; a retry goes on with it"
        )

    def _defer_for_wave(self, queue: WorkQueue, report: Mapping[str, Any], wait: WaveWait) -> NoReturn:
        # Only a task that defers needs the trigger.
        from airflow_provider_jetstream.triggers.redrive import RedriveWaveTrigger

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
                handle=runtime.JobsHandle(cursor=wait.cursor, sequences=runtime.sequence_ranges(wait.sequences)),
                tolerance=asdict(runtime.ANY_END),
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
        from airflow_provider_jetstream.triggers.redrive import STEERING_SECONDS, RedriveStateTrigger

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
