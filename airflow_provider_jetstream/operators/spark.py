"""The operator that reports on dead letters at volume, with Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Unpack
from urllib.parse import unquote, urlsplit

from airflow.sdk import BaseOperator

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.assets.stream_asset import StreamUse, TaskAssets
from airflow_provider_jetstream.links.monitor import DeadLetterReportLink, QueueLink
from airflow_provider_jetstream.spark.errors import SparkSettingsError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_CONN_ID,
    check_optional_text,
    check_text,
    is_templated,
    parse_selection,
    require_rendered,
    selection_as_json,
)
from airflow_provider_jetstream.tasks.context import NamedMissingValues, fail_on_terminal_errors, json_result, task_key
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue, require_dead_letter_queue
from airflow_provider_jetstream.tasks.spark import (
    CONNECTION_FIELDS,
    DEFAULT_SPARK_CONNECTION,
    SparkApplication,
    spark_properties,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import (
        Properties,
        Queue,
        ReportOptions,
        Selected,
        TaskArguments,
        Text,
    )


class JetStreamDeadLetterReportOperator(NamedMissingValues, TaskAssets, BaseOperator):
    """Store a queue's dead letters as Parquet, group them by cause, and report on them as Parquet and one HTML page.

    Nothing is changed in the queue. A later redrive can start from the stored letters (``letters`` of
    :class:`~airflow_provider_jetstream.operators.redrive.JetStreamRedriveOperator`). A task that is killed ends its
    Spark application; what it has written by then stays in a folder of its own.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param directory: the folder of reports, each in a folder of its own: a path or an address that Spark can write to,
        shared by driver and executors
    :param page_directory: the folder into which the driver writes the page; needed where ``directory`` is no path
    :param select: which dead letters, as a :class:`~airflow_provider_jetstream.jetstream.Selection`, its
        dict, or the text of one; all in circulation where absent
    :param served_at: the address under which the pages' directory can be opened in a browser, for the task's link
    :param nats_conn_id: the Airflow connection of type ``nats``
    :param spark_conn_id: the Airflow connection of type ``spark``; Spark runs on this machine where the default one
        doesn't exist
    :param spark_conf: further properties of Spark; ``spark.jetstream.…`` says how executors elsewhere find NATS
    :return: counts, the largest groups, and the paths of letters, tables and page
    :raises SelectionError: the selection isn't understood
    """

    operator_extra_links = (QueueLink(), DeadLetterReportLink())
    template_fields: Sequence[str] = (
        "work_queue",
        "directory",
        "page_directory",
        "select",
        "served_at",
        *CONNECTION_FIELDS,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json", "select": "json", "spark_conf": "json"}
    ui_color = "#f5e6d9"
    event_fields = ("letters", "page", "kept")

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls, *, task_id: str, work_queue: Queue = ..., directory: Text = ..., **options: Unpack[ReportOptions]
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    def __init__(
        self,
        *,
        work_queue: Queue,
        directory: Text,
        page_directory: Text | None = None,
        select: Selected | None = None,
        served_at: Text | None = None,
        nats_conn_id: str = DEFAULT_CONN_ID,
        spark_conn_id: str = DEFAULT_SPARK_CONNECTION,
        spark_conf: Properties | None = None,
        **kwargs: Unpack[TaskArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_text(directory=directory, nats_conn_id=nats_conn_id, spark_conn_id=spark_conn_id)
        check_optional_text(page_directory=page_directory, served_at=served_at)
        require_dead_letter_queue(declared_queue(work_queue, self))
        if not is_templated(spark_conf):
            spark_properties(spark_conf)
        if not is_templated(page_directory or directory):
            _path(str(page_directory or directory))
        self.work_queue: Any = work_queue
        self.directory: Any = directory
        self.page_directory: Any = page_directory
        self.select: Any = selection_as_json(select) if isinstance(select, runtime.Selection) else select
        self.served_at = served_at
        self.nats_conn_id = nats_conn_id
        self.spark_conn_id = spark_conn_id
        self.spark_conf = spark_conf
        self.page: str | None = None
        self._spark = SparkApplication(self.log)
        self._is_selective = select is not None
        parse_selection(None if is_templated(select) else self.select)

    def stream_use(self, queue: WorkQueue, work: Mapping[str, Any]) -> StreamUse:
        """Return the streams that hold jobs and letters."""
        return StreamUse([queue.name, *([queue.dead_letters.name] if queue.dead_letters else [])])

    def execute(self, context: Context) -> dict[str, Any]:
        """Write the report.

        :raises AirflowFailException: the arguments can't be used, or the queue doesn't exist
        :raises SparkApplicationError: Spark failed, or was stopped
        """
        with fail_on_terminal_errors():
            if self._is_selective:
                require_rendered("select", self.select)
            queue = load_queue(self.work_queue, self)
            # One for each try: the files of a try that was killed must not be mixed with those of the next one.
            folder = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{task_key(context)[:8]}-{context['ti'].try_number}"
            page = f"{(self.page_directory or self.directory).rstrip('/')}/{folder}/report.html"
            address = conf.get("api", "base_url", fallback="").rstrip("/")
            arguments = {
                "queue": queue.model_dump(mode="json", exclude_unset=True),
                "select": selection_as_json(parse_selection(self.select)),
                "directory": f"{self.directory.rstrip('/')}/{folder}",
                "page": _path(page),
                "airflow_url": address or None,
            }
            result = self._spark.run_for(context, self, "report", arguments)
        self.page = f"{folder}/report.html"
        self.log.info("The report on %d dead letters of %s is %s", result["letters"], queue.name, result["page"])
        self.note_work(result)
        return json_result(result)

    def on_kill(self) -> None:
        """End the Spark application; called while :meth:`execute` runs."""
        self._spark.kill()


def _path(page: str) -> str:
    parts = urlsplit(page)
    if parts.scheme not in ("", "file"):
        raise SparkSettingsError(
            f"expected page_directory, a path on this machine, since {page} is none; found none: set it"
        )
    return unquote(parts.path) if parts.scheme else page
