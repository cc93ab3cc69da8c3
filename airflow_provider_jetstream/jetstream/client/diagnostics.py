"""Turns the server's refusals and a connection's failures into errors that say what to do."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.denials import authentication_error, connection_error, is_refusal
from airflow_provider_jetstream.jetstream.client.tls import tls_problem
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    ServerTooOldError,
    TerminalError,
    TLSError,
    UnreachableError,
    WireError,
)
from airflow_provider_jetstream.jetstream.limits import INTEGER
from airflow_provider_jetstream.jetstream.line_text import one_line

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


def decode_answer(data: bytes, subject: str) -> dict[str, Any]:
    """Decode an answer of JetStream's API, every field of it.

    :param subject: the API subject of the request
    :raises ApiError: the server refused
    :raises UnreachableError: JetStream is unavailable just now
    :raises WireError: the answer isn't one of JetStream's API
    """
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    refusal = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(refusal or {}, dict):
        raise WireError(f"expected an answer of JetStream's API to {subject}, found {data[:40]!r}")
    if not refusal:
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
    codes = refusal.get("code", 0), refusal.get("err_code", 0)
    status, code = (code if isinstance(code, int) and abs(code) < INTEGER else 0 for code in codes)
    description = one_line(str(refusal.get("description", "")))
    return ApiError(status, code, description or "no description", subject, stream=stream)


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
    own = [failure for failure in failures if isinstance(failure, JetStreamProviderError)]
    if terminal := next((failure for failure in own if isinstance(failure, TerminalError)), None):
        return terminal
    if refused := next((text for text in map(str, failures) if is_refusal(text)), None):
        return authentication_error(where, settings.way, refused)
    if failed := next((failure for failure in failures if isinstance(failure, ssl.SSLError)), None):
        return TLSError(f"no TLS with {where}: {tls_problem(failed)}")
    if said := next((failure for failure in own if not isinstance(failure, WireError)), None):
        return said
    ended = [error for failure in failures if (error := connection_error(where, str(failure)))]
    if ended:
        # One of several servers may be about to take it.
        return next((error for error in ended if not isinstance(error, TerminalError)), ended[0])
    reasons = "; ".join(dict.fromkeys(map(_reason, failures))) or f"no answer within {settings.timeout:g} s"
    return UnreachableError(f"no NATS server reached at {where}: {reasons}; check host, port and firewall")


def _reason(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror
    if isinstance(failure, TimeoutError):
        return "no answer in time"
    return str(failure) or type(failure).__name__
