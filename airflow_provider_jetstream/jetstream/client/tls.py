"""The TLS context of an encrypted connection."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.denials import last_report_of
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError, TLSError
from airflow_provider_jetstream.jetstream.line_text import shown_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

# OpenSSL's names for an answer that isn't TLS.
_PLAINTEXT: Final = frozenset({"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})
_LISTEN_SECONDS: Final = 1.0
_MOST_HEARD: Final = 16_384


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Create the TLS context of an encrypted connection, with the client's certificate where there is one.

    :raises ConnectionSettingsError: a file can't be used
    """
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
    except OSError as error:
        problem = error.strerror or type(error).__name__
        raise ConnectionSettingsError(
            f"tls_ca_file: expected a PEM file with certificates at {shown_path(settings.tls_ca_file or '')},"
            f" found: {problem}"
        ) from None
    if settings.tls_cert_file:
        try:
            # Without a password, OpenSSL would ask for that of an encrypted key on the terminal, and wait.
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password="")
        except (OSError, ValueError) as error:
            problem = (getattr(error, "strerror", None)) or type(error).__name__
            raise ConnectionSettingsError(
                f"tls_cert_file, tls_key_file: expected a PEM file with a certificate at"
                f" {shown_path(settings.tls_cert_file)} and one with its key, not encrypted, at"
                f" {shown_path(settings.tls_key_file or '')}, found: {problem}"
            ) from None
    return context


def require_certificate(settings: ConnectionSettings, server_info: Mapping[str, Any]) -> None:
    """Refuse to connect without a certificate to a server that wants one.

    The server itself says so only after the handshake, and often the connection is gone before that arrives.

    :raises TLSError: the settings have no certificate
    """
    if settings.encrypted and server_info.get("tls_verify") and not settings.tls_cert_file:
        raise TLSError(
            "expected a client certificate, as the server wants one, found none: set tls_cert_file and tls_key_file"
        )


def tls_problem(error: OSError) -> str:
    """Return why there is no TLS with a server, and what to check."""
    reason = str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error.strerror or error)
    # The server says so only after the handshake, with an alert.
    if "certificate required" in str(error).lower().replace("_", " "):
        return f"{reason}; the server expects a client certificate: set tls_cert_file and tls_key_file"
    if "alert" in str(error).lower():
        return f"{reason}; check tls_cert_file"
    return f"{reason}; check tls_ca_file and the host name"


def plaintext_report(host: str, port: int, error: ssl.SSLError) -> str:
    """Return the text of the ``-ERR`` with which a server refuses a connection before TLS; empty without one.

    A server that has as many connections as it takes says so in plaintext, and OpenSSL keeps of that only that it isn't
    TLS. So the server is asked once more, and nothing is sent to it.

    :param error: why there is no TLS with the server
    """
    if error.reason not in _PLAINTEXT:
        return ""
    said, deadline = b"", time.monotonic() + _LISTEN_SECONDS
    with suppress(OSError), socket.create_connection((host, port), _LISTEN_SECONDS) as connection:
        while not last_report_of(said) and len(said) < _MOST_HEARD and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(_MOST_HEARD)):
                break
            said += part
    return last_report_of(said)
