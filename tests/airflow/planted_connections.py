"""Connections with a secret in every field: some that work, and some that fail in each way in which one can."""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.authentication import make_pair, operator_mode
from testbed.certificates import make_tls
from testbed.nats_server import NatsServer
from testbed.planted_secrets import planted, planted_seed_bytes
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GOOD = ("planted_nkey", "planted_credentials", "planted_file")


@dataclass(frozen=True)
class PlantedConnections:
    """Connections by their ids, as Airflow takes them in JSON form, and the servers of those that work."""

    connections: dict[str, dict[str, Any]]
    servers: tuple[NatsServer, ...]

    def failing(self) -> list[str]:
        """Return the ids of the connections that fail."""
        return [name for name in self.connections if name not in GOOD]


@contextmanager
def planted_connections(folder: Path) -> Iterator[PlantedConnections]:
    """Start the servers, one of which never answers."""
    pair = make_pair(key=planted_seed_bytes())
    mode, other = (operator_mode(user=make_pair(key=planted_seed_bytes())) for _ in range(2))
    password_file = folder / "password"
    password_file.write_text(planted("password-in-file", plain=True))
    tls = make_tls(folder / "tls")
    with ExitStack() as stack:
        by_key, by_credentials, by_password, encrypted = (
            stack.enter_context(server)
            for server in (
                NatsServer(config=f"authorization {{ users: [{{nkey: {pair.key}}}] }}"),
                NatsServer(config=mode.config),
                NatsServer(user="u", password=password_file.read_text()),
                NatsServer(tls=tls, user="u", password=planted("password-of-tls-server", plain=True)),
            )
        )
        silent = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        silent_port = silent.getsockname()[1]

        def to(port: int, **extra: Any) -> dict[str, Any]:
            return {"conn_type": "nats", "host": LOOPBACK, "port": port, "extra": {"timeout": 2, **extra}}

        def login(port: int, name: str, **extra: Any) -> dict[str, Any]:
            return to(port, **extra) | {"login": "u", "password": planted(name)}

        free = free_port()
        host = {"conn_type": "nats", "login": "u", "password": planted("password-beside-host")}
        content = other.credentials
        connections: dict[str, dict[str, Any]] = {
            "planted_nkey": to(by_key.port, nkey_seed_secret=pair.seed, timeout=10),
            "planted_credentials": to(by_credentials.port, credentials_secret=mode.credentials, timeout=10),
            "planted_file": to(by_password.port, password_file=str(password_file), timeout=10) | {"login": "u"},
            # Refused by the server.
            "planted_wrong_password": login(by_password.port, "wrong-password"),
            "planted_wrong_token": to(by_password.port, token=planted("wrong-token")),
            "planted_wrong_seed": to(by_key.port, nkey_seed_secret=make_pair(key=planted_seed_bytes()).seed),
            "planted_wrong_credentials": to(by_credentials.port, credentials_secret=content),
            # Not reached, not answered, not encrypted as asked for.
            "planted_refused": login(free, "refused"),
            "planted_silent": login(silent_port, "silent"),
            "planted_unknown_authority": login(encrypted.port, "unknown-authority") | {"host": f"tls://{LOOPBACK}"},
            "planted_plaintext": login(by_password.port, "plaintext", tls_handshake_first=True),
            # In fields where no secret belongs.
            "planted_in_address": {**host, "host": f"nats://u:{planted('in-address')}@{LOOPBACK}"},
            "planted_without_at": {**host, "host": f"nats://u:{planted('without-at', plain=True)}"},
            "planted_in_query": {**host, "host": f"nats://{LOOPBACK}?token={planted('in-query')}"},
            "planted_in_path": {**host, "host": f"{LOOPBACK}/{planted('in-path')}"},
            "planted_schema": {**to(free), "schema": planted("schema")},
            "planted_password_as_path": {**to(free, password_file=planted("as-path")), "login": "u"},
            "planted_seed_as_path": to(free, nkey_seed_file=pair.seed),
            "planted_credentials_as_path": to(free, credentials_file=content),
            "planted_authority_as_path": to(free, tls_ca_file=planted("authority")),
            "planted_key_as_path": to(free, tls_cert_file=str(tls.client_cert), tls_key_file=planted("key")),
            "planted_no_seed": to(by_key.port, nkey_seed_secret=f"SU{planted('no-seed')}"),
            "planted_no_credentials": to(by_credentials.port, credentials_secret=planted("no-credentials")),
            "planted_unknown_extra": to(free, tls_key_password=planted("unknown"), auth={"password": planted("deep")}),
            "planted_wrong_types": to(free, token={"x": planted("nested")}, tls_handshake_first=planted("no-bool")),
            "planted_timeout": to(free) | {"extra": {"timeout": planted("timeout")}},
            "planted_domain": to(free, js_domain=planted("domain")),
            "planted_api_prefix": to(free, api_prefix=planted("api-prefix")),
            "planted_inbox_prefix": to(free, inbox_prefix=planted("inbox-prefix")),
            "planted_two_ways": login(free, "two-ways", token=planted("second-way")),
        }
        yield PlantedConnections(connections, (by_key, by_credentials, by_password))
