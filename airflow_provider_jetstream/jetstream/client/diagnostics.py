"""What the server's answers and a connection's failures mean, in words on which a person can act."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

NOT_ENABLED = {10039, 10076}
# What else the server answers with 503 although waiting doesn't help: no cluster, no such account, not in a cluster.
_LASTING = NOT_ENABLED | {10010, 10035, 10036}
_SERVICE_UNAVAILABLE = 503

NO_JETSTREAM = (
    "expected JetStream, found a server or account without it: start nats-server with -js (or a jetstream block in its"
    " configuration), or enable JetStream for the account"
)


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Make what an encrypted connection goes by.

    :param settings: with the authorities' file, if there is one
    :return: the context
    :raises ConnectionSettingsError: the file can't be used
    """
    try:
        return ssl.create_default_context(cafile=settings.tls_ca_file)
    except OSError as error:
        raise ConnectionSettingsError(
            f"tls_ca_file: expected a PEM file with certificates at {settings.tls_ca_file}, found:"
            f" {error.strerror or type(error).__name__}"
        ) from None


def decode_answer(data: bytes, subject: str) -> dict[str, Any]:
    """Read an answer of JetStream's API.

    :param data: the answer
    :param subject: what was asked
    :return: the answer, every field of it
    :raises ApiError: the server refused
    :raises UnreachableError: JetStream is unavailable just now
    """
    answer: dict[str, Any] = json.loads(data)
    if not (found := answer.get("error")):
        return answer
    error = ApiError(
        found.get("code", 0), found.get("err_code", 0), found.get("description", "no description"), subject
    )
    if error.status == _SERVICE_UNAVAILABLE and error.err_code not in _LASTING:
        raise unavailable(error)
    raise error


def unavailable(found: object) -> UnreachableError:
    """Say that JetStream can't answer just now.

    :param found: what came instead of an answer
    :return: the error to raise
    """
    return UnreachableError(
        f"JetStream is unavailable just now: {found}; try again, since a cluster that elects a leader is back in"
        " seconds; if it stays so, make sure that most of the cluster's servers run and reach each other"
    )


def too_old(version: tuple[int, int, int], minimum: tuple[int, int, int]) -> ServerTooOldError:
    """Say that a server is too old.

    :param version: the server's
    :param minimum: the oldest that will do
    :return: the error to raise
    """
    found, expected = (".".join(map(str, each)) for each in (version, minimum))
    return ServerTooOldError(
        f"expected nats-server {expected} or later, found {found}: older servers lose or repeat dead letters; upgrade"
        " the server"
    )


def last_report(error: Exception | None) -> str:
    """Say what a connection last told of itself.

    :param error: what it told
    :return: a clause; empty where it told nothing
    """
    return f" (the connection last reported: {error})" if error else ""


def explain(settings: ConnectionSettings, failures: list[Exception]) -> JetStreamProviderError:
    """Name the cause that a person can act on, from most to least telling; never repeat a credential.

    :param settings: where and as whom it was tried
    :param failures: what went wrong
    :return: the error to raise
    """
    where = ", ".join(settings.servers)
    ours = next((failure for failure in failures if isinstance(failure, JetStreamProviderError)), None)
    if ours:
        return ours
    texts = [str(failure) for failure in failures]
    if any("authorization" in text.lower() or "authentication" in text.lower() for text in texts):
        sent = "a token" if settings.token else "user and password" if settings.user else "none"
        return AuthenticationError(f"{where} refused the credentials: expected valid ones, found {sent}; check them")
    for failure in failures:
        if isinstance(failure, ssl.SSLError):
            reason = getattr(failure, "verify_message", None) or failure.reason or failure
            return TLSError(f"no TLS with {where}: {reason}; check tls_ca_file and the host name")
    from nats.errors import NoServersError

    causes = [_reason(failure) for failure in failures if not isinstance(failure, NoServersError)]
    reasons = "; ".join(dict.fromkeys(causes)) or f"no answer within {settings.timeout:g} s"
    return UnreachableError(f"no NATS server reached at {where}: {reasons}; check host, port and firewall")


def _reason(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    if isinstance(failure, TimeoutError):
        return "no answer in time"
    return str(failure) or type(failure).__name__
