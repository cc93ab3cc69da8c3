"""A session of this application's own, from its beginning to the end of its JVM."""

from __future__ import annotations

import logging
import re
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.application.package_zip import ZIP_NAME, package_zip
from airflow_provider_jetstream.spark.errors import SparkApplicationError, SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from subprocess import Popen

    from py4j.java_gateway import JavaGateway

log = logging.getLogger(__name__)

# Spark itself would try for a minute, and then say that the context was stopped.
_REACH_SECONDS = 10.0
_LAST_SECONDS = 8.0
_DEFAULTS = {"spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}


@contextmanager
def running_session(name: str, master: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start Spark, and stop it at the end.

    :param name: shown in Spark's pages
    :param master: such as ``local[*]`` or ``spark://host:7077``
    :param conf: further properties
    :return: the session, to which the format ``jetstream`` is known
    :raises SparkApplicationError: no master answers
    :raises SparkSettingsError: Spark and PySpark are of different versions
    """
    _require_master(master)
    properties = SparkConf().setMaster(master).setAppName(name)
    for key, value in {**_DEFAULTS, **conf}.items():
        properties.set(key, value)
    # Executors fetch from it whenever they come.
    with tempfile.TemporaryDirectory() as folder, _running_jvm(properties) as gateway:
        context = _context(properties, gateway)
        try:
            yield _prepared(SparkSession.builder.getOrCreate(), Path(folder))
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
            jvm.wait(_LAST_SECONDS)


def _context(properties: SparkConf, gateway: JavaGateway) -> SparkContext:
    try:
        return SparkContext(conf=properties, gateway=gateway)
    except Py4JJavaError as error:
        # Its text comes from the JVM, which will be gone.
        why = str(error).partition("\n\tat ")[0]
    raise SparkApplicationError(f"expected Spark to start, found: {why}; what it wrote stands above")


def _prepared(session: SparkSession, folder: Path) -> SparkSession:
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
        # The same version here and there, whatever is installed on executors.
        context.addPyFile(str(package_zip(folder / ZIP_NAME)))
    register(session)
    return session


def _require_master(master: str) -> None:
    if not master.startswith("spark://"):
        return
    problems = []
    for address in master.removeprefix("spark://").split(","):
        found = re.fullmatch(r"\[?(?P<host>[^\]]+?)\]?:(?P<port>\d+)", address.strip())
        if found is None:
            raise SparkSettingsError(
                f"expected a master as spark://host:port, found {master!r}: correct the connection"
            )
        try:
            socket.create_connection((found["host"], int(found["port"])), _REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {error}")
        else:
            return
    raise SparkApplicationError(
        f"expected a Spark master at {master}, found none within {_REACH_SECONDS:g} s ({'; '.join(problems)}): start"
        " it, or correct host and port of the Spark connection"
    )
