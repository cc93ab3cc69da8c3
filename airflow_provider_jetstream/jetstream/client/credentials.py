"""The CONNECT of a client, with the fields that authenticate it; both kinds of connection send it.

Protocol: CONNECT in "NATS Client Protocol"; keys and credentials files in "NKeys" and "JWT" of the NATS documentation.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import AuthenticationError, ConnectionSettingsError
from airflow_provider_jetstream.jetstream.line_text import shown_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import SecretStr

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

# The content is matched lazily: in a form's field the line ends may be missing, and dashes follow it directly.
_SECTION = re.compile(r"-{3,10}\s*BEGIN [A-Z ]{1,40}-{3,10}\s*(?P<content>\S+?)\s*-{3,10}\s*END [A-Z ]{1,40}---")
_SECTIONS = 2
_LARGEST_FILE = 1 << 16


def connect_command(settings: ConnectionSettings, server_info: Mapping[str, Any]) -> bytes:
    """Return the line by which a client introduces itself; called after TLS is there, where it was asked for.

    :param server_info: the server's INFO, with the nonce to be signed
    :raises AuthenticationError: the server doesn't support signatures, which the credentials need
    :raises ConnectionSettingsError: a file, the key or the credentials are invalid
    """
    options = {
        "verbose": False,
        "pedantic": False,
        "headers": True,
        "no_responders": True,
        "protocol": 1,
        "lang": "python3",
        "version": "1",
        "name": settings.name,
        "echo": True,
        "tls_required": settings.encrypted,
        **_credentials(settings, server_info),
    }
    return f"CONNECT {json.dumps(options)}\r\n".encode()


def check_credentials(settings: ConnectionSettings) -> None:
    """Refuse files and credentials that can't be used, before anything is tried with them.

    :raises ConnectionSettingsError: a file or the credentials are invalid
    """
    for field in ("password", "token", "nkey_seed_secret"):
        _content(settings, field, field.replace("_secret", "") + "_file")
    if content := _content(settings, "credentials_secret", "credentials_file"):
        _sections(content)


def _credentials(settings: ConnectionSettings, server_info: Mapping[str, Any]) -> dict[str, Any]:
    if settings.user is not None:
        return {"user": settings.user, "pass": _content(settings, "password")}
    if token := _content(settings, "token").strip():
        return {"auth_token": token}
    if content := _content(settings, "credentials_secret", "credentials_file"):
        jwt, seed = _sections(content)
        return {"jwt": jwt, **_signed(seed, server_info, "credentials", with_key=False)}
    if seed := _content(settings, "nkey_seed_secret", "nkey_seed_file").strip():
        return _signed(seed, server_info, "nkey seed", with_key=True)
    return {}


def _content(settings: ConnectionSettings, secret_field: str, file_field: str = "") -> str:
    secret: SecretStr | None = getattr(settings, secret_field)
    if secret is not None:
        return secret.get_secret_value()
    field = file_field or f"{secret_field}_file"
    path: str | None = getattr(settings, field)
    return "" if path is None else _file_content(field, path)


def _file_content(field: str, path: str) -> str:
    problem = "an empty file"
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    else:
        if content.strip() or field == "password_file":
            return content.strip()
    raise ConnectionSettingsError(
        f"{field}: expected a readable file at {shown_path(path)} wherever tasks run, found: {problem}"
    )


def _sections(content: str) -> tuple[str, str]:
    sections = [match["content"] for match in _SECTION.finditer(content)]
    if len(sections) < _SECTIONS:
        raise ConnectionSettingsError(
            "expected credentials with a JWT and a seed between their BEGIN and END lines, found"
            f" {len(sections)} of the two: give the file as `nsc generate creds` writes it"
        )
    return sections[0], sections[1]


def _signed(seed: str, server_info: Mapping[str, Any], what: str, *, with_key: bool) -> dict[str, Any]:
    nonce = server_info.get("nonce")
    if not nonce:
        raise AuthenticationError(
            f"expected a server that asks for a signature, found one that doesn't: remove the {what}"
        )
    try:
        import nkeys
    except ImportError:
        raise ConnectionSettingsError(
            f"expected the package nkeys wherever tasks run, found none: the {what} can't be used without it"
        ) from None
    problem = "the seed of something else"
    try:
        pair = nkeys.from_seed(bytearray(seed, "ascii"))
        signature = base64.b64encode(pair.sign(str(nonce).encode())).decode()
        key = pair.public_key.decode()
    except (nkeys.NkeysError, ValueError, IndexError) as error:
        # The error's text may contain the seed, so only its class is named.
        problem = type(error).__name__
    else:
        if key.startswith("U"):
            return {"sig": signature, **({"nkey": key} if with_key else {})}
    raise ConnectionSettingsError(f"the {what} can't be used: expected a user's seed (SU…), found {problem}")
