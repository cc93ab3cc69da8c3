"""The errors of the core as one tree, and the base classes of every other error of this package.

::

    JetStreamProviderError
    ├── TerminalError                      the same call fails again
    │   ├── ArgumentError                  also ValueError
    │   ├── ConnectionSettingsError        also ValueError
    │   ├── AuthenticationError            also PermissionError
    │   ├── TLSError                       also ConnectionError
    │   ├── JetStreamDisabledError
    │   ├── ServerTooOldError
    │   ├── PermissionDeniedError          also PermissionError
    │   │   └── SubscriptionRefusedError
    │   ├── QueueDeclarationError          also ValueError
    │   ├── ProvisioningError
    │   │   └── DriftError
    │   ├── NotFoundError                  also LookupError
    │   ├── UnsuitableQueueError           also ValueError
    │   ├── JobError                       also ValueError
    │   │   ├── JobNotSerializableError    also TypeError
    │   │   ├── JobTooLargeError
    │   │   └── WrongStreamError
    │   ├── DeadLetterGoneError            also LookupError
    │   ├── SelectionError                 also ValueError
    │   ├── RedriveRequestError            also ValueError
    │   ├── JobsDeadError
    │   ├── JobsCancelledError
    │   ├── JobsUnaccountedError
    │   ├── JobsIncompleteError
    │   ├── QueueGoneError                 also LookupError
    │   ├── JobReportsGoneError            also LookupError
    │   └── EventLoopError                 also RuntimeError
    ├── TransientError                     the same call may succeed later
    │   ├── UnreachableError               also ConnectionError
    │   ├── DeadlineError                  also TimeoutError
    │   ├── WireError                      also ConnectionError
    │   ├── RedriveError
    │   │   └── CopyTooLargeError
    │   ├── LeaseHeldError
    │   ├── LeaseLostError
    │   ├── QueueFullError
    │   └── JobsStalledError
    ├── PublishError                       some jobs aren't known to be stored; names them
    │   ├── PublishRefusedError            also TerminalError
    │   └── PublishIncompleteError         also TransientError
    └── ApiError                           the server's own refusal, with its codes

The three publish errors carry a report and are defined beside it, in
:mod:`airflow_provider_jetstream.jetstream.publishing.report`. An error that only the worker or only Spark raises is
drawn in the ``errors`` module of that part.

Each class has a ``code`` that stays the same between releases, for alerts and log searches; no two classes share one.
Messages say what was expected, what was found and what to do; they never contain a credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.needed_permissions import roles_needing

if TYPE_CHECKING:
    from collections.abc import Sequence


class JetStreamProviderError(Exception):
    """The root of every error of this package."""

    code: ClassVar[str] = "JS000"


class TerminalError(JetStreamProviderError):
    """Calling again with the same input fails again."""

    code = "JS100"


class ArgumentError(TerminalError, ValueError):
    """An argument has a value that can't be used, or not together with the others."""

    code = "JS115"


class ConnectionSettingsError(TerminalError, ValueError):
    """The settings of a connection are invalid or contradict each other."""

    code = "JS101"


class AuthenticationError(TerminalError, PermissionError):
    """The server refused the credentials."""

    code = "JS102"


class TLSError(TerminalError, ConnectionError):
    """No encrypted connection could be made; plaintext is never used in its place."""

    code = "JS103"


class JetStreamDisabledError(TerminalError):
    """The server, or the account on it, has no JetStream."""

    code = "JS104"


class ServerTooOldError(TerminalError):
    """The server lacks a feature without which jobs or dead letters would be lost."""

    code = "JS105"


class PermissionDeniedError(TerminalError, PermissionError):
    """The server's permissions don't let this user publish to, or subscribe to, a subject.

    ``roles`` are the roles whose policies allow it, where the subject is one of this package's.

    :param action: ``publish`` or ``subscribe``
    :param subject: the subject that was refused
    :param user: who asked, in words
    :param purpose: what the subject was needed for, such as the request whose answers were to arrive there
    """

    code = "JS106"

    def __init__(self, action: str, subject: str, user: str, purpose: str = "") -> None:
        self.action, self.subject, self.user = action, subject, user
        self.roles = roles_needing(action, subject)
        # As the server reported it: any text, of a server that may be anybody's.
        shown = one_line(subject) or repr(subject)
        whose = "for the user's role"
        if self.roles:
            whose = f"of the role{'s' if len(self.roles) > 1 else ''} {', '.join(self.roles)}"
        super().__init__(
            f"the server doesn't let {user} {action} to {shown}{purpose and f' ({purpose})'}: expected that"
            f" permission {whose}, found none; allow {action} on it (`jetstream-queue permissions` prints a role's"
            " policy), or connect as a user of another role"
        )

    def again(self, purpose: str = "") -> PermissionDeniedError:
        """Return another error about the same, since each has a traceback of its own.

        :param purpose: what the subject was needed for
        """
        return PermissionDeniedError(self.action, self.subject, self.user, purpose)


def same_error(error: JetStreamProviderError) -> JetStreamProviderError:
    """Return another error that says the same, since each has a traceback of its own."""
    return error.again() if isinstance(error, PermissionDeniedError) else type(error)(str(error))


class SubscriptionRefusedError(PermissionDeniedError):
    """The server doesn't take a subscription, whatever the user's permissions: it has too many, or is malformed.

    :param subject: the subject that was refused
    :param user: who asked, in words
    :param reason: what the server said
    :param purpose: what the subject was needed for
    """

    code = "JS107"

    def __init__(self, subject: str, user: str, reason: str, purpose: str = "") -> None:
        super().__init__("subscribe", subject, user, purpose)
        self.reason = reason
        shown = one_line(subject) or repr(subject)
        text = (
            f"the server refuses the subscription of {user} to {shown}{purpose and f' ({purpose})'}:"
            f" {one_line(reason)}; raise that limit (max_subscriptions or max_sub_tokens of the server, or that of the"
            " user or account), or use several connections"
        )
        self.args = (text,)

    def again(self, purpose: str = "") -> SubscriptionRefusedError:
        """Return another error about the same.

        :param purpose: what the subject was needed for
        """
        return SubscriptionRefusedError(self.subject, self.user, self.reason, purpose)


class QueueDeclarationError(TerminalError, ValueError):
    """A declaration that the server would refuse, or that would lose jobs.

    :param name: the name of what is declared, or the path of its file
    :param problems: all problems, one sentence each
    :param kind: what is declared
    """

    code = "JS110"

    def __init__(self, name: str, problems: Sequence[str], kind: str = "work queue") -> None:
        # A declaration may have text that can't be written to a log.
        self.problems = tuple(problem.encode(errors="replace").decode() for problem in problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"the declaration of {kind} {name!r} can't be used:{lines}")


class ProvisioningError(TerminalError):
    """The server refused a stream or a consumer."""

    code = "JS111"


class DriftError(ProvisioningError):
    """A stream or consumer differs from its declaration in a field that the server can't update."""

    code = "JS112"


class NotFoundError(TerminalError, LookupError):
    """A stream or consumer doesn't exist."""

    code = "JS113"


class UnsuitableQueueError(TerminalError, ValueError):
    """A queue is configured so that its dead letters, or the ends of its jobs, can't be told from live jobs."""

    code = "JS114"


class JobError(TerminalError, ValueError):
    """A job can't be published as it is."""

    code = "JS120"


class WrongStreamError(JobError):
    """Another stream than the queue's has stored a job."""

    code = "JS123"


class JobNotSerializableError(JobError, TypeError):
    """A job's body is neither bytes nor text nor JSON."""

    code = "JS121"


class JobTooLargeError(JobError):
    """A job exceeds the size that its stream or server accepts."""

    code = "JS122"


class JobNotWaitingError(TerminalError, ValueError):
    """A job isn't proved to wait for its next delivery, so that it can't be retried or given up now."""

    code = "JS124"


class DeadLetterGoneError(TerminalError, LookupError):
    """The job of a dead letter is no longer stored."""

    code = "JS130"


class SelectionError(TerminalError, ValueError):
    """A selection of dead letters is invalid."""

    code = "JS132"


class RedriveRequestError(TerminalError, ValueError):
    """A redrive can't be done as requested."""

    code = "JS133"


class JobsDeadError(TerminalError):
    """Awaited jobs became dead letters."""

    code = "JS131"


class JobsCancelledError(TerminalError):
    """Awaited jobs were cancelled."""

    code = "JS134"


class JobsUnaccountedError(TerminalError):
    """Awaited jobs are gone, and no stored event says how they ended."""

    code = "JS135"


class JobsIncompleteError(TerminalError):
    """Fewer jobs completed than were awaited, and no more of them can."""

    code = "JS136"


class QueueGoneError(TerminalError, LookupError):
    """The queue of awaited jobs was deleted, or deleted and created anew, so how they ended can't be known."""

    code = "JS137"


class JobReportsGoneError(TerminalError, LookupError):
    """The reports on a task's jobs aren't stored any more."""

    code = "JS138"


class EventLoopError(TerminalError, RuntimeError):
    """A blocking call was made where an event loop is running."""

    code = "JS140"


class TransientError(JetStreamProviderError):
    """Calling again later may succeed."""

    code = "JS200"


class UnreachableError(TransientError, ConnectionError):
    """No server answered, or the connection was lost and not restored in time."""

    code = "JS201"


class DeadlineError(TransientError, TimeoutError):
    """A time limit passed."""

    code = "JS202"


class RedriveError(TransientError):
    """A dead letter wasn't redriven; it stays as it was."""

    code = "JS211"


class CopyTooLargeError(RedriveError):
    """The new job of a dead letter is larger than the queue or the server allows."""

    code = "JS212"


class LeaseHeldError(TransientError):
    """Another operation changes the dead letters of the queue at the moment."""

    code = "JS213"


class LeaseLostError(TransientError):
    """The operation may not change the dead letters of the queue any more; what it did so far is done."""

    code = "JS214"


class QueueFullError(TransientError):
    """The stream is at its limit and discards new messages."""

    code = "JS220"


class JobsStalledError(TransientError):
    """Awaited jobs are stored, and no consumer delivers them."""

    code = "JS221"


class ApiError(JetStreamProviderError):
    """The server's own refusal of an API request.

    :param status: HTTP-like status, such as 404
    :param err_code: JetStream's own code, such as 10059
    :param description: the server's text
    :param subject: the subject of the request
    :param stream: the stream that refused to store a message, where the answer names it
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
    """The bytes received don't follow the NATS protocol, or a message is missing."""

    code = "JS503"
