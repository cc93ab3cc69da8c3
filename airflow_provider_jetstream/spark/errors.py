"""The errors of reading, writing and starting Spark.

::

    JetStreamProviderError
    ├── TerminalError
    │   ├── SparkOptionError      also ValueError
    │   ├── DataLossError         also LookupError
    │   ├── RepairContractError   also ValueError
    │   ├── RepairedLettersError  also ValueError
    │   └── SparkSettingsError    also ValueError
    ├── TransientError
    │   └── SparkApplicationError  also RuntimeError
    └── RowsNotStoredError        some rows aren't known to be stored; names them
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

_Class = TypeVar("_Class", bound=type)

log = logging.getLogger(__name__)


class SparkOptionError(TerminalError, ValueError):
    """An option, a schema or a mode is invalid for the data source."""

    code = "JS501"


class DataLossError(TerminalError, LookupError):
    """Messages that should have been read are no longer stored."""

    code = "JS502"


class RepairContractError(TerminalError, ValueError):
    """A repair of dead letters changed something that it must not change; nothing was redriven."""

    code = "JS504"


class RepairedLettersError(TerminalError, ValueError):
    """The letters that a repair has written are incomplete, or other ones than were checked; nothing was redriven."""

    code = "JS505"


class RowsNotStoredError(JetStreamProviderError):
    """The stream didn't acknowledge some rows of a partition; rows before and after them may be stored.

    :param may_pass: whether another attempt can store one of them
    """

    code = "JS510"

    def __init__(self, message: str, *, may_pass: bool = True) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class SparkSettingsError(TerminalError, ValueError):
    """Spark can't be started with these settings, or PySpark is missing or mixed with another version."""

    code = "JS520"


class SparkApplicationError(TransientError, RuntimeError):
    """The Spark application didn't start, was stopped, or failed for a reason outside this package."""

    code = "JS521"


def with_short_errors(kind: _Class) -> _Class:
    """Make the public methods of a class raise this package's errors without their trace.

    Spark shows a trace first and the cause last; the trace is logged at level ``DEBUG``.
    """
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, _short(method))
    return kind


def _short(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def generate(*arguments: Any, **named: Any) -> Any:
            try:
                yield from method(*arguments, **named)
            except JetStreamProviderError as error:
                log.debug("Spark is told of an error", exc_info=True)
                problem = error
            else:
                return
            raise problem.with_traceback(None) from None

        return generate

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except JetStreamProviderError as error:
            log.debug("Spark is told of an error", exc_info=True)
            problem = error
        raise problem.with_traceback(None) from None

    return call
