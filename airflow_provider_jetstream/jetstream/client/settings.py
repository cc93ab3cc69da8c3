"""The settings of a connection: servers, credentials, TLS, names in JetStream, and the time limit.

Besides Airflow, they are read from environment variables, and from contexts of the command ``nats``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError
from airflow_provider_jetstream.jetstream.line_text import shown_field

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


DEFAULT_PORT = 4222

# The ways to authenticate with a secret, and the fields of each.
_WAYS: Final = {
    "user and password": ("user", "password", "password_file"),
    "a token": ("token", "token_file"),
    "an nkey seed": ("nkey_seed_secret", "nkey_seed_file"),
    "credentials": ("credentials_secret", "credentials_file"),
}
_TLS_FIELDS: Final = ("tls_ca_file", "tls_cert_file", "tls_server_name", "tls_handshake_first")
_LONGEST_PREFIX = 200
# What isn't a part of an address may be a secret, as in user:password and ?token=…
_NO_PORT = re.compile(r"(?<=:)(?!//|-?\d{1,5}(?:[:/?#]|$))[^:/?#]+")
_BEHIND_ADDRESS = re.compile(r"(?<=[?#]).+|(?<=[^:/]/).+", re.DOTALL)
_LONGEST_ADDRESS = 200
_DOMAIN = re.compile(r"[A-Za-z0-9_-]+")


class ConnectionSettings(BaseModel):
    """The servers and the credentials, under the same names in Airflow, in the environment and in Spark.

    A field whose name ends with ``_file`` is a path that is read whenever a connection is made or restored, so that a
    file may be replaced while a connection is open.

    :param servers: ``nats://`` or ``tls://`` addresses without credentials; ``host`` and ``host:port`` work too
    :param user: with ``password`` or ``password_file``; with an empty password where both are absent
    :param password: the password of ``user``
    :param password_file: the file with it
    :param token: instead of user and password; or ``token_file``
    :param token_file: the file with the token
    :param nkey_seed_secret: the seed (``SU…``) of a user's key; or ``nkey_seed_file``
    :param nkey_seed_file: the file with the seed
    :param credentials_secret: the content of a credentials file with a JWT and a seed; or ``credentials_file``
    :param credentials_file: that file, as ``nsc generate creds`` writes it
    :param tls_ca_file: the file with the certificate authorities of the servers' certificates; the system's authorities
        where absent
    :param tls_cert_file: the file with the client's certificate, together with ``tls_key_file``
    :param tls_key_file: the file with the key of the client's certificate, not encrypted
    :param tls_server_name: the name in the servers' certificates, where it isn't that of the address
    :param tls_handshake_first: whether TLS begins before the server's first line, as servers with ``handshake_first``
        want it
    :param js_domain: the JetStream domain of the queues; the server's own where absent
    :param api_prefix: what the subjects of JetStream's API begin with, instead of a domain
    :param inbox_prefix: what the subjects begin with on which answers arrive. A prefix of its own, and the permission
        to subscribe to nothing else, keeps the answers of a user from others of the same account
    :param timeout: seconds for everything between the first packet and a usable JetStream
    :param name: the connection's name in the server's list
    :raises ConnectionSettingsError: if the settings contradict each other; it never repeats a value
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    servers: tuple[str, ...] = Field(default=("nats://127.0.0.1:4222",), min_length=1)
    user: str | None = None
    password: SecretStr | None = None
    password_file: str | None = None
    token: SecretStr | None = None
    token_file: str | None = None
    nkey_seed_secret: SecretStr | None = None
    nkey_seed_file: str | None = None
    credentials_secret: SecretStr | None = None
    credentials_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_server_name: str | None = None
    tls_handshake_first: bool = False
    js_domain: str | None = None
    api_prefix: str | None = None
    inbox_prefix: str = "_INBOX"
    timeout: float = Field(default=10.0, gt=0, le=300)
    name: str = "airflow-provider-jetstream"

    def __init__(self, **values: Any) -> None:
        problems: list[str] = []
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = _problems(error)
        # Outside the handler: pydantic's error contains the values and would stay reachable as the context.
        if problems:
            raise ConnectionSettingsError(f"the NATS connection can't be used: {'; '.join(problems)}")

    @field_validator("servers", mode="after")
    @classmethod
    def _normalise_servers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_normalise_server(server) for server in servers)

    @field_validator("js_domain", mode="after")
    @classmethod
    def _check_domain(cls, domain: str | None) -> str | None:
        if domain is not None and not _DOMAIN.fullmatch(domain):
            raise ValueError("expected a JetStream domain of letters, digits, - and _, found other characters")
        return domain

    @field_validator("api_prefix", "inbox_prefix", mode="after")
    @classmethod
    def _check_prefix(cls, prefix: str | None) -> str | None:
        if prefix is None:
            return None
        prefix = prefix.removesuffix(".")
        problem = subject_problem(prefix, wildcards=False) or (len(prefix) > _LONGEST_PREFIX and "it is too long")
        if problem:
            raise ValueError(
                "expected what subjects begin with, such as _INBOX_orders, without wildcards, found something else:"
                f" {problem}"
            )
        return prefix

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        found = [way for way, fields in _WAYS.items() if any(getattr(self, field) is not None for field in fields)]
        if len(found) > 1:
            raise ValueError(f"expected one of {', '.join(_WAYS)}, found {' and '.join(found)}: keep one")
        for secret, file in (fields[-2:] for fields in _WAYS.values()):
            if getattr(self, secret) is not None and getattr(self, file) is not None:
                raise ValueError(f"expected {secret} or {file}, found both: keep one")
        if self.user is None and (self.password is not None or self.password_file is not None):
            raise ValueError("expected a user with the password, found none")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("expected tls_cert_file and tls_key_file together, found only one of them")
        if self.js_domain is not None and self.api_prefix is not None:
            raise ValueError("expected js_domain or api_prefix, found both: keep one")
        if len({urlsplit(server).scheme for server in self.servers}) > 1:
            raise ValueError("expected either tls:// for all servers or for none, found both")
        return self

    @property
    def encrypted(self) -> bool:
        """Whether plaintext is refused."""
        return self.servers[0].startswith("tls://") or any(getattr(self, field) for field in _TLS_FIELDS)

    @property
    def jetstream_api(self) -> str:
        """What the subjects of JetStream's API begin with."""
        return self.api_prefix or (f"$JS.{self.js_domain}.API" if self.js_domain else "$JS.API")

    @property
    def way(self) -> str:
        """The kind of credentials, in words; ``none`` without credentials."""
        for way, fields in _WAYS.items():
            if any(getattr(self, field) is not None for field in fields):
                return way
        return "a client certificate" if self.tls_cert_file else "none"

    @property
    def client(self) -> str:
        """Who the client is, in words and without a secret."""
        if self.user is not None:
            return f"user {self.user!r}"
        return "a client without credentials" if self.way == "none" else f"the client with {self.way}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ConnectionSettings:
        """Read ``NATS_URL`` (several with commas), ``NATS_USER``, ``NATS_CA``… (docs/connection.md lists them all).

        ``NATS_CONTEXT`` names a context of the command ``nats`` whose settings hold where no variable differs.

        :param environment: such as :data:`os.environ`; an empty variable counts as absent
        :raises ConnectionSettingsError: the settings contradict each other
        """
        return cls(**read_environment(environment))

    @classmethod
    def from_context(cls, context: str | Path, environment: Mapping[str, str] | None = None) -> ConnectionSettings:
        """Read a context of the command ``nats``.

        :param context: its name, or the path of its file
        :param environment: says where contexts are, by ``XDG_CONFIG_HOME`` or ``HOME``
        :raises ConnectionSettingsError: there is no such context, or it has settings that aren't supported
        """
        return cls(**read_context(context, environment or {}))


def connection_settings(values: Mapping[str, Any]) -> ConnectionSettings:
    """Validate the fields of :class:`ConnectionSettings` from an untrusted mapping.

    :param values: the fields by name
    :raises ConnectionSettingsError: names the fields and what was expected, and never repeats a value
    """
    return ConnectionSettings(**values)


def _problems(error: ValidationError) -> list[str]:
    return [
        f"{shown_field(problem['loc']) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors(include_input=False, include_url=False, include_context=False)
    ]


def _shown_address(text: str) -> str:
    return repr(_NO_PORT.sub("…", _BEHIND_ADDRESS.sub("…", text))[:_LONGEST_ADDRESS])


def _normalise_server(server: str) -> str:
    text = server.strip()
    # Before the address is parsed: the text before the @ may be a secret, and parsers repeat it in their errors.
    if "@" in text:
        raise ValueError("expected an address without credentials: give user, password or token as settings")
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(
            f"expected host:port with a port from 1 to 65535, and brackets around IPv6, found {_shown_address(server)}"
        ) from None
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"expected a nats:// or tls:// address, found the scheme {parts.scheme!r}")
    if not host or port == 0 or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"expected nothing but host and port in the address, found {_shown_address(server)}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_PORT}"
