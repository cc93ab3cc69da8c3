"""What can go wrong with the Spark application that a task starts.

::

    TerminalError
    └── SparkSettingsError       also ValueError
    TransientError
    └── SparkApplicationError    also RuntimeError
"""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.errors import TerminalError, TransientError


class SparkSettingsError(TerminalError, ValueError):
    """Where or how Spark is to be started can't be used, or PySpark isn't installed as it has to be."""

    code = "JS520"


class SparkApplicationError(TransientError, RuntimeError):
    """The application didn't start, was stopped, or failed for a reason that isn't this package's."""

    code = "JS521"
