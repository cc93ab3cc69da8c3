"""Whether PySpark is installed so that it can be used, found out without importing it."""

from __future__ import annotations

from importlib import metadata

from airflow_provider_jetstream.spark.errors import SparkSettingsError

_LOWEST = (4, 1)
# They write into PySpark's own folder, so that another version leaves a mixture of both.
_OVERWRITING = ("pyspark-client", "pyspark-connect")


def require_pyspark() -> str:
    """Make sure that PySpark is there, new enough, and not mixed with files of another version.

    :return: its version
    :raises SparkSettingsError: it isn't; says what to install
    """
    found = _version("pyspark")
    if found is None:
        raise SparkSettingsError(
            "expected pyspark 4.1 or later where this task runs, found none: install airflow-provider-jetstream with"
            " its extra spark (pyspark-client alone brings no Spark that could be started)"
        )
    if tuple(int(part) for part in found.split(".")[:2]) < _LOWEST:
        raise SparkSettingsError(f"expected pyspark 4.1 or later, found {found}: upgrade it")
    for other in _OVERWRITING:
        if (version := _version(other)) not in (None, found):
            raise SparkSettingsError(
                f"expected {other} of the version of pyspark, {found}, found {version}: it writes into pyspark's own"
                f" folder, and what is there now is a mixture; uninstall both, then install pyspark=={found}"
                f" {other}=={found}, or pyspark alone"
            )
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
