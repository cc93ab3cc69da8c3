"""Priority groups of consumers: what may be declared, and what each pull request then has to say.

Protocol: NATS ADR-42.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer

PriorityPolicy: TypeAlias = Literal["overflow", "prioritized", "pinned_client"]

# The server's API level that knows each, and its first version.
POLICY_LEVELS = {"overflow": (1, (2, 11, 0)), "pinned_client": (1, (2, 11, 0)), "prioritized": (2, (2, 12, 0))}

_GROUP = re.compile(r"[A-Za-z0-9/_=-]{1,16}")


def priority_problems(consumer: Consumer) -> Iterator[str]:
    """Find what is wrong with a consumer's priority groups.

    :param consumer: the declaration
    :return: a sentence each
    """
    groups, policy = consumer.priority_groups, consumer.priority_policy
    for group in groups:
        if not _GROUP.fullmatch(group):
            yield (
                f"consumer {consumer.name}: expected a priority group of 1 to 16 letters, digits, -, _, / and =, found"
                f" {group!r}"
            )
    for group in sorted({group for group in groups if groups.count(group) > 1}):
        yield f"consumer {consumer.name}: the priority group {group!r} is named twice: keep one"
    if groups and policy is None:
        yield (
            f"consumer {consumer.name} has priority groups ({', '.join(groups)}) without a policy, which the server"
            " refuses: set priority_policy to overflow or prioritized"
        )
    if policy is not None and not groups:
        yield (
            f"consumer {consumer.name} has the priority policy {policy} without a group, which the server refuses: name"
            ' one in priority_groups, such as ["workers"]'
        )
