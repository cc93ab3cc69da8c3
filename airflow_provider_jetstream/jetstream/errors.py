"""Every error this package raises, as one tree.

::

    JetStreamProviderError
    ├── TerminalError                      the same call fails again
    │   ├── ConnectionSettingsError        also ValueError
    │   ├── AuthenticationError            also PermissionError
    │   ├── TLSError                       also ConnectionError
    │   ├── JetStreamDisabledError
    │   ├── ServerTooOldError
    │   ├── QueueDeclarationError          also ValueError
    │   ├── ProvisioningError
    │   │   └── DriftError
    │   ├── NotFoundError                  also LookupError
    │   ├── JobError                       also ValueError
    │   │   ├── JobNotSerializableError    also TypeError
    │   │   └── JobTooLargeError
    │   ├── DeadLetterGoneError            also LookupError
    │   ├── SelectionError                 also ValueError
    │   ├── RedriveOrderError              also ValueError
    │   ├── JobsDeadError
    │   ├── JobsCancelledError
    │   ├── EventLoopError                 also RuntimeError
    │   ├── HandlerNotFoundError           also LookupError
    │   ├── WorkerSetupError               also ValueError
    │   └── GiveUpError
    │       ├── InvalidBodyError           also ValueError
    │       └── JobExpiredError
    ├── TransientError                     the same call may succeed later
    │   ├── UnreachableError               also ConnectionError
    │   ├── DeadlineError                  also TimeoutError
    │   │   └── HandlerDeadlineError
    │   ├── RetryLaterError
    │   ├── HandlerCutOffError
    │   ├── HandlerDiedError
    │   ├── WorkerStuckError
    │   ├── RedriveError
    │   └── QueueFullError
    ├── PublishError                       some jobs aren't known to be stored; carries which
    │   ├── PublishRefusedError            also TerminalError
    │   └── PublishIncompleteError         also TransientError
    └── ApiError                           the server's own refusal, with its codes

Each class has a ``code`` that stays the same between releases, for alerts and log searches. Messages say what was
expected, what was found and what to do; they never hold a credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.publish_report import PublishReport


class JetStreamProviderError(Exception):
    """The root of every error of this package."""

    code: ClassVar[str] = "JS000"


class TerminalError(JetStreamProviderError):
    """Calling again with the same input fails again."""

    code = "JS100"


class ConnectionSettingsError(TerminalError, ValueError):
    """The settings of a connection contradict themselves or aren't understood."""

    code = "JS101"


class AuthenticationError(TerminalError, PermissionError):
    """The server refused the credentials, or the account may not do this."""

    code = "JS102"


class TLSError(TerminalError, ConnectionError):
    """No encrypted connection came about; never answered by falling back to plaintext."""

    code = "JS103"


class JetStreamDisabledError(TerminalError):
    """The server, or the account on it, has no JetStream."""

    code = "JS104"


class ServerTooOldError(TerminalError):
    """The server lacks something that this package needs to lose nothing."""

    code = "JS105"


class QueueDeclarationError(TerminalError, ValueError):
    """A declaration that the server would refuse, or that would lose jobs.

    :param name: what is declared, or the path of its file
    :param problems: one sentence each, all of them rather than the first
    :param kind: what it is
    """

    code = "JS110"

    def __init__(self, name: str, problems: Sequence[str], kind: str = "work queue") -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"the declaration of {kind} {name!r} can't be used:{lines}")


class ProvisioningError(TerminalError):
    """The server refused a stream or a consumer."""

    code = "JS111"


class DriftError(ProvisioningError):
    """What exists differs from the declaration in a way that no update can mend."""

    code = "JS112"


class NotFoundError(TerminalError, LookupError):
    """A stream or consumer that should be there isn't."""

    code = "JS113"


class JobError(TerminalError, ValueError):
    """A job that can't be published as it is."""

    code = "JS120"


class JobNotSerializableError(JobError, TypeError):
    """A job's body is neither bytes nor text nor JSON."""

    code = "JS121"


class JobTooLargeError(JobError):
    """A job exceeds the size that its stream or server accepts."""

    code = "JS122"


class DeadLetterGoneError(TerminalError, LookupError):
    """A dead letter whose job is no longer stored."""

    code = "JS130"


class SelectionError(TerminalError, ValueError):
    """A selection of dead letters that isn't understood."""

    code = "JS132"


class RedriveOrderError(TerminalError, ValueError):
    """A redrive that can't be done in the way that is asked for."""

    code = "JS133"


class JobsDeadError(TerminalError):
    """Jobs that were waited for ended as dead letters."""

    code = "JS131"


class JobsCancelledError(TerminalError):
    """Jobs that were waited for were cancelled."""

    code = "JS134"


class EventLoopError(TerminalError, RuntimeError):
    """A blocking call was made where an event loop is running."""

    code = "JS140"


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


class TransientError(JetStreamProviderError):
    """Calling again later may succeed."""

    code = "JS200"


class UnreachableError(TransientError, ConnectionError):
    """No server answered, or the connection went away and didn't come back in time."""

    code = "JS201"


class DeadlineError(TransientError, TimeoutError):
    """A time limit passed."""

    code = "JS202"


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


class RedriveError(TransientError):
    """A dead letter that should have been redriven wasn't; it stays where it was."""

    code = "JS211"


class QueueFullError(TransientError):
    """The stream is at its limit and discards what is new."""

    code = "JS220"


class PublishError(JetStreamProviderError):
    """Some jobs aren't known to be stored.

    Publishing them again with the same ids is safe inside the stream's duplicate window.

    :param message: which and why
    :param report: the fate of every job, by index
    """

    code = "JS400"

    def __init__(self, message: str, report: PublishReport) -> None:
        self.report = report
        super().__init__(message)


class PublishRefusedError(PublishError, TerminalError):
    """Some jobs can never be stored as they are."""

    code = "JS401"


class PublishIncompleteError(PublishError, TransientError):
    """Some jobs weren't stored this time: the queue was full, or the server didn't answer."""

    code = "JS402"


class ApiError(JetStreamProviderError):
    """The server's own refusal of an API request.

    :param status: HTTP-like status, such as 404
    :param err_code: JetStream's own code, such as 10059
    :param description: the server's words
    :param subject: the API subject that was asked
    """

    code = "JS300"

    def __init__(self, status: int, err_code: int, description: str, subject: str) -> None:
        self.status = status
        self.err_code = err_code
        self.description = description
        self.subject = subject
        super().__init__(f"{description} (status {status}, error {err_code}) in answer to {subject}")
