"""Servers that want a proof of who is asking, in each way that NATS knows, and the settings that give it."""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

from testbed.certificates import make_tls
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK

SECRET = "pl4nted-s3cret"  # noqa: S105


@dataclass(frozen=True)
class NkeyPair:
    """The key of an operator, an account or a user."""

    seed: str
    key: str
    pair: Any


def make_pair(kind: int = nkeys.PREFIX_BYTE_USER, *, key: bytes | None = None) -> NkeyPair:
    """Make a new key, of these 32 bytes or of random ones."""
    seed = bytes(nkeys.encode_seed(key or os.urandom(32), kind))
    pair = nkeys.from_seed(bytearray(seed))
    return NkeyPair(seed.decode(), pair.public_key.decode(), pair)


def make_jwt(issuer: NkeyPair, subject: NkeyPair, kind: str, claims: dict[str, Any], expires: int = 0) -> str:
    """Make a JWT as `nsc` does.

    :param expires: when, in seconds since 1970; 0 for never
    """

    def encode(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")

    nats = {"type": kind, "version": 2, **claims}
    body = {"jti": "test", "iat": 1, "iss": issuer.key, "sub": subject.key, "nats": nats}
    if expires:
        body["exp"] = expires
    signed = f"{encode({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{encode(body)}"
    signature = base64.urlsafe_b64encode(issuer.pair.sign(signed.encode())).decode().rstrip("=")
    return f"{signed}.{signature}"


@dataclass(frozen=True)
class OperatorMode:
    """A server's configuration in operator mode with a memory resolver, and the credentials of one user."""

    config: str
    credentials: str


def operator_mode(user: NkeyPair | None = None, expires: int = 0) -> OperatorMode:
    """Make an operator, a system account, an account with JetStream, and a user, with this key or a new one.

    :param expires: when the user does, in seconds since 1970; 0 for never
    """
    operator = make_pair(nkeys.PREFIX_BYTE_OPERATOR)
    account, system = make_pair(nkeys.PREFIX_BYTE_ACCOUNT), make_pair(nkeys.PREFIX_BYTE_ACCOUNT)
    user = user or make_pair()
    unlimited = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    more = {"subs": -1, "conn": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "leaf": -1}
    account_jwt = make_jwt(operator, account, "account", {"limits": {**unlimited, **more}})
    system_jwt = make_jwt(operator, system, "account", {"limits": more})
    user_jwt = make_jwt(account, user, "user", {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}, expires)
    config = (
        f"operator: {make_jwt(operator, operator, 'operator', {})}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.key}: {account_jwt}, {system.key}: {system_jwt} }}\n"
        f"system_account: {system.key}\n"
    )
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n*** warning ***\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return OperatorMode(config, credentials)


WAYS = (
    "none",
    "user and password",
    "empty password",
    "password file",
    "token",
    "token file",
    "nkey seed",
    "nkey seed file",
    "credentials",
    "credentials file",
    "client certificate",
    "own authority",
    "another server name",
    "handshake first",
)


@contextmanager
def authenticating_server(way: str, folder: Path) -> Iterator[tuple[NatsServer, dict[str, Any]]]:
    """Start a server that wants this proof; yield it with the fields of settings that give it."""
    file = folder / "secret"

    def in_file(content: str) -> str:
        file.write_text(f"{content}\n")
        return str(file)

    values: dict[str, Any]
    match way:
        case "none":
            server, values = NatsServer(), {}
        case "user and password":
            server, values = NatsServer(user="u", password=SECRET), {"user": "u", "password": SECRET}
        case "empty password":
            server, values = NatsServer(user="u", password=""), {"user": "u"}
        case "password file":
            server = NatsServer(user="u", password=SECRET)
            values = {"user": "u", "password_file": in_file(SECRET)}
        case "token":
            server, values = NatsServer(token=SECRET), {"token": SECRET}
        case "token file":
            server, values = NatsServer(token=SECRET), {"token_file": in_file(SECRET)}
        case "nkey seed" | "nkey seed file":
            user = make_pair()
            server = NatsServer(config=f"authorization {{ users: [{{nkey: {user.key}}}] }}")
            values = {"nkey_seed_secret": user.seed} if way == "nkey seed" else {"nkey_seed_file": in_file(user.seed)}
        case "credentials" | "credentials file":
            mode = operator_mode()
            server = NatsServer(config=mode.config)
            content = mode.credentials
            values = {"credentials_secret": content}
            values = values if way == "credentials" else {"credentials_file": in_file(content)}
        case _:
            server, values = _with_tls(way, folder)
    with server:
        yield server, {"servers": server.url, **values}


def _with_tls(way: str, folder: Path) -> tuple[NatsServer, dict[str, Any]]:
    tls = make_tls(folder / "tls")
    values: dict[str, Any] = {"tls_ca_file": str(tls.ca)}
    match way:
        case "client certificate":
            server = NatsServer(tls=tls, tls_verify=True)
            values |= {"tls_cert_file": str(tls.client_cert), "tls_key_file": str(tls.client_key)}
        case "own authority":
            server = NatsServer(tls=tls, user="u", password=SECRET)
            values |= {"user": "u", "password": SECRET}
        case "another server name":
            server = NatsServer(tls=tls)
            values |= {"tls_server_name": "localhost"}
        case "handshake first":
            files = f'cert_file: "{tls.cert}", key_file: "{tls.key}", ca_file: "{tls.ca}"'
            server = HandshakeFirstServer(config=f"tls {{ {files}, handshake_first: true }}")
            values |= {"tls_handshake_first": True}
        case _:
            raise ValueError(f"expected one of {', '.join(WAYS)}, found {way}")
    return server, values


class HandshakeFirstServer(NatsServer):
    """A server that sends nothing before TLS."""

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"tls://{LOOPBACK}:{self.port}"

    def _banner(self) -> dict[str, Any]:
        # It can't be read without TLS.
        return {"version": ""}


# Those whose names differ from the settings'.
_SUFFIXES = {"servers": "URL", "tls_ca_file": "CA", "tls_cert_file": "CERT", "tls_key_file": "KEY"}


def environment(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the variables with these settings."""
    return {prefix + _SUFFIXES.get(name, name.upper()): str(value) for name, value in values.items() if value != ""}
