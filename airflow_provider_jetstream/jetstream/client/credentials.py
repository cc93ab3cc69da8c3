"""The fields of CONNECT that authenticate a client.

Protocol: CONNECT in "NATS Client Protocol"; keys and credentials files in "NKeys" and "JWT" of the NATS documentation.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import AuthenticationError, ConnectionSettingsError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.settings import SocketSettings

_SECTION = re.compile(r"-{3,}\s*BEGIN [A-Z ]+-{3,}\s*(?P<content>\S+)\s*-{3,}\s*END [A-Z ]+-{3,}")
_SECTIONS = 2


def credentials(settings: SocketSettings, server_info: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of CONNECT that authenticate the client.

    :param server_info: the server's INFO, with the nonce to be signed
    :raises AuthenticationError: the server doesn't support signatures, which the credentials need
    :raises ConnectionSettingsError: the key or the credentials are invalid
    """
    connection = settings.connection
    if connection.token:
        return {"auth_token": connection.token.get_secret_value()}
    if connection.user is not None and connection.password is not None:
        return {"user": connection.user, "pass": connection.password.get_secret_value()}
    if settings.credentials:
        jwt, seed = _sections(settings.credentials.get_secret_value())
        return {"jwt": jwt, **_signed(seed, server_info, "credentials", with_key=False)}
    if settings.nkey_seed:
        return _signed(settings.nkey_seed.get_secret_value().strip(), server_info, "nkey seed", with_key=True)
    return {}


def _sections(content: str) -> tuple[str, str]:
    sections = [match["content"] for match in _SECTION.finditer(content)]
    if len(sections) < _SECTIONS:
        raise ConnectionSettingsError(
            "expected credentials with a JWT and a seed between their BEGIN and END lines, found"
            f" {len(sections)} of the two: give the file as `nsc generate creds` writes it"
        )
    return sections[0], sections[1]


def _signed(seed: str, server_info: dict[str, Any], what: str, *, with_key: bool) -> dict[str, Any]:
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
    try:
        pair = nkeys.from_seed(bytearray(seed, "ascii"))
        signature = base64.b64encode(pair.sign(nonce.encode())).decode()
        key = pair.public_key.decode()
    except (nkeys.NkeysError, ValueError, IndexError) as error:
        # The error's text may contain the seed, so only its class is named.
        problem = type(error).__name__
    else:
        return {"sig": signature, **({"nkey": key} if with_key else {})}
    raise ConnectionSettingsError(f"the {what} can't be used: expected a user's seed (SU…), found {problem}")
