"""The errors of the core, and the classes that every other error of this package derives from, as one tree.

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
    │   ├── RedriveRequestError            also ValueError
    │   ├── JobsDeadError
    │   ├── JobsCancelledError
    │   ├── JobsVanishedError
    │   ├── JobsIncompleteError
    │   └── EventLoopError                 also RuntimeError
    ├── TransientError                     the same call may succeed later
    │   ├── UnreachableError               also ConnectionError
    │   ├── DeadlineError                  also TimeoutError
    │   ├── WireError                  also ConnectionError
    │   ├── RedriveError
    │   └── QueueFullError
    ├── PublishError                       some jobs aren't known to be stored; carries which
    │   ├── PublishRefusedError            also TerminalError
    │   └── PublishIncompleteError         also TransientError
    └── ApiError                           the server's own refusal, with its codes

What only one other part of the package raises is drawn in the ``errors`` module of that part, such as
:mod:`airflow_provider_jetstream.worker.errors`.

Each class has a ``code`` that stays the same between releases, for alerts and log searches; the codes of all parts are
different. Messages say what was expected, what was found and what to do; they never hold a credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class RedriveRequestError(TerminalError, ValueError):
    """A redrive that can't be done in the way that is asked for."""

    code = "JS133"


class JobsDeadError(TerminalError):
    """Jobs that were waited for ended as dead letters."""

    code = "JS131"


class JobsCancelledError(TerminalError):
    """Jobs that were waited for were cancelled."""

    code = "JS134"


class JobsVanishedError(TerminalError):
    """Jobs that were waited for are gone, and nothing is stored that tells how they ended."""

    code = "JS135"


class JobsIncompleteError(TerminalError):
    """Fewer jobs completed than were waited for, and no more can."""

    code = "JS136"


class EventLoopError(TerminalError, RuntimeError):
    """A blocking call was made where an event loop is running."""

    code = "JS140"


class TransientError(JetStreamProviderError):
    """Calling again later may succeed."""

    code = "JS200"


class UnreachableError(TransientError, ConnectionError):
    """No server answered, or the connection went away and didn't come back in time."""

    code = "JS201"


class DeadlineError(TransientError, TimeoutError):
    """A time limit passed."""

    code = "JS202"


class RedriveError(TransientError):
    """A dead letter that should have been redriven wasn't; it stays where it was."""

    code = "JS211"


class QueueFullError(TransientError):
    """The stream is at its limit and discards what is new."""

    code = "JS220"


class ApiError(JetStreamProviderError):
    """The server's own refusal of an API request.

    :param status: HTTP-like status, such as 404
    :param err_code: JetStream's own code, such as 10059
    :param description: the server's words
    :param subject: the API subject that was asked
    :param stream: the stream that refused a message, where the answer names it
    """

    code = "JS300"

    def __init__(
        self, status: int, err_code: int, description: str, subject: str, *, stream: str | None = None
    ) -> None:
        self.status = status
        self.err_code = err_code
        self.description = description
        self.subject = subject
        self.stream = stream
        super().__init__(f"{description} (status {status}, error {err_code}) in answer to {subject}")


class WireError(TransientError, ConnectionError):
    """The connection carried something that isn't the NATS protocol, or skipped a message."""

    code = "JS503"
