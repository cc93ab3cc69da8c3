"""The options of the server and the credentials, and the settings that follow from them and the environment."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.jetstream.client.settings_sources import read_context, read_environment, split_servers

if TYPE_CHECKING:
    from airflow_provider_jetstream.command.output import Output

# Each field of the settings with its help; a secret itself comes by a file or the environment.
_FIELDS: Final = {
    "user": "the user's name",
    "password_file": "path of the file with the user's password",
    "token_file": "path of the file with the token",
    "nkey_seed_file": "path of the file with the seed of the user's nkey",
    "credentials_file": "path of the credentials file (.creds)",
    "tls_ca_file": "path of the certificate authorities",
    "tls_cert_file": "path of the client's certificate",
    "tls_key_file": "path of the certificate's key",
    "tls_server_name": "the name in the server's certificate",
    "js_domain": "the JetStream domain",
    "api_prefix": "what the subjects of JetStream's API begin with",
    "inbox_prefix": "what the subjects begin with on which answers arrive",
    "timeout": "seconds within which the connection has to be usable; 10 where absent",
}
_SECRETS: Final = {"password": "the user's password", "token": "the token"}
_IDENTITY: Final = frozenset(
    {"user", "nkey_seed_secret", "credentials_secret", "nkey_seed_file", "credentials_file"}
    | {f"{secret}{suffix}" for secret in _SECRETS for suffix in ("", "_file")}
)


def connection_options() -> argparse.ArgumentParser:
    """Return a parser with the options, for the sub-commands that need a server."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(
        "connection",
        "Where no option is given: NATS_URL, NATS_USER, NATS_PASSWORD_FILE… and the context that NATS_CONTEXT names.",
    )
    group.add_argument("--server", metavar="URL", help="several with commas between them, such as nats://127.0.0.1")
    group.add_argument(
        "--context", metavar="NAME", help="a context of the command nats; the environment isn't read then"
    )
    for field, text in (
        _FIELDS
        | {
            name: f"{what}; everybody on this machine can see it there: prefer the file"
            for name, what in _SECRETS.items()
        }
    ).items():
        group.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", dest=f"nats_{field}", help=text)
    group.add_argument(
        "--tls-handshake-first",
        action="store_true",
        dest="nats_tls_handshake_first",
        help="begin with TLS, as a server with handshake_first wants it",
    )
    return parser


def settings_of(options: argparse.Namespace, out: Output) -> ConnectionSettings:
    """Return the settings; an option counts before the environment and the context.

    :raises ConnectionSettingsError: they contradict each other
    """
    given: dict[str, Any] = {
        name.removeprefix("nats_"): value
        for name, value in vars(options).items()
        if name.startswith("nats_") and value not in (None, False)
    }
    if options.server:
        given["servers"] = split_servers(options.server)
    for secret in sorted(_SECRETS.keys() & given.keys()):
        out.note(
            f"warning: --{secret} is in the list of processes and in the shell's history; give --{secret}-file, or"
            f" NATS_{secret.upper()} in the environment"
        )
    known = read_context(options.context, os.environ) if options.context else read_environment(os.environ)
    if _IDENTITY & given.keys():
        known = {name: value for name, value in known.items() if name not in _IDENTITY}
    return ConnectionSettings(**{"name": "jetstream-queue"} | known | given)
