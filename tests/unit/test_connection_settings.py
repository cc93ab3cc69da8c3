from __future__ import annotations

import json
import traceback
from itertools import combinations
from typing import TYPE_CHECKING, Any

import nkeys
import pytest
from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.client.credentials import connect_command
from airflow_provider_jetstream.jetstream.client.settings import VARIABLES, ConnectionSettings, connection_settings
from airflow_provider_jetstream.jetstream.errors import ConnectionSettingsError

if TYPE_CHECKING:
    from pathlib import Path

_SECRET = "s3cr3t-Xyzzy"


def _refused(**values: Any) -> str:
    with pytest.raises(ConnectionSettingsError) as caught:
        connection_settings(values)
    error = caught.value
    everything = "".join(traceback.format_exception(error)) + repr(error) + repr(error.args)
    assert _SECRET not in everything
    assert error.__context__ is None
    return str(error)


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("nats-1.example.org", "nats://nats-1.example.org:4222"),
        ("nats-1.example.org:4223", "nats://nats-1.example.org:4223"),
        (" nats://HOST:4222/ ", "nats://host:4222"),
        ("tls://host", "tls://host:4222"),
        ("nats://127.0.0.1:1", "nats://127.0.0.1:1"),
        ("nats://host:65535", "nats://host:65535"),
        ("nats://[::1]", "nats://[::1]:4222"),
        ("[2001:db8::1]:4333", "nats://[2001:db8::1]:4333"),
    ],
)
def test_an_address_is_completed(address: str, server: str) -> None:
    assert connection_settings({"servers": (address,)}).servers == (server,)


@pytest.mark.parametrize(
    "server",
    [
        f"nats://user:{_SECRET}@host:4222",
        f"nats://{_SECRET}@host",
        f"user:{_SECRET}@host",
        f"tls://:{_SECRET}@host",
        f"nats://user:{_SECRET}/with/slashes@host",
        f"nats://user:{_SECRET}#fragment@host",
        f"nats://user:℀{_SECRET}@host",
        f"nats://[{_SECRET}@host",
    ],
)
def test_credentials_in_an_address_are_refused_without_repeating_them(server: str) -> None:
    assert _refused(servers=("nats://fine", server)) == (
        "the NATS connection can't be used: servers: expected an address without credentials: give user, password or"
        " token as settings"
    )


@pytest.mark.parametrize(
    "server",
    [
        f"nats://user:{_SECRET}",
        f"user:{_SECRET}",
        f"nats://host?token={_SECRET}",
        f"nats://host:4222/{_SECRET}",
        f"nats://host:4222/{_SECRET}?x",
        f"host#{_SECRET}",
        f"nats://user:1{_SECRET}",
        f"nats://user:{_SECRET}\n",
        f"nats://user:{_SECRET}:4222",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(server: str) -> None:
    assert _SECRET not in _refused(servers=(server,))


def test_every_two_kinds_of_credentials_are_refused() -> None:
    kinds: list[dict[str, Any]] = [
        {"user": "u", "password": _SECRET},
        {"token_file": "t"},
        {"nkey_seed_secret": _SECRET},
        {"credentials_file": "c"},
    ]
    for one, other in combinations(kinds, 2):
        assert "expected one of user and password, a token, an nkey seed, credentials, found " in _refused(
            **one, **other
        )


def test_a_user_may_have_an_empty_password() -> None:
    for settings in (connection_settings({"user": "u"}), connection_settings({"user": "u", "password": ""})):
        assert b'"user": "u", "pass": ""' in connect_command(settings, {})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tls_cert_file": "c"}, "expected tls_cert_file and tls_key_file together, found only one of them"),
        ({"tls_key_file": "k"}, "expected tls_cert_file and tls_key_file together, found only one of them"),
        ({"js_domain": "hub", "api_prefix": "js.hub"}, "expected js_domain or api_prefix, found both: keep one"),
        (
            {"js_domain": "a.b"},
            "js_domain: expected a JetStream domain of letters, digits, - and _, found other characters",
        ),
        ({"inbox_prefix": "_INBOX.>"}, "inbox_prefix: expected what subjects begin with"),
        ({"inbox_prefix": "a b"}, "inbox_prefix: expected what subjects begin with"),
        ({"inbox_prefix": "x" * 201}, "inbox_prefix: expected what subjects begin with"),
        ({"api_prefix": "$JS..API"}, "api_prefix: expected what subjects begin with"),
        ({"tls_handshake_first": "perhaps"}, "tls_handshake_first: Input should be a valid boolean"),
    ],
)
def test_tls_and_names_in_jetstream_are_checked(values: dict[str, Any], problem: str) -> None:
    assert problem in _refused(**values)


def test_pydantics_own_validation_shows_no_secret_either() -> None:
    with pytest.raises(ValidationError, match="a token: keep one") as caught:
        ConnectionSettings.model_validate({"user": "u", "password": _SECRET, "token": _SECRET})
    assert _SECRET not in f"{caught.value} {caught.value!r}" + "".join(traceback.format_exception(caught.value))


def test_settings_never_show_a_secret() -> None:
    settings = connection_settings({"servers": ("host",), "user": "u", "password": _SECRET})
    with_token = connection_settings({"servers": ("host",), "token": _SECRET})
    for shown in (settings, with_token):
        assert _SECRET not in f"{shown!r} {shown} {shown.model_dump()} {shown.model_dump_json()}"
    assert settings.password is not None
    assert settings.password.get_secret_value() == _SECRET


def test_equal_settings_are_one_key_and_different_secrets_are_not() -> None:
    one, same, other = (connection_settings({"user": "u", "password": text}) for text in ("a", "a", "b"))
    assert len({one, same, other}) == 2


@pytest.mark.parametrize(
    ("values", "encrypted"),
    [
        ({"servers": ("tls://a", "tls://b")}, True),
        ({"servers": ("nats://a",), "tls_ca_file": "ca.pem"}, True),
        ({"tls_server_name": "a"}, True),
        ({"tls_handshake_first": "true"}, True),
        ({"tls_cert_file": "a", "tls_key_file": "b"}, True),
        ({"servers": ("nats://a",)}, False),
    ],
)
def test_the_scheme_or_an_authority_requests_tls(values: dict[str, Any], encrypted: bool) -> None:  # noqa: FBT001
    assert connection_settings(values).encrypted is encrypted


@pytest.mark.parametrize("url", ["", " ", ","])
def test_an_empty_variable_counts_as_absent(url: str) -> None:
    empty = {"NATS_URL": url, "NATS_USER": "", "NATS_PASSWORD": "", "NATS_TOKEN": "", "NATS_CA": ""}
    assert ConnectionSettings.from_environment(empty) == ConnectionSettings.from_environment({})
    assert ConnectionSettings.from_environment({}).servers == ("nats://127.0.0.1:4222",)


def test_every_field_but_the_name_has_a_variable() -> None:
    assert set(VARIABLES) == set(ConnectionSettings.model_fields) - {"name"}


def _context(folder: Path, **fields: object) -> dict[str, str]:
    file = folder / "nats" / "context" / "orders.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"description": "Orders", "token": "", "socks_proxy": "", **fields}))
    return {"XDG_CONFIG_HOME": str(folder)}


def test_a_context_of_the_command_nats_gives_the_same_settings(tmp_path: Path) -> None:
    environment = _context(
        tmp_path,
        url="tls://one,tls://two:4223",
        creds="/etc/user.creds",
        ca="/etc/ca.pem",
        jetstream_domain="leaf",
        inbox_prefix="_INBOX_orders",
        tls_first=True,
    )
    expected = ConnectionSettings(
        servers=("tls://one", "tls://two:4223"),
        credentials_file="/etc/user.creds",
        tls_ca_file="/etc/ca.pem",
        js_domain="leaf",
        inbox_prefix="_INBOX_orders",
        tls_handshake_first=True,
    )
    assert ConnectionSettings.from_context("orders", environment) == expected
    assert ConnectionSettings.from_context(tmp_path / "nats" / "context" / "orders.json") == expected
    named = {**environment, "NATS_CONTEXT": "orders"}
    assert ConnectionSettings.from_environment(named) == expected
    assert ConnectionSettings.from_environment({**named, "NATS_URL": "tls://three"}).servers == ("tls://three:4222",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("[]", "something else"),
        ("[" * 100_000, "something else"),
        (f'{{"token": "{_SECRET}"', "something else"),
        (f'{{"user_jwt": "{_SECRET}"}}', "found user_jwt, which isn't supported"),
        (f'{{"token": ["{_SECRET}"]}}', "token: Input should be a valid string"),
        (f'{{"url": "nats://u:{_SECRET}@host"}}', "expected an address without credentials"),
    ],
)
def test_a_context_that_cannot_be_used_is_explained_without_its_secrets(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "context.json"
    if content:
        file.write_text(content)
    with pytest.raises(ConnectionSettingsError) as caught:
        ConnectionSettings.from_context(file)
    assert problem in str(caught.value)
    assert _SECRET not in "".join(traceback.format_exception(caught.value))


def test_credentials_are_read_where_a_form_has_dropped_the_line_ends() -> None:
    seed = bytes(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER)).decode()
    content = (
        f"-----BEGIN NATS USER JWT-----a.b-c_d------END NATS USER JWT------"
        f"-----BEGIN USER NKEY SEED-----{seed}------END USER NKEY SEED------"
    )
    command = connect_command(connection_settings({"credentials_secret": content}), {"nonce": "n"})
    assert b'"jwt": "a.b-c_d"' in command
    assert seed.encode() not in command
