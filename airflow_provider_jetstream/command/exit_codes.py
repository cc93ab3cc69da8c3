"""The exit codes of the command, and which error has which."""

from __future__ import annotations

from enum import IntEnum

from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    AuthenticationError,
    ConnectionSettingsError,
    DeadLetterGoneError,
    DeadlineError,
    JetStreamDisabledError,
    JetStreamProviderError,
    JobError,
    LeaseHeldError,
    LeaseLostError,
    NotFoundError,
    PermissionDeniedError,
    QueueDeclarationError,
    RedriveRequestError,
    SelectionError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
    WireError,
)


class ExitCode(IntEnum):
    """The exit codes that scripts rely on; docs/command-line.md has the table."""

    DONE = 0
    """Everything was done."""
    FINDINGS = 1
    """Done in part, or something was found: a warning, a change to make, a letter that stays dead, no such job."""
    USAGE = 2
    """Arguments, settings, a file or a declaration can't be used."""
    CONNECTION = 3
    """No server answers, or not with the JetStream that is needed."""
    DENIED = 4
    """The server refused the credentials, or a permission is missing."""
    NOT_FOUND = 5
    """The stream, the dead letter or the redrive doesn't exist."""
    BUSY = 6
    """Another operation changes the queue's letters: try again later."""
    FAILED = 7
    """Anything else that went wrong."""
    INTERRUPTED = 130
    """By Ctrl-C or SIGTERM; a redrive that was stopped can be resumed."""
    CLOSED_PIPE = 141
    """Whoever reads the output reads no more."""


# The first that an error is an instance of counts.
_CODES: tuple[tuple[tuple[type[JetStreamProviderError], ...], ExitCode], ...] = (
    ((AuthenticationError, PermissionDeniedError), ExitCode.DENIED),
    ((NotFoundError, DeadLetterGoneError), ExitCode.NOT_FOUND),
    ((LeaseHeldError, LeaseLostError), ExitCode.BUSY),
    (
        (
            *(ArgumentError, ConnectionSettingsError, QueueDeclarationError, SelectionError),
            *(RedriveRequestError, JobError),
        ),
        ExitCode.USAGE,
    ),
    (
        (UnreachableError, DeadlineError, TLSError, WireError, JetStreamDisabledError, ServerTooOldError),
        ExitCode.CONNECTION,
    ),
)


def exit_code_of(error: JetStreamProviderError) -> ExitCode:
    """Return the exit code that an error has."""
    return next((code for classes, code in _CODES if isinstance(error, classes)), ExitCode.FAILED)
