"""Where settings come from besides Airflow: environment variables, and contexts of the command ``nats``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each field of the settings, and what follows NATS_ in the name of its variable.
VARIABLES: Final = {
    "servers": "URL",
    "user": "USER",
    "password": "PASSWORD",
    "password_file": "PASSWORD_FILE",
    "token": "TOKEN",
    "token_file": "TOKEN_FILE",
    "nkey_seed_secret": "NKEY_SEED_SECRET",
    "nkey_seed_file": "NKEY_SEED_FILE",
    "credentials_secret": "CREDENTIALS_SECRET",
    "credentials_file": "CREDENTIALS_FILE",
    "tls_ca_file": "CA",
    "tls_cert_file": "CERT",
    "tls_key_file": "KEY",
    "tls_server_name": "TLS_SERVER_NAME",
    "tls_handshake_first": "TLS_HANDSHAKE_FIRST",
    "js_domain": "JS_DOMAIN",
    "api_prefix": "API_PREFIX",
    "inbox_prefix": "INBOX_PREFIX",
    "timeout": "TIMEOUT",
}
_CONTEXT = "NATS_CONTEXT"

# Fields of a context file, and ours. A context names a file where its other users have one.
_CONTEXT_FIELDS: Final = {
    "url": "servers",
    "user": "user",
    "password": "password",
    "token": "token",
    "creds": "credentials_file",
    "nkey": "nkey_seed_file",
    "ca": "tls_ca_file",
    "cert": "tls_cert_file",
    "key": "tls_key_file",
    "tls_first": "tls_handshake_first",
    "jetstream_domain": "js_domain",
    "jetstream_api_prefix": "api_prefix",
    "inbox_prefix": "inbox_prefix",
}
# Fields that concern only the command itself.
_IGNORED = {"description", "color_scheme", "jetstream_event_prefix", "name"}
_LARGEST_CONTEXT = 1 << 16


def split_servers(text: str) -> tuple[str, ...]:
    """Split several addresses at their commas."""
    return tuple(server.strip() for server in text.split(",") if server.strip())


def read_environment(environment: Mapping[str, str], prefix: str = "NATS_") -> dict[str, Any]:
    """Return the fields that variables set; the context that ``NATS_CONTEXT`` names comes first.

    :raises ConnectionSettingsError: the context can't be used
    """
    found = {
        field: environment[prefix + suffix] for field, suffix in VARIABLES.items() if environment.get(prefix + suffix)
    }
    values: dict[str, Any] = {**found}
    if servers := split_servers(found.get("servers", "")):
        values["servers"] = servers
    else:
        values.pop("servers", None)
    if context := environment.get(_CONTEXT):
        return read_context(context, environment) | values
    return values


def read_context(context: str | Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that a context sets.

    :param context: its name, or the path of its file
    :raises ConnectionSettingsError: it can't be used
    """
    path = _context_path(context, environment)
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST_CONTEXT))
    except (OSError, ValueError, RecursionError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or "something else"
    else:
        problem = "" if isinstance(content, dict) else "something else"
    if problem:
        raise ConnectionSettingsError(f"expected the JSON of a nats context at {path}, found {problem}")
    given = {name: value for name, value in content.items() if value not in ("", None, False, [], {})}
    if unknown := sorted(set(given) - set(_CONTEXT_FIELDS) - _IGNORED):
        raise ConnectionSettingsError(
            f"expected a nats context of {', '.join(_CONTEXT_FIELDS)} at {path}, found {', '.join(unknown)}, which"
            " isn't supported: give such settings another way"
        )
    values: dict[str, Any] = {_CONTEXT_FIELDS[name]: value for name, value in given.items() if name in _CONTEXT_FIELDS}
    if isinstance(servers := values.get("servers"), str):
        values["servers"] = split_servers(servers)
    return values


def _context_path(context: str | Path, environment: Mapping[str, str]) -> Path:
    if isinstance(context, Path) or "/" in context or context.endswith(".json"):
        return Path(context).expanduser()
    home = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME') or '~'}/.config"
    return Path(home).expanduser() / "nats" / "context" / f"{context}.json"
