"""Pull requests: the one builder of MSG.NEXT bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


PRIORITIZED = "prioritized"


PINNED = "pinned_client"


def priority_fields(config: Mapping[str, Any], priority: int = 0) -> dict[str, Any]:
    """Give what a pull request has to say besides, since a server refuses one that names no group.

    :param config: the consumer's configuration as the server gives it
    :param priority: 0 for who comes first, where the policy goes by that
    :return: fields of the request: the first of the consumer's groups; nothing where it has none
    """
    groups = config.get("priority_groups")
    if not groups:
        return {}
    return {"group": groups[0]} | ({"priority": priority} if config.get("priority_policy") == PRIORITIZED else {})
