"""What can go wrong between Spark and JetStream.

::

    JetStreamProviderError
    ├── TerminalError
    │   ├── SparkOptionError      also ValueError
    │   ├── DataLossError         also LookupError
    │   └── RepairContractError   also ValueError
    ├── TransientError
    │   └── SparkApplicationError  also RuntimeError
    └── RowsNotStoredError        some rows aren't known to be stored; says which
"""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError, TransientError


class SparkOptionError(TerminalError, ValueError):
    """An option, a schema or a mode that the data source doesn't take."""

    code = "JS501"


class DataLossError(TerminalError, LookupError):
    """Messages that should have been read are no longer in the stream."""

    code = "JS502"


class RepairContractError(TerminalError, ValueError):
    """A repair of dead letters changed what it may not change; nothing was redriven."""

    code = "JS504"


class RowsNotStoredError(JetStreamProviderError):
    """Rows of a partition weren't acknowledged by the stream; those before and after them may be stored."""

    code = "JS510"


class SparkSettingsError(TerminalError, ValueError):
    """Where or how Spark is to be started can't be used, or PySpark isn't installed as it has to be."""

    code = "JS520"


class SparkApplicationError(TransientError, RuntimeError):
    """The application didn't start, was stopped, or failed for a reason that isn't this package's."""

    code = "JS521"
