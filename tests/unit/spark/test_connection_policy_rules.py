"""What an SQL user's options may not choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_jetstream.spark.connection_options import (
    ConnectionPolicy,
)
from airflow_provider_jetstream.spark.errors import SparkOptionError

_ALLOWED = ConnectionPolicy(
    frozenset({"vault:find"}), (Path("/run/secrets"),), frozenset({"tls://nats-1:4222", "tls://nats-2:4222"})
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "tls://nats-1,tls://nats-2:4222", "tokenFile": "/run/secrets/token"}, ""),
        ({"connection": "orders", "connectionProvider": "vault:find"}, ""),
        ({"connection": "orders", "connectionprovider": "vault:other"}, "one of spark.jetstream.allowedProviders"),
        ({"servers": "tls://nats-1,tls://evil", "tokenFile": "/run/secrets/token"}, "found tls://evil:4222"),
        ({"servers": "nats-1", "tokenFile": "/run/secrets/token"}, "found nats://nats-1:4222"),
        ({"servers": "tls://evil", "token": "t"}, "found tls://evil:4222"),
        ({"servers": "tls://nats-1", "tokenFile": "/run/secrets/../other"}, "allowedFiles"),
        ({"servers": "tls://nats-1", "TOKENFILE": "/run/secrets2/token"}, "allowedFiles"),
        ({"servers": "tls://nats-1", "tokenFile": "token"}, "allowedFiles"),
        ({"servers": "tls://nats-1", "tokenFile": "/run/secrets/\0"}, "allowedFiles"),
    ],
)
def test_what_is_allowed(options: dict[str, str], message: str) -> None:
    if not message:
        _ALLOWED.check(options)
        return
    with pytest.raises(SparkOptionError, match=message):
        _ALLOWED.check(options)


def test_a_symbolic_link_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to("/etc/passwd")
    policy = ConnectionPolicy(files=(tmp_path / "allowed",), servers=frozenset({"nats://n:4222"}))
    with pytest.raises(SparkOptionError, match="allowedFiles"):
        policy.check({"servers": "n", "tokenFile": str(tmp_path / "allowed" / "link")})


def test_a_secret_file_needs_servers(tmp_path: Path) -> None:
    policy = ConnectionPolicy(files=(tmp_path,))
    policy.check({"servers": "any", "tlsCaFile": str(tmp_path / "ca")})
    with pytest.raises(SparkOptionError, match="allowedServers"):
        policy.check({"servers": "any", "tokenFile": str(tmp_path / "token")})
