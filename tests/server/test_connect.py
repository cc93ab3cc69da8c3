from __future__ import annotations

import asyncio
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import fake_server

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import (
    AuthenticationError,
    ConnectionSettingsError,
    DeadlineError,
    JetStreamDisabledError,
    JetStreamProviderError,
    PermissionDeniedError,
    ServerTooOldError,
    TLSError,
    TransientError,
    UnreachableError,
)
from testbed.certificates import TlsFiles, make_tls
from testbed.nats_server import NatsServer, debian_nats_server
from testbed.ports import LOOPBACK, free_port
from testbed.queues import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.face import NatsPyConnection

_SECRET = "s3cr3t-Xyzzy"
_WRONG = "wr0ng-Xyzzy"
# No answer of a server that is there may wait for it: it is longer than a test may take.
_ENDLESS = 300.0
_BANNER: dict[str, object] = {"server_id": "fake", "version": "2.15.0", "max_payload": 1_048_576, "headers": True}
_PLAINTEXT = (
    "expected a server that requires TLS, found one that talks plaintext; nothing was sent to it: enable tls on the"
    " server, or use a nats:// address without tls_ca_file"
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A certificate authority and its certificates."""
    return make_tls(tmp_path_factory.mktemp("tls"))


@contextmanager
def _raises(error: type[JetStreamProviderError]) -> Iterator[pytest.ExceptionInfo[Exception]]:
    with pytest.raises(error) as caught:
        yield caught
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert _SECRET not in shown
    assert _WRONG not in shown


async def _open(*servers: str, **values: Any) -> None:
    async with connect(connection_settings({"servers": servers, "timeout": _ENDLESS, **values})):
        pass


async def test_a_connection_knows_its_servers_version_and_api_level(connection: Connection, nats: NatsServer) -> None:
    assert ".".join(map(str, connection.server_version)) == nats.version
    # Servers before 2.11 state none.
    assert connection.api_level == (await connection.api("INFO"))["api"].get("level", 0)
    assert (connection.api_level > 0) == (connection.server_version >= (2, 11, 0))
    assert connection.last_error is None


async def test_a_closed_port_is_reported() -> None:
    url = f"nats://{LOOPBACK}:{free_port()}"
    with _raises(UnreachableError) as caught:
        await _open(url)
    assert str(caught.value).startswith(f"no NATS server reached at {url}: ")
    assert "Connect call failed" in str(caught.value) or "Connection refused" in str(caught.value)
    assert str(caught.value).endswith("; check host, port and firewall")


async def test_an_unknown_host_is_reported() -> None:
    with _raises(UnreachableError) as caught:
        await _open("nats://no-such-host.invalid")
    assert str(caught.value).startswith("no NATS server reached at nats://no-such-host.invalid:4222: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "farewell", [b"PONG\r\n", b"PONG\r\n-ERR 'Account Disabled'\r\n"], ids=["quietly", "with an error"]
)
async def test_a_server_that_closes_the_connection_is_not_reported_as_one_without_jetstream(farewell: bytes) -> None:
    async with fake_server(banner=_BANNER, farewell=farewell) as fake:
        url = f"nats://{LOOPBACK}:{fake.port}"
        with _raises(TransientError) as caught:
            await _open(url, timeout=1.5)
    assert "JetStream, found" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "client", "found"),
    [
        ({"user": "u", "password": _SECRET}, {"user": "u", "password": _WRONG}, "user and password"),
        ({"user": "u", "password": _SECRET}, {"user": "v", "password": _SECRET}, "user and password"),
        ({"user": "u", "password": _SECRET}, {"token": _SECRET}, "a token"),
        ({"user": "u", "password": _SECRET}, {}, "none"),
        ({"token": _SECRET}, {"token": _WRONG}, "a token"),
        ({"token": _SECRET}, {}, "none"),
    ],
    ids=["wrong password", "wrong user", "token for a user", "no user", "wrong token", "no token"],
)
async def test_refused_credentials_are_reported_without_repeating_them(
    server: dict[str, str], client: dict[str, str], found: str
) -> None:
    with NatsServer(**server) as nats:  # type: ignore[arg-type]
        with _raises(AuthenticationError) as caught:
            await _open(nats.url, **client)
        assert str(caught.value) == (
            f"{nats.url} refused the credentials: expected valid ones, found {found}; check them"
        )
        await _open(nats.url, **server)


async def test_a_server_without_jetstream_is_reported() -> None:
    with NatsServer(jetstream=False) as nats, _raises(JetStreamDisabledError) as caught:
        await _open(nats.url)
    assert str(caught.value) == (
        "expected JetStream, found a server or account without it: start nats-server with -js (or a jetstream block in"
        " its configuration), or enable JetStream for the account"
    )


async def test_an_account_without_jetstream_is_reported() -> None:
    users = f'[{{user: u, password: "{_SECRET}"}}]'
    accounts = (
        f"accounts {{ WITH: {{jetstream: enabled, users: [{{user: w, password: w}}]}}, WITHOUT: {{users: {users}}} }}"
    )
    with NatsServer(config=accounts) as nats:
        with _raises(JetStreamDisabledError) as caught:
            await _open(nats.url, user="u", password=_SECRET)
        assert "enable JetStream for the account" in str(caught.value)
        await _open(nats.url, user="w", password="w")


async def test_a_user_without_permission_for_the_api_is_denied_at_once() -> None:
    users = f'authorization {{ users: [{{user: u, password: "{_SECRET}", permissions: {{publish: "jobs.>"}}}}] }}'
    with NatsServer(config=users) as nats, _raises(PermissionDeniedError) as caught:
        await _open(nats.url, user="u", password=_SECRET)
    assert "the server doesn't let user 'u' publish to $JS.API.INFO" in str(caught.value)


async def test_an_old_server_is_refused() -> None:
    with NatsServer(binary=debian_nats_server()) as nats, _raises(ServerTooOldError) as caught:
        await _open(nats.url)
    assert str(caught.value) == (
        "expected nats-server 2.10.27 or later, found 2.9.10: older servers lose or repeat dead letters; upgrade the"
        " server"
    )


async def test_tls_works_with_the_servers_authority(tls: TlsFiles) -> None:
    settings = {"tls_ca_file": str(tls.ca), "user": "u", "password": _SECRET}
    with NatsServer(tls=tls, user="u", password=_SECRET) as nats:
        for url in (nats.url, f"tls://localhost:{nats.port}", f"nats://{LOOPBACK}:{nats.port}"):
            async with connect(connection_settings({"servers": (url,), **settings})):
                (client,) = nats.monitor("connz")["connections"]
                assert client["tls_version"] in ("1.2", "1.3")


@pytest.mark.slow
@pytest.mark.parametrize("other_authority", [True, False], ids=["another authority", "the system's authorities"])
async def test_a_certificate_of_another_authority_is_refused(
    tls: TlsFiles, tmp_path: Path, *, other_authority: bool
) -> None:
    ca = {"tls_ca_file": str(make_tls(tmp_path).ca)} if other_authority else {}
    with NatsServer(tls=tls, user="u", password=_SECRET) as nats:
        with _raises(TLSError) as caught:
            await _open(nats.url, user="u", password=_SECRET, **ca)
        assert str(caught.value).startswith(f"no TLS with {nats.url}: ")
        assert "certificate" in str(caught.value)
        assert str(caught.value).endswith("; check tls_ca_file and the host name")


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), ("no certificate", "NO_CERT")])
async def test_an_unreadable_authority_is_reported(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "ca.pem"
    if content:
        path.write_text(content)
    with _raises(ConnectionSettingsError) as caught:
        await _open("tls://localhost", tls_ca_file=str(path), token=_SECRET)
    assert str(caught.value).startswith(f"tls_ca_file: expected a PEM file with certificates at {path}, found: ")
    assert reason in str(caught.value)


async def test_tls_to_a_plaintext_server_is_refused(nats: NatsServer) -> None:
    with _raises(TLSError) as caught:
        await _open(f"tls://{LOOPBACK}:{nats.port}", user="u", password=_SECRET)
    assert str(caught.value) == _PLAINTEXT


@pytest.mark.parametrize("credentials", [{"user": "u", "password": _SECRET}, {"token": _SECRET}])
async def test_credentials_are_never_sent_in_plaintext_where_tls_was_requested(credentials: dict[str, str]) -> None:
    async with fake_server(banner=_BANNER | {"auth_required": True}) as fake:
        with _raises(TLSError) as caught:
            await _open(f"tls://{LOOPBACK}:{fake.port}", **credentials)
        assert str(caught.value) == _PLAINTEXT
        assert fake.connections > 0
        assert bytes(fake.received) == b""


@pytest.mark.slow
async def test_the_fake_server_receives_credentials_where_plaintext_was_requested() -> None:
    async with fake_server(banner=_BANNER | {"auth_required": True}) as fake:
        with _raises(UnreachableError):
            await _open(f"nats://{LOOPBACK}:{fake.port}", timeout=1, token=_SECRET)
        assert _SECRET.encode() in fake.received


@pytest.mark.slow
async def test_credentials_are_not_sent_in_plaintext_at_a_reconnect_either(tls: TlsFiles) -> None:
    with NatsServer(tls=tls, user="u", password=_SECRET) as nats:
        values = {"servers": (nats.url,), "user": "u", "password": _SECRET, "tls_ca_file": str(tls.ca)}
        async with connect(connection_settings(values)) as opened:
            nats.kill()
            async with fake_server(banner=_BANNER, port=nats.port) as fake:
                await eventually(lambda: isinstance(opened.last_error, TLSError))
                assert bytes(fake.received) == b""


async def test_a_server_with_a_bad_certificate_among_several_is_skipped(tls: TlsFiles, tmp_path: Path) -> None:
    with NatsServer(tls=tls) as good, NatsServer(tls=make_tls(tmp_path)) as bad:
        # The client shuffles its servers, so several attempts may be needed to meet the bad one first.
        while "TLS handshake error" not in bad.log():
            await _open(bad.url, good.url, tls_ca_file=str(tls.ca))


@pytest.mark.slow
async def test_a_silent_server_among_several_leaves_time_for_the_others(nats: NatsServer) -> None:
    async with fake_server() as silent:
        url = f"nats://{LOOPBACK}:{silent.port}"
        # The client shuffles its servers, so several attempts may be needed to meet the silent one first.
        while not silent.connections:
            await _open(url, nats.url, timeout=4)


async def test_unreachable_servers_are_named() -> None:
    urls = [f"nats://{LOOPBACK}:{free_port()}" for _ in range(2)]
    with _raises(UnreachableError) as caught:
        await _open(*urls)
    assert str(caught.value).startswith(f"no NATS server reached at {urls[0]}, {urls[1]}: ")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_connection_works_again_after_a_server_restart(own_nats: NatsServer, end: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 3})) as opened:
        await opened.api("STREAM.CREATE.kept", {"name": "kept", "subjects": ["kept.>"]})
        getattr(own_nats, end)()
        with pytest.raises((DeadlineError, UnreachableError)):
            await opened.api("STREAM.INFO.kept")
        own_nats.start()

        async def answered() -> bool:
            try:
                return bool((await opened.api("STREAM.INFO.kept"))["config"]["name"] == "kept")
            except JetStreamProviderError:
                return False

        await eventually(answered)


async def test_a_connection_that_is_closed_while_it_is_being_restored_is_closed(nats: NatsServer) -> None:
    # Both wait for the end of the same socket.
    for turns in range(4):
        async with connect(connection_settings({"servers": (nats.url,)})) as opened:
            await opened.client.force_reconnect()
            for _ in range(turns):
                await asyncio.sleep(0)
        assert opened.client.is_closed


async def test_an_answer_to_a_ping_that_nobody_waits_for_any_more_leaves_the_connection_open(
    connection: NatsPyConnection, name: str
) -> None:
    client = connection.client
    reconnects, messages = client.stats["reconnects"], await client.subscribe(name)
    flushing = asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.wait([flushing])
    await client.publish(name, b"later")
    assert (await messages.next_msg(timeout=5)).data == b"later"
    assert client.stats["reconnects"] == reconnects
