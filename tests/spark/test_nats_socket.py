from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import nkeys
import pytest

from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    JetStreamProviderError,
    ServerTooOldError,
    TLSError,
)
from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed.certificates import TlsFiles, make_tls
from testbed.nats_server import NatsServer, debian_nats_server
from testbed.ports import LOOPBACK
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from pathlib import Path

_SECRET = "pl4nted-s3cret"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("tls"))


def _open(**stream_options: str) -> dict[str, Any]:
    with open_stream({"stream": "none", **stream_options}) as stream:
        return stream.api("INFO")


def _refused(error: type[JetStreamProviderError], **stream_options: str) -> str:
    with pytest.raises(error) as caught:
        _open(**stream_options)
    text = f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert _SECRET not in text
    return str(caught.value)


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


def test_an_old_server_is_refused() -> None:
    with NatsServer(binary=debian_nats_server()) as server:
        assert "expected nats-server 2.10.27 or later" in _refused(ServerTooOldError, servers=server.url)


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
