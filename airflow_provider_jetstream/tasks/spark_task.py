"""How operators start a Spark application, and end it with the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.tasks.identity import origin_of
from airflow_provider_jetstream.tasks.spark_connection import spark_settings
from airflow_provider_jetstream.tasks.spark_credentials import executor_credentials
from airflow_provider_jetstream.tasks.spark_process import SparkApplication, TaskLog
from airflow_provider_jetstream.tasks.template_values import absent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow.providers.common.compat.sdk import Context


class SparkTask:
    """A task's Spark application, which may be killed before, while and after it runs.

    :param log: the task's log
    """

    def __init__(self, log: TaskLog) -> None:
        self._log = log
        self._application: SparkApplication | None = None
        self._killed = False

    def run(
        self,
        context: Context,
        place: Mapping[str, Any],
        work: str,
        orders: Mapping[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """Have Spark do something.

        :param context: the task's context
        :param place: ``nats_conn_id``, ``spark_conn_id`` and ``spark_conf``, rendered
        :param work: what
        :param orders: how; what JSON can hold
        :param function: a function of the DAG's author that it needs
        :return: what it gave back
        :raises AirflowFailException: it can't succeed
        :raises SparkApplicationError: it didn't, or was stopped
        """
        spark = spark_settings(place["spark_conn_id"], None if absent(place["spark_conf"]) else place["spark_conf"])
        nats = executor_credentials(JetStreamHook(place["nats_conn_id"]).settings(), spark)
        self._application = SparkApplication(spark, nats, self._log)
        if self._killed:
            self._application.kill()
        result: dict[str, Any] = self._application.run(_name(context), work, orders, function)
        return result

    def kill(self) -> None:
        """End it; called from a signal handler."""
        self._killed = True
        if self._application:
            self._application.kill()


def _name(context: Context) -> str:
    origin = origin_of(context)
    mapped = f"[{origin.map_index}]" if origin.map_index >= 0 else ""
    return f"{origin.dag_id}.{origin.task_id}{mapped} {origin.run_id}"
