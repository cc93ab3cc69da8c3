"""The fields of a connection of type ``nats`` in Airflow's form, besides host, port, login and password."""

from __future__ import annotations

from typing import Any, Final


def _field(label: str, description: str, **schema: Any) -> dict[str, Any]:
    kind = schema.pop("type", "string")
    return {"label": label, "description": description, "schema": {"type": [kind, "null"], **schema}}


def _secret(label: str, description: str) -> dict[str, Any]:
    return _field(label, description, format="password")


CONNECTION_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "token": _secret("Token", "Instead of user and password."),
    "nkey_seed_secret": _secret("NKey seed", "The seed (SU…) of a user's key, instead of user and password."),
    "credentials_secret": _secret(
        "Credentials", "The content of a credentials file (.creds) with a JWT and a seed, instead of user and password."
    ),
    "password_file": _field("Password file", "Path of a file with the user's password, wherever tasks run."),
    "token_file": _field("Token file", "Path of a file with the token, wherever tasks run."),
    "nkey_seed_file": _field("NKey seed file", "Path of a file with the seed, wherever tasks run."),
    "credentials_file": _field("Credentials file", "Path of a credentials file (.creds), wherever tasks run."),
    "tls_ca_file": _field(
        "TLS CA file", "Path of the certificate authority that signed the servers' certificates; enables TLS."
    ),
    "tls_cert_file": _field("TLS certificate file", "Path of the client's certificate; enables TLS."),
    "tls_key_file": _field("TLS key file", "Path of the key of the client's certificate, not encrypted."),
    "tls_server_name": _field(
        "TLS server name", "The name in the servers' certificates, where it isn't that of the address; enables TLS."
    ),
    "tls_handshake_first": _field(
        "TLS handshake first",
        "For servers with handshake_first: TLS begins before the server's first line; enables TLS.",
        type="boolean",
    ),
    "js_domain": _field("JetStream domain", "The domain of the queues, where it isn't that of the server."),
    "api_prefix": _field("JetStream API prefix", "What the API's subjects begin with, instead of a domain."),
    "inbox_prefix": _field(
        "Inbox prefix", "What the subjects of answers begin with; _INBOX where empty. Gives users inboxes of their own."
    ),
    "timeout": _field(
        "Timeout in seconds",
        "For connecting as a whole, and for each request.",
        type="number",
        minimum=0.1,
        maximum=300,
        default=10,
    ),
}

FIELD_BEHAVIOUR: Final[dict[str, Any]] = {
    "hidden-fields": ["schema", "extra"],
    "relabeling": {"host": "Servers", "login": "User"},
    "placeholders": {
        "host": "nats-1.example.org, nats-2.example.org (tls://… for TLS)",
        "port": "4222",
    },
}
