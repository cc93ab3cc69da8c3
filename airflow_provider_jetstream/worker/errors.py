"""The errors that only a worker or its handlers raise, below the tree of ``jetstream.errors``.

::

    TerminalError                          the same call fails again
    ├── HandlerNotFoundError               also LookupError
    ├── WorkerSetupError                   also ValueError
    └── GiveUpError
        ├── InvalidBodyError               also ValueError
        ├── JobExpiredError
        └── InvalidExecuteAtError          also ValueError
    TransientError                         the same call may succeed later
    ├── DeadlineError
    │   └── HandlerDeadlineError
    ├── RetryLaterError
    ├── NotDueError
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
    """The command line names a handler that can't be imported."""

    code = "JS150"


class GiveUpError(TerminalError):
    """Raised by a handler: this job can't be done, whatever the number of deliveries."""

    code = "JS151"


class WorkerSetupError(TerminalError, ValueError):
    """A worker can't run with the settings that it has."""

    code = "JS152"


class InvalidBodyError(GiveUpError, ValueError):
    """A job's body doesn't validate against the handler's model."""

    code = "JS153"


class JobExpiredError(GiveUpError):
    """A job was delivered after the time in its ``Job-Expires`` header."""

    code = "JS154"


class InvalidExecuteAtError(GiveUpError, ValueError):
    """The ``X-Execute-At`` header of a job is no time, in a queue whose jobs may have one."""

    code = "JS155"


class HandlerDeadlineError(DeadlineError):
    """A handler was still running at its deadline."""

    code = "JS203"


class RetryLaterError(TransientError):
    """Raised by a handler: another delivery may succeed, but not before a delay has passed.

    :param delay: seconds, a :class:`~datetime.timedelta`, or text such as ``"2m"``
    :param message: the reason
    :raises ValueError: the delay can't be parsed
    """

    code = "JS204"

    def __init__(self, delay: float | timedelta | str, message: str = "") -> None:
        from airflow_provider_jetstream.jetstream.units import parse_seconds

        self.seconds = parse_seconds(delay)
        # Both arguments, so that the error can be pickled in a handler's process.
        super().__init__(delay, message)

    def __str__(self) -> str:
        return str(self.args[1] or f"to be tried again after {self.seconds:g} s")


class NotDueError(TransientError):
    """A job was delivered before the time in its ``X-Execute-At`` header.

    :param seconds: how long before
    """

    code = "JS208"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"the job is due in {seconds:g} s")


class HandlerCutOffError(TransientError):
    """The worker was stopped, and a handler was still running at the end of the grace time.

    :param ended: whether the handler has ended, rather than going on in a thread
    """

    code = "JS205"

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended
        super().__init__("the worker was stopped, and the handler wasn't done within the grace time")


class HandlerDiedError(TransientError):
    """A handler's process exited before the handler did."""

    code = "JS206"


class WorkerStuckError(TransientError):
    """Too many handlers run past their deadline in threads, which only the exit of the process ends."""

    code = "JS207"
