"""The part of a redrive operator that has Spark redrive, for dead letters by the hundred thousand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE
from airflow_provider_jetstream.operators.job_waiting import JobWaitingOperator
from airflow_provider_jetstream.tasks.spark_connection import DEFAULT_SPARK_CONNECTION
from airflow_provider_jetstream.tasks.spark_task import SparkTask
from airflow_provider_jetstream.tasks.template_values import require_rendered, selection_as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

Engine: TypeAlias = Literal["python", "spark"]
PYTHON: Final = "python"
SPARK: Final = "spark"

_ENGINES = (PYTHON, SPARK)
_PLACE = ("nats_conn_id", "spark_conn_id", "spark_conf")
_FOR_SPARK = ("repair", "letters", "directory", "spark_conf")


class SparkRedrivingOperator(JobWaitingOperator):
    """An operator that can have Spark redrive dead letters.

    :param engine: ``python``, or ``spark``
    :param repair: for Spark: a function that takes a ``DataFrame`` of letters and returns what is to be redriven
    :param letters: for Spark: where a report kept the letters; they are looked for where it is absent
    :param directory: for Spark: where it may keep letters and repaired ones, shared by driver and executors
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
        self._spark = SparkTask(self.log)
        self._given_letters = letters is not None
        if engine not in _ENGINES:
            raise RedriveRequestError(f"expected an engine among {', '.join(_ENGINES)}; found {engine!r}")
        if engine != SPARK and (found := [name for name in _FOR_SPARK if getattr(self, name) is not None]):
            raise RedriveRequestError(f'expected {", ".join(found)} with engine="spark" only, found {engine!r}: add it')
        if repair is not None and not callable(repair):
            raise RedriveRequestError(
                f"expected a function that takes a DataFrame as repair, found {type(repair).__name__}"
            )

    def redrive_on_spark(
        self, context: Context, queue: WorkQueue, order: RedriveRequest
    ) -> tuple[dict[str, Any], set[int], str]:
        """Redrive.

        :param context: the task's context
        :param queue: the work queue
        :param order: which letters, and how
        :return: the report as JSON with its guarantee, the jobs to wait for, and what is wrong, if anything is
        :raises AirflowFailException: what is asked for isn't possible
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        done = self._order_spark(context, queue, order, dry_run=False)
        awaited = {sequence for first, last in done["awaited"] for sequence in range(first, last + 1)}
        return done["report"], awaited, done["problem"]

    def preview_on_spark(self, context: Context, queue: WorkQueue, order: RedriveRequest) -> dict[str, Any]:
        """Tell what a redrive would do, repair included.

        :param context: the task's context
        :param queue: the work queue
        :param order: which letters, and how
        :return: the preview as JSON
        :raises AirflowFailException: what is asked for isn't possible
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        return self._order_spark(context, queue, order, dry_run=True)

    def _order_spark(
        self, context: Context, queue: WorkQueue, order: RedriveRequest, *, dry_run: bool
    ) -> dict[str, Any]:
        refuse_beside_spark(None, BY_CAUSE, selection_as_json(order.selection), None)
        if self._given_letters:
            require_rendered("letters", self.letters)
        orders = {
            "queue": queue.model_dump(mode="json", exclude_unset=True),
            "letters": self.letters,
            "directory": self.directory,
            "dry_run": dry_run,
            "order": {
                "selection": selection_as_json(order.selection),
                "subject": order.subject,
                "rate": order.rate,
                "protocol": order.protocol.value,
                "max_redrives": order.max_redrives,
                "why": order.why,
                "who": order.who,
                "run": order.run,
                "keep_open": order.keep_open,
            },
        }
        place = {name: getattr(self, name) for name in _PLACE}
        return self._spark.run(context, place, "redrive", orders, self.repair)

    def on_kill(self) -> None:
        """End the Spark application; called while :meth:`execute` runs, wherever that is."""
        self._spark.kill()
        super().on_kill()


def refuse_beside_spark(transform: object, group_by: object, select: object, sequences: object) -> None:
    """Refuse what only the other engine takes.

    :param transform: what repairs letters one by one
    :param group_by: what a dry run groups letters by
    :param select: which letters
    :param sequences: their stream sequences
    :raises RedriveOrderError: says what to give instead
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
    if sequences is not None or (isinstance(select, Mapping) and "sequences" in select):
        raise RedriveRequestError(
            'expected no sequences with engine="spark", found some: select by anything else, filter in a repair, or'
            " leave engine out"
        )
