from __future__ import annotations

import base64
import json
import os
from socket import MSG_PEEK
from typing import TYPE_CHECKING, Any

import nkeys
import pytest

from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    ServerTooOldError,
    TLSError,
    UnreachableError,
)
from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed.certificates import TlsFiles, make_tls
from testbed.nats_server import NatsServer, debian_nats_server
from testbed.ports import LOOPBACK, free_port
from testbed.spark_face import NatsSocket, SourceStream, socket_settings

if TYPE_CHECKING:
    from pathlib import Path

_SECRET = "pl4nted-s3cret"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("tls"))


def _open(**stream_options: str) -> dict[str, Any]:
    socket = NatsSocket(socket_settings(stream_options))
    try:
        return SourceStream(socket, "none").api("INFO")
    finally:
        socket.close()


def _refused(error: type[JetStreamProviderError], **stream_options: str) -> str:
    with pytest.raises(error) as caught:
        _open(**stream_options)
    text = f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert _SECRET not in text
    return str(caught.value)


def test_user_and_password(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{_SECRET}\n")
    with NatsServer(user="u", password=_SECRET) as server:
        assert _open(servers=server.url, user="u", password=_SECRET)
        assert _open(servers=server.url, user="u", passwordFile=str(file))
        assert _open(SERVERS=server.url, user="u", passwordfile=str(file))
        assert "refused the credentials" in _refused(AuthenticationError, servers=server.url, user="u", password="no")
        assert "refused the credentials" in _refused(AuthenticationError, servers=server.url)


def test_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(_SECRET)
    with NatsServer(token=_SECRET) as server:
        assert _open(servers=server.url, token=_SECRET)
        assert _open(servers=server.url, tokenFile=str(file))
        _refused(AuthenticationError, servers=server.url, token="no")


def _pair(kind: int) -> tuple[str, Any]:
    seed = nkeys.encode_seed(os.urandom(32), kind)
    return bytes(seed).decode(), nkeys.from_seed(bytearray(seed))


def test_an_nkey(tmp_path: Path) -> None:
    seed, pair = _pair(nkeys.PREFIX_BYTE_USER)
    file = tmp_path / "seed"
    file.write_text(f"{seed}\n")
    with NatsServer(config=f"authorization {{ users: [{{nkey: {pair.public_key.decode()}}}] }}") as server:
        assert _open(servers=server.url, nkeySeedSecret=seed)
        assert _open(servers=server.url, nkeySeedFile=str(file))
        other, _ = _pair(nkeys.PREFIX_BYTE_USER)
        _refused(AuthenticationError, servers=server.url, nkeySeedSecret=other)
        assert "expected a user's seed" in _refused(
            ConnectionSettingsError, servers=server.url, nkeySeedSecret=f"SU{_SECRET}"
        )
    with NatsServer() as server:
        assert "remove the nkey seed" in _refused(AuthenticationError, servers=server.url, nkeySeedSecret=seed)


def _jwt(issuer: Any, subject: Any, kind: str, claims: dict[str, Any]) -> str:
    def encode(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")

    body = {
        "jti": "test",
        "iat": 1,
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "nats": {"type": kind, "version": 2, **claims},
    }
    signed = f"{encode({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{encode(body)}"
    signature = base64.urlsafe_b64encode(issuer.sign(signed.encode())).decode().rstrip("=")
    return f"{signed}.{signature}"


def test_a_credentials_file(tmp_path: Path) -> None:
    _, operator = _pair(nkeys.PREFIX_BYTE_OPERATOR)
    _, account = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
    seed, user = _pair(nkeys.PREFIX_BYTE_USER)
    unlimited = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    more = {"subs": -1, "conn": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "leaf": -1}
    limits, without_storage = {"limits": {**unlimited, **more}}, {"limits": more}
    account_jwt = _jwt(operator, account, "account", limits)
    _, system = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
    system_key, system_jwt = system.public_key.decode(), _jwt(operator, system, "account", without_storage)
    user_jwt = _jwt(account, user, "user", {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1})
    config = (
        f"operator: {_jwt(operator, operator, 'operator', {})}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public_key.decode()}: {account_jwt}, {system_key}: {system_jwt} }}\n"
        f"system_account: {system_key}\n"
    )
    content = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n*** warning ***\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    file = tmp_path / "user.creds"
    file.write_text(content)
    with NatsServer(config=config) as server:
        assert _open(servers=server.url, credentialsFile=str(file))
        assert _open(servers=server.url, credentialsSecret=content)
        _refused(AuthenticationError, servers=server.url)
        assert "found 0 of the two" in _refused(ConnectionSettingsError, servers=server.url, credentialsSecret=_SECRET)


def test_tls_with_a_private_authority(tls: TlsFiles, tmp_path: Path) -> None:
    other = str(make_tls(tmp_path).ca)
    with NatsServer(tls=tls, user="u", password=_SECRET) as server:
        as_user = {"user": "u", "password": _SECRET}
        assert _open(servers=server.url, tlsCaFile=str(tls.ca), **as_user)
        assert _open(servers=f"{LOOPBACK}:{server.port}", tlsCaFile=str(tls.ca), **as_user)
        assert "check tls_ca_file" in _refused(TLSError, servers=server.url, **as_user)
        assert "check tls_ca_file" in _refused(TLSError, servers=server.url, tlsCaFile=other, **as_user)
        assert "expected a tls:// address" in _refused(TLSError, servers=f"{LOOPBACK}:{server.port}", **as_user)
        assert "tls_ca_file: expected a PEM file" in _refused(
            ConnectionSettingsError, servers=server.url, tlsCaFile="none", **as_user
        )


def test_a_client_certificate(tls: TlsFiles) -> None:
    with NatsServer(tls=tls, tls_verify=True) as server:
        stream_options = {"servers": server.url, "tlsCaFile": str(tls.ca)}
        assert _open(**stream_options, tlsCertFile=str(tls.client_cert), tlsKeyFile=str(tls.client_key))
        with pytest.raises(JetStreamProviderError):
            _open(**stream_options)


def test_credentials_are_never_sent_in_plaintext_where_tls_was_requested(tls: TlsFiles) -> None:
    with NatsServer(config="debug: true\ntrace: true") as server:
        message = _refused(
            TLSError, servers=f"tls://{LOOPBACK}:{server.port}", tlsCaFile=str(tls.ca), user="u", password=_SECRET
        )
        assert "nothing was sent to it" in message
        assert "CONNECT" not in server.log()


@pytest.mark.slow
def test_an_unreachable_server_is_skipped(nats: NatsServer) -> None:
    for _ in range(6):
        assert _open(servers=f"{LOOPBACK}:{free_port()},{nats.url}")
    message = _refused(UnreachableError, servers=f"{LOOPBACK}:{free_port()},{LOOPBACK}:{free_port()}")
    assert message.count("Connection refused") == 2


def test_what_came_before_a_connections_end_is_kept(own_nats: NatsServer) -> None:
    socket = NatsSocket(socket_settings({"servers": own_nats.url}))
    frame = f"MSG {socket.inbox}.1 {socket.sid.decode()} 5\r\nhello\r\n".encode()
    try:
        socket.send(f"PUB {socket.inbox}.1 5\r\nhello\r\n".encode())
        while not socket._socket.recv(1 << 16, MSG_PEEK).endswith(frame):  # noqa: SLF001
            pass
        own_nats.kill()
        socket.receive(lambda _buffer, _filled: False)
        assert bytes(socket.buffer[: socket.filled]).endswith(frame)
        with pytest.raises(UnreachableError, match="the connection to NATS was lost"):
            socket.receive(lambda _buffer, _filled: False)
    finally:
        socket.close()


def test_an_old_server_is_refused() -> None:
    with NatsServer(binary=debian_nats_server()) as server:
        assert "expected nats-server 2.10.27 or later" in _refused(ServerTooOldError, servers=server.url)


@pytest.mark.slow
def test_a_silent_server_is_reported(nats: NatsServer) -> None:
    # The monitoring endpoint sends nothing before a request.
    message = _refused(UnreachableError, servers=f"{LOOPBACK}:{nats.monitor_port}", timeout="1")
    assert "nothing came from the server within" in message


def provided(name: str) -> dict[str, str]:
    """Return the options of a connection; a test names this function as connectionProvider."""
    return {"servers": os.environ["TEST_PROVIDED_URL"], "user": name, "password": _SECRET}


def test_a_connection_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer(user="orders", password=_SECRET) as server:
        monkeypatch.setenv("NATS_MY_ORDERS_URL", server.url)
        monkeypatch.setenv("NATS_MY_ORDERS_USER", "orders")
        monkeypatch.setenv("NATS_MY_ORDERS_PASSWORD", _SECRET)
        assert _open(connection="my-orders")
        monkeypatch.setenv("TEST_PROVIDED_URL", server.url)
        assert _open(connection="orders", connectionProvider="test_nats_socket:provided")
        monkeypatch.setenv("NATS_URL", server.url)
        monkeypatch.setenv("NATS_USER", "orders")
        monkeypatch.setenv("NATS_PASSWORD", _SECRET)
        assert _open()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"connection": "none"}, ConnectionSettingsError, "expected variables such as NATS_NONE_URL"),
        ({"connection": "a b"}, SparkOptionError, "expected a connection's name"),
        ({"connection": "a", "servers": "b"}, SparkOptionError, "either connection or servers, found both"),
        ({"connection": "a", "connectionProvider": "no.module:f"}, SparkOptionError, "package.module:function"),
        ({"connection": "a", "connectionProvider": "nothing"}, SparkOptionError, "package.module:function"),
        ({"connectionProvider": "a:b"}, SparkOptionError, "expected connection"),
        ({}, ConnectionSettingsError, "expected servers, or connection, or NATS_URL"),
        ({"user": "u", "password": _SECRET}, ConnectionSettingsError, "expected servers"),
        ({"servers": f"nats://u:{_SECRET}@h:1"}, ConnectionSettingsError, "without credentials"),
        (
            {"servers": "h", "token": _SECRET, "password": _SECRET, "user": "u"},
            ConnectionSettingsError,
            "user and password and a token: keep one",
        ),
        (
            {"servers": "h", "token": _SECRET, "tokenFile": "f"},
            ConnectionSettingsError,
            "expected token or tokenFile, found both",
        ),
        ({"servers": "h", "tokenFile": "/no/such"}, ConnectionSettingsError, "readable file at /no/such"),
        ({"servers": "h", "tlsCertFile": "f"}, ConnectionSettingsError, "tlsCertFile and tlsKeyFile together"),
        ({"servers": "h", "timeout": "soon"}, ConnectionSettingsError, "timeout"),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, str], error: type[JetStreamProviderError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "NATS_URL" in os.environ:
        monkeypatch.delenv("NATS_URL")
    assert message in _refused(error, **options)
