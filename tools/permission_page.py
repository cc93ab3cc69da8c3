"""Writes the tables of docs/permissions.md from what the command ``jetstream-queue permissions`` prints."""

from __future__ import annotations

import sys

from airflow_provider_jetstream.jetstream import WorkQueue, permissions
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES
from testbed.code_blocks import ROOT

PAGE = ROOT / "docs" / "permissions.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"

QUEUE = {
    "name": "orders",
    "subjects": ["orders.jobs.>"],
    "consumers": [{"name": "worker", "max_deliver": 5, "ack_wait": "30s"}],
    "dead_letters": "orders-dead",
    "events": "orders-events",
    "archive": True,
    "schedules": True,
}


def tables() -> str:
    """Return a table for each role."""
    queue = WorkQueue.load(QUEUE)
    parts = []
    for role in ROLES:
        lines = permissions(queue, role).permissions
        rows = [f"| {line.action} | `{line.subject}` | {line.purpose} |" for line in lines]
        parts.append("\n".join([f"### `{role}`", "", "| | subject | for |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with the tables of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE} is written\n")
