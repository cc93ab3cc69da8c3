"""An Airflow connection as a URI, as JSON and as a row of the form: each means the same, and TLS is never dropped."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from airflow.sdk import Connection

from airflow_provider_jetstream.hooks.connected_hook import settings_from
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

_SECRET = "s3cr3t-Xyzzy"


def _settings(connection: Connection) -> ConnectionSettings:
    return settings_from(connection, connection.extra_dejson)


def _of_uri(uri: str) -> ConnectionSettings:
    return _settings(Connection.from_uri(uri, conn_id="nats_uri"))


def _of_json(**fields: Any) -> ConnectionSettings:
    return _settings(Connection.from_json(json.dumps(fields), conn_id="nats_json"))


@pytest.mark.parametrize(
    "uri",
    [
        f"tls://u:{_SECRET}@host:4223",
        f"nats://u:{_SECRET}@{quote('tls://host', safe='')}:4223",
        f"nats://u:{_SECRET}@host:4223?tls_server_name=host",
        f"tls://u:{_SECRET}@host?timeout=10&__extra__={quote('{}')}",
    ],
)
def test_a_uri_that_asks_for_tls_gets_it(uri: str) -> None:
    settings = _of_uri(uri)
    assert settings.encrypted
    assert settings.user == "u"
    assert settings.password is not None
    assert settings.password.get_secret_value() == _SECRET


def test_every_form_means_the_same() -> None:
    extra = {"tls_ca_file": "/ca.pem", "tls_handshake_first": True, "js_domain": "hub", "timeout": 5}
    expected = ConnectionSettings(servers=("tls://host:4223",), user="u", password=_SECRET, **extra)
    query = "tls_ca_file=%2Fca.pem&tls_handshake_first=true&js_domain=hub&timeout=5"
    assert _of_uri(f"tls://u:{_SECRET}@host:4223?{query}") == expected
    fields = {"login": "u", "password": _SECRET, "port": 4223, "extra": extra}
    assert _of_json(conn_type="tls", host="host", **fields) == expected
    assert _of_json(conn_type="nats", host="tls://host", **fields) == expected
    assert _of_json(conn_type="nats", host="tls://host", **{**fields, "extra": json.dumps(extra)}) == expected


@pytest.mark.since_airflow("3.2", "connections in JSON without a type")
def test_the_form_leaves_empty_what_isnt_set() -> None:
    extra = {"token": "", "tls_ca_file": None, "timeout": 10}
    assert _of_json(conn_type="nats", host="host", extra=extra) == ConnectionSettings(servers=("host",))
    assert _of_json(host="host") == ConnectionSettings(servers=("host",))


def test_a_login_may_have_an_empty_password() -> None:
    assert _of_json(conn_type="nats", host="host", login="u").user == "u"
    assert _of_json(conn_type="nats", host="host", login="u", password="").user == "u"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"conn_type": "http", "host": "host"},
            "expected the type nats, or tls for encrypted connections, found 'http'",
        ),
        ({"conn_type": "nats+tls", "host": "host"}, "expected the type nats"),
        ({"conn_type": "tls", "host": "nats://host"}, "expected addresses with tls://"),
        ({"conn_type": "tls", "host": "one, nats://two"}, "expected addresses with tls://"),
        ({"conn_type": "nats", "host": "host", "schema": "x"}, "expected nothing after host and port, found a schema"),
        ({"conn_type": "nats", "host": "host", "extra": {"tls_handshake_first": "perhaps"}}, "tls_handshake_first"),
    ],
)
def test_what_could_mean_something_else_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConnectionSettingsError) as refused:
        _of_json(password=_SECRET, login="u", **fields)
    assert problem in str(refused.value)
    assert _SECRET not in str(refused.value)
