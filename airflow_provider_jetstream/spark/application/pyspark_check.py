"""Checks the installation of PySpark without importing it."""

from __future__ import annotations

from importlib import metadata

from airflow_provider_jetstream.spark.errors import SparkSettingsError

_LOWEST = (4, 1)
# They write into PySpark's own folder: with another version, the files of both are mixed.
_OVERWRITING = ("pyspark-client", "pyspark-connect")


def require_pyspark() -> str:
    """Return the version of PySpark.

    :raises SparkSettingsError: it is missing, too old, or mixed with files of another version
    """
    installed = _version("pyspark")
    if installed is None:
        raise SparkSettingsError(
            "expected pyspark 4.1 or later where this task runs, found none: install airflow-provider-jetstream with"
            " its extra spark (pyspark-client alone contains no Spark that could be started)"
        )
    if tuple(int(part) for part in installed.split(".")[:2]) < _LOWEST:
        raise SparkSettingsError(f"expected pyspark 4.1 or later, found {installed}: upgrade it")
    for other in _OVERWRITING:
        if (version := _version(other)) not in (None, installed):
            raise SparkSettingsError(
                f"expected {other} of the version of pyspark, {installed}, found {version}: it writes into pyspark's"
                " own folder, whose files are now of two versions; uninstall both, then install"
                f" pyspark=={installed} {other}=={installed}, or pyspark alone"
            )
    return installed


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
