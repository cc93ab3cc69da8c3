"""The INFO by which a server introduces itself, checked before anything relies on it.

Protocol: INFO in "NATS Client Protocol". Whoever answers at an address may send anything.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE

_VERSION: Final = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}(?:[-+][0-9A-Za-z.+-]{0,64})?")
_FLAGS: Final = ("tls_required", "tls_available", "tls_verify", "auth_required", "headers", "jetstream", "ldm")
_ADDRESS: Final = re.compile(r"\[?[^\s/@#?\\\[\]]{1,255}\]?:[0-9]{1,5}")
_TEXTS: Final = ("nonce", "domain", "server_id", "server_name", "client_ip", "cluster")


def parse_server_info(content: bytes) -> dict[str, Any]:
    """Parse the JSON of an INFO line.

    :raises WireError: no nats-server has sent this
    """
    if len(content) > PROTOCOL_LINE:
        raise WireError(f"expected INFO of a nats-server, found a line of {len(content)} bytes")
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        raise WireError(f"expected INFO of a nats-server, found {content[:40]!r}") from None
    if not isinstance(info, dict):
        raise WireError(f"expected INFO of a nats-server, found {content[:40]!r}")
    if problem := _problem(info):
        raise WireError(f"expected INFO of a nats-server, found {problem}")
    return info


def server_version(info: dict[str, Any]) -> tuple[int, ...]:
    """Return the version of a server by its parsed INFO, as three numbers."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", info["version"])[:3])


def _problem(info: dict[str, Any]) -> str | None:
    version, largest = info.get("version"), info.get("max_payload")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        return f"the version {str(version)[:40]!r}"
    if not isinstance(largest, int) or isinstance(largest, bool) or not 0 < largest <= MESSAGE:
        return f"a max_payload of {str(largest)[:40]!r}"
    for name in _FLAGS:
        if not isinstance(info.get(name, False), bool):
            return f"{name} with another value than true or false"
    for name in _TEXTS:
        if not isinstance(info.get(name, ""), str):
            return f"{name} with another value than text"
    addresses = info.get("connect_urls") or []
    if not isinstance(addresses, list) or not all(
        isinstance(item, str) and _ADDRESS.fullmatch(item) for item in addresses
    ):
        return "connect_urls that aren't addresses"
    return None
