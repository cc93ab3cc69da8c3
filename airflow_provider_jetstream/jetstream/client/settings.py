"""The settings of a connection: servers, credentials, TLS and the time limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORT = 4222

_VARIABLES = {
    "user": "NATS_USER",
    "password": "NATS_PASSWORD",
    "token": "NATS_TOKEN",
    "tls_ca_file": "NATS_CA",
}


class ConnectionSettings(BaseModel):
    """The servers and the credentials.

    :param servers: ``nats://`` or ``tls://`` addresses without credentials; ``host`` and ``host:port`` work too
    :param user: together with ``password``
    :param token: instead of user and password
    :param tls_ca_file: the file with the certificate authorities of the servers' certificates; the system's authorities
        where absent
    :param timeout: seconds for everything between the first packet and a usable JetStream
    :param name: the connection's name in the server's list
    :raises ConnectionSettingsError: if the settings contradict each other; it never repeats a value
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    servers: tuple[str, ...] = Field(default=("nats://127.0.0.1:4222",), min_length=1)
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    tls_ca_file: str | None = None
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

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.token and (self.user or self.password):
            raise ValueError("expected a token or user and password, found both: keep one")
        if (self.user is None) != (self.password is None):
            raise ValueError("expected user and password together, found only one of them")
        if len({urlsplit(server).scheme for server in self.servers}) > 1:
            raise ValueError("expected either tls:// for all servers or for none, found both")
        return self

    @property
    def encrypted(self) -> bool:
        """Whether plaintext is refused."""
        return self.servers[0].startswith("tls://") or self.tls_ca_file is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ConnectionSettings:
        """Read ``NATS_URL`` (several with commas), ``NATS_USER``, ``NATS_PASSWORD``, ``NATS_TOKEN``, ``NATS_CA``.

        :param environment: such as :data:`os.environ`; an empty variable counts as absent
        :raises ConnectionSettingsError: the settings contradict each other
        """
        values: dict[str, Any] = {
            field: environment[variable] for field, variable in _VARIABLES.items() if environment.get(variable)
        }
        if servers := [server for server in environment.get("NATS_URL", "").split(",") if server.strip()]:
            values["servers"] = tuple(servers)
        return cls(**values)


def connection_settings(values: Mapping[str, Any]) -> ConnectionSettings:
    """Validate the fields of :class:`ConnectionSettings` from an untrusted mapping.

    :raises ConnectionSettingsError: names the fields and what was expected, and never repeats a value
    """
    return ConnectionSettings(**values)


def _problems(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors(include_input=False, include_url=False, include_context=False)
    ]


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
            f"expected host:port with a port from 1 to 65535, and brackets around IPv6, found {server!r}"
        ) from None
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"expected a nats:// or tls:// address, found the scheme {parts.scheme!r}")
    if not host or port == 0 or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"expected nothing but host and port in the address, found {server!r}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_PORT}"


@dataclass(frozen=True)
class SocketSettings:
    """The settings of a blocking connection, which supports more kinds of credentials.

    :param nkey_seed: the seed of a user's key
    :param credentials: the content of a credentials file
    :param tls_cert_file: the file with the client's certificate
    :param tls_key_file: the file with its key
    """

    connection: ConnectionSettings
    nkey_seed: SecretStr | None = None
    credentials: SecretStr | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
