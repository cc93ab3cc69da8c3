"""Turns the server's refusals and a connection's failures into errors that say what to do."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    NotFoundError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

_NO_CONSUMER = 10014
_NO_STREAM = 10059
NOT_ENABLED = {10039, 10076}
# Other errors with status 503 that don't pass: no cluster, no such account, not in a cluster.
_LASTING = NOT_ENABLED | {10010, 10035, 10036}
_SERVICE_UNAVAILABLE = 503

NO_JETSTREAM = (
    "expected JetStream, found a server or account without it: start nats-server with -js (or a jetstream block in its"
    " configuration), or enable JetStream for the account"
)


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Create the TLS context of an encrypted connection.

    :raises ConnectionSettingsError: the file of certificate authorities can't be used
    """
    try:
        return ssl.create_default_context(cafile=settings.tls_ca_file)
    except OSError as error:
        raise ConnectionSettingsError(
            f"tls_ca_file: expected a PEM file with certificates at {settings.tls_ca_file}, found:"
            f" {error.strerror or type(error).__name__}"
        ) from None


def decode_answer(data: bytes, subject: str) -> dict[str, Any]:
    """Decode an answer of JetStream's API, every field of it.

    :param subject: the API subject of the request
    :raises ApiError: the server refused
    :raises UnreachableError: JetStream is unavailable just now
    """
    answer: dict[str, Any] = json.loads(data)
    if not (refusal := answer.get("error")):
        return answer
    error = api_error(refusal, subject)
    if error.status == _SERVICE_UNAVAILABLE and error.err_code not in _LASTING:
        raise unavailable(error)
    raise error


def api_error(refusal: Mapping[str, Any], subject: str, *, stream: str | None = None) -> ApiError:
    """Make an error of the field ``error`` of an answer.

    :param subject: the subject of the request
    :param stream: the stream that refused to store a message
    """
    status, code = int(refusal.get("code", 0)), int(refusal.get("err_code", 0))
    return ApiError(status, code, str(refusal.get("description", "no description")), subject, stream=stream)


def not_found(error: ApiError, what: str) -> Exception:
    """Return a :class:`NotFoundError` where the server's refusal means that; otherwise the refusal itself.

    :param what: the stream or consumer of the request, as text
    """
    if error.err_code in (_NO_STREAM, _NO_CONSUMER):
        return NotFoundError(f"expected {what} on the server, found none: provision the queue first, or check the name")
    return error


def unavailable(cause: object) -> UnreachableError:
    """Return the error for a JetStream that can't answer just now."""
    return UnreachableError(
        f"JetStream is unavailable just now: {cause}; try again, since a cluster that elects a leader is back in"
        " seconds; if it stays so, make sure that most of the cluster's servers run and reach each other"
    )


def too_old(version: tuple[int, int, int], minimum: tuple[int, int, int]) -> ServerTooOldError:
    """Return the error for a server that is older than the minimum."""
    found, expected = (".".join(map(str, numbers)) for numbers in (version, minimum))
    return ServerTooOldError(
        f"expected nats-server {expected} or later, found {found}: older servers lose or repeat dead letters; upgrade"
        " the server"
    )


def last_report(error: Exception | None) -> str:
    """Return a clause with what a connection last reported about itself; empty where it reported nothing."""
    return f" (the connection last reported: {error})" if error else ""


def explain(settings: ConnectionSettings, failures: list[Exception]) -> JetStreamProviderError:
    """Return the error for a failed attempt to connect: the most specific cause, and never a credential."""
    where = ", ".join(settings.servers)
    if own := next((failure for failure in failures if isinstance(failure, JetStreamProviderError)), None):
        return own
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
