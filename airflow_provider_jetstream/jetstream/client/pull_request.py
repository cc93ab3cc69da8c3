"""Pull requests: the one builder of the bodies of ``CONSUMER.MSG.NEXT``.

Protocol: ADR-13, "Pull Subscribe internals"; ADR-42, "Pull Consumer Priority Groups".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIORITIZED = "prioritized"
PINNED = "pinned_client"


def pull_subject(stream: str, consumer: str, api_prefix: str) -> str:
    """Return the subject of a consumer's pull requests."""
    return f"{api_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"


def pull_request(
    batch: int,
    *,
    expires: float = 0.0,
    no_wait: bool = False,
    max_bytes: int = 0,
    idle_heartbeat: float = 0.0,
    priority: Mapping[str, Any] | None = None,
) -> bytes:
    """Build the body of a pull request.

    :param batch: how many messages are requested
    :param expires: seconds after which the server ends the request; 0 for the server's default
    :param no_wait: whether the server ends the request at once where it has no message
    :param max_bytes: bytes that the messages may have together; 0 for no limit
    :param idle_heartbeat: seconds of silence after which the server reports that it is alive; 0 for never
    :param priority: what :func:`priority_fields` returns
    """
    request: dict[str, Any] = {"batch": batch}
    if expires:
        request["expires"] = round(expires * NANOSECONDS)
    if no_wait:
        request["no_wait"] = True
    if max_bytes:
        request["max_bytes"] = max_bytes
    if idle_heartbeat:
        request["idle_heartbeat"] = round(idle_heartbeat * NANOSECONDS)
    if priority:
        request |= priority
    return json.dumps(request).encode()


def priority_fields(config: Mapping[str, Any], priority: int = 0) -> dict[str, Any]:
    """Return the fields that a pull request needs where a consumer has priority groups; empty where it has none.

    The server refuses a request that names no group of such a consumer.

    :param config: the consumer's configuration as the server returns it
    :param priority: 0 for the clients that are served first, where the consumer's policy is ``prioritized``
    """
    groups = config.get("priority_groups")
    if not groups:
        return {}
    return {"group": groups[0]} | ({"priority": priority} if config.get("priority_policy") == PRIORITIZED else {})
