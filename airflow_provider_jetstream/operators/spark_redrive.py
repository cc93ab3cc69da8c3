"""The base class of operators that can redrive dead letters by the hundred thousand with Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.airflow_metrics import send_redrive_metrics
from airflow_provider_jetstream.tasks.arguments import (
    check_function,
    check_optional_text,
    check_text,
    is_templated,
    require_rendered,
    selection_as_json,
)
from airflow_provider_jetstream.tasks.spark import DEFAULT_SPARK_CONNECTION, SparkApplication, spark_properties

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

Engine: TypeAlias = Literal["python", "spark"]
PYTHON: Final = "python"
SPARK: Final = "spark"

_ENGINES = (PYTHON, SPARK)
_SPARK_ONLY = ("repair", "letters", "directory", "spark_conf")


class SparkRedrivingOperator(JobWaitingOperator):
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
        letters: str | None = None,
        directory: str | None = None,
        spark_conn_id: str = DEFAULT_SPARK_CONNECTION,
        spark_conf: Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.engine = engine
        self.repair = repair
        self.letters = letters
        self.directory = directory
        self.spark_conn_id = spark_conn_id
        self.spark_conf = spark_conf
        self._spark = SparkApplication(self.log)
        self._reads_report = letters is not None
        if engine not in _ENGINES:
            raise RedriveRequestError(f"expected an engine among {', '.join(_ENGINES)}; found {engine!r}")
        if engine != SPARK and (found := [name for name in _SPARK_ONLY if getattr(self, name) is not None]):
            raise RedriveRequestError(f'expected {", ".join(found)} with engine="spark" only, found {engine!r}: add it')
        check_function("repair", repair, "DataFrame", RedriveRequestError)
        check_optional_text(letters=letters, directory=directory)
        check_text(spark_conn_id=spark_conn_id)
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
        send_redrive_metrics(queue.name, result["report"])
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
        refuse_beside_spark(None, BY_CAUSE, selection_as_json(request.selection), None, census=request.census)
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
        return self._spark.run_for(context, self, "redrive", arguments, self.repair)

    def on_kill(self) -> None:
        """End the Spark application; called at any point of :meth:`execute`."""
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
    transform: object, group_by: object, select: object, sequences: object, *, census: object = False
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
    if census is True:
        raise RedriveRequestError('expected no census with engine="spark", found one: leave one of the two out')
    if sequences is not None or (isinstance(select, Mapping) and "sequences" in select):
        raise RedriveRequestError(
            'expected no sequences with engine="spark", found some: select by anything else, filter in a repair, or'
            " leave engine out"
        )
