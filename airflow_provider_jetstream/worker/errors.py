"""The errors that only a worker raises or is told by a handler, below the tree of the ground floor.

::

    TerminalError                          the same call fails again
    ├── HandlerNotFoundError               also LookupError
    ├── WorkerSetupError                   also ValueError
    └── GiveUpError
        ├── InvalidBodyError               also ValueError
        └── JobExpiredError
    TransientError                         the same call may succeed later
    ├── DeadlineError
    │   └── HandlerDeadlineError
    ├── RetryLaterError
    ├── HandlerCutOffError
    ├── HandlerDiedError
    └── WorkerStuckError
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import DeadlineError, TerminalError, TransientError

if TYPE_CHECKING:
    from datetime import timedelta


class HandlerNotFoundError(TerminalError, LookupError):
    """A worker's handler isn't where the command line says."""

    code = "JS150"


class GiveUpError(TerminalError):
    """Raised by a handler: this job can't be done, and further deliveries would change nothing."""

    code = "JS151"


class WorkerSetupError(TerminalError, ValueError):
    """A worker can't work in the way that it is told to."""

    code = "JS152"


class InvalidBodyError(GiveUpError, ValueError):
    """A job's body isn't what its handler takes."""

    code = "JS153"


class JobExpiredError(GiveUpError):
    """A job came to a worker after its own time was over."""

    code = "JS154"


class HandlerDeadlineError(DeadlineError):
    """A handler wasn't done with a job by its deadline."""

    code = "JS203"


class RetryLaterError(TransientError):
    """Raised by a handler: another delivery may succeed, but not before some time has passed.

    :param delay: seconds, a :class:`~datetime.timedelta`, or text such as ``"2m"``
    :param message: why
    :raises ValueError: if the delay isn't understood
    """

    code = "JS204"

    def __init__(self, delay: float | timedelta | str, message: str = "") -> None:
        from airflow_provider_jetstream.jetstream.units import parse_seconds

        self.seconds = parse_seconds(delay)
        # Both, so that it can be pickled on its way out of a process.
        super().__init__(delay, message)

    def __str__(self) -> str:
        return str(self.args[1] or f"to be tried again after {self.seconds:g} s")


class HandlerCutOffError(TransientError):
    """A worker was told to stop, and a handler wasn't done within the grace time.

    :param ended: whether the handler has ended, rather than going on in a thread
    """

    code = "JS205"

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended
        super().__init__("the worker was told to stop, and the handler wasn't done within the grace time")


class HandlerDiedError(TransientError):
    """The process in which a handler ran ended before the handler did."""

    code = "JS206"


class WorkerStuckError(TransientError):
    """Too many handlers ran past their deadline in threads, which nothing but the end of the process ends."""

    code = "JS207"
