"""The application's own Spark session, from the start to the end of its JVM, and the progress of its stages."""

from __future__ import annotations

import logging
import re
import socket
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from airflow_provider_jetstream.spark.application.package_zip import ZIP_NAME, package_zip
from airflow_provider_jetstream.spark.errors import SparkApplicationError, SparkSettingsError
from airflow_provider_jetstream.spark.source.data_source import register

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from subprocess import Popen

    from py4j.java_gateway import JavaGateway

log = logging.getLogger(__name__)

# Spark itself would try for a minute, and then report that the context was stopped.
_CONNECT_SECONDS = 10.0
_EXIT_SECONDS = 8.0
_PROGRESS_SECONDS = 5.0
_DEFAULTS = {"spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}


@contextmanager
def running_session(name: str, master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Run Spark until the block ends, with the format ``jetstream`` registered.

    :param name: shown in Spark's pages
    :param master: such as ``local[*]`` or ``spark://host:7077``
    :param conf: further properties
    :raises SparkApplicationError: no master answers, or Spark doesn't start
    :raises SparkSettingsError: Spark and PySpark are of different versions
    """
    _require_master(master)
    properties = SparkConf().setMaster(master).setAppName(name)
    for key, value in {**_DEFAULTS, **conf}.items():
        properties.set(key, value)
    # Executors fetch the package from this directory whenever they start.
    with tempfile.TemporaryDirectory() as directory, _running_jvm(properties) as gateway:
        context = _context(properties, gateway)
        try:
            yield _prepared(SparkSession.builder.getOrCreate(), Path(directory))
        finally:
            context.stop()


@contextmanager
def _running_jvm(properties: SparkConf) -> Iterator[JavaGateway]:
    gateway = launch_gateway(properties)
    jvm: Popen[bytes] = vars(gateway)["proc"]
    try:
        yield gateway
    finally:
        gateway.shutdown()
        if jvm.stdin:
            jvm.stdin.close()
        # It deletes its files when it ends, which takes a moment.
        with suppress(TimeoutExpired):
            jvm.wait(_EXIT_SECONDS)


def _context(properties: SparkConf, gateway: JavaGateway) -> SparkContext:
    try:
        return SparkContext(conf=properties, gateway=gateway)
    except Py4JJavaError as error:
        # Its text comes from the JVM, which is gone afterwards.
        cause = str(error).partition("\n\tat ")[0]
    raise SparkApplicationError(f"expected Spark to start, found: {cause}; Spark's own output is above")


def _prepared(session: SparkSession, directory: Path) -> SparkSession:
    if session.version != pyspark.__version__:
        raise SparkSettingsError(
            f"expected Spark {pyspark.__version__}, the version of pyspark, found {session.version}: SPARK_HOME"
            " points to another installation; unset it where tasks run, or install the same pyspark"
        )
    context = session.sparkContext
    log.info(
        "Spark %s runs as %s on %s; its pages are at %s",
        *(session.version, context.applicationId, context.master, context.uiWebUrl or "no address"),
    )
    if not str(context.master).startswith("local"):
        # So that executors use the driver's version, whatever is installed there.
        context.addPyFile(str(package_zip(directory / ZIP_NAME)))
    register(session)
    return session


def _require_master(master: str) -> None:
    if not master.startswith("spark://"):
        return
    problems = []
    for address in master.removeprefix("spark://").split(","):
        match = re.fullmatch(r"\[?(?P<host>[^\]]+?)\]?:(?P<port>\d+)", address.strip())
        if match is None:
            raise SparkSettingsError(
                f"expected a master as spark://host:port, found {master!r}: correct the connection"
            )
        try:
            socket.create_connection((match["host"], int(match["port"])), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
        else:
            return
    raise SparkApplicationError(
        f"expected a Spark master at {master}, found none within {_CONNECT_SECONDS:g} s ({'; '.join(problems)}): start"
        " it, or correct host and port of the Spark connection"
    )


@contextmanager
def logged_stages(context: SparkContext) -> Iterator[None]:
    """Log the running stages every few seconds, where they changed, until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=_log_stages, args=(context, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PROGRESS_SECONDS)


def _log_stages(context: SparkContext, stop: threading.Event) -> None:
    logged = ""
    while not stop.wait(_PROGRESS_SECONDS):
        try:
            stages = running_stages(context)
        except Exception:
            # The context may have ended, which causes several errors; the code that uses it reports them.
            log.debug("The stages can't be read", exc_info=True)
            return
        if stages and stages != logged:
            log.info("%s", stages)
        logged = stages


def running_stages(context: SparkContext) -> str:
    """Describe the stages that run now; empty where none does."""
    tracker = context.statusTracker()
    stages = (tracker.getStageInfo(number) for number in sorted(tracker.getActiveStageIds()))
    return "; ".join(
        f"stage {stage.stageId}: {stage.numCompletedTasks} of {stage.numTasks} tasks done,"
        f" {stage.numActiveTasks} running" + (f", {stage.numFailedTasks} failed" if stage.numFailedTasks else "")
        for stage in stages
        if stage
    )
