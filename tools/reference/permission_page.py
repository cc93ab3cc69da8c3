"""The page about permissions: each line of the policies that ``jetstream-queue permissions`` prints."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream import WorkQueue, permissions
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES
from tools.reference.markdown import code, heading, join, table

QUEUE = {
    "name": "orders",
    "subjects": ["orders.jobs.>"],
    "consumers": [{"name": "worker", "max_deliver": 5, "ack_wait": "30s"}],
    "dead_letters": "orders-dead",
    "events": "orders-events",
    "archive": True,
    "schedules": True,
    "attempts": True,
}
_INTRO = (
    "Every line of the [policies](../permissions.md), for a queue `orders` with one consumer, a dead letter queue,"
    " events, an archive, an audit, schedules and attempts."
)


def permission_page() -> str:
    """Return the page."""
    queue = WorkQueue.load(QUEUE)
    parts = [heading(1, "Permissions of each role"), _INTRO]
    for role in ROLES:
        lines = permissions(queue, role).permissions
        rows = [(line.action, code(line.subject), line.purpose) for line in lines]
        parts += [heading(2, code(role)), table(("", "subject", "for"), rows)]
    return join(parts)
