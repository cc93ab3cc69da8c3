"""Counts what an action of the page would do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.redrive.preview import preview
from airflow_provider_jetstream.plugins.monitor.models.actions import DryRun, PatchedLetter
from airflow_provider_jetstream.tasks.redrive_request import request_for_action

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.plugins.monitor.models.actions import Act
    from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller


async def dry_run(
    poller: ServerPoller,
    queue: str,
    selection: Selection,
    action: Act,
    patch: JsonPatch | None = None,
    *,
    hidden: bool = False,
) -> DryRun:
    """Count what an action would do with the letters that are selected now.

    :param hidden: whether nothing about single letters is returned
    """
    request = request_for_action(action, selection, patch=patch)
    async with poller.connection() as connection:
        declared = await discover_queue(connection, queue)
        counts = (await preview(connection, declared, request)).as_json()
    return DryRun(
        protocol=counts["protocol"],
        guarantee=counts["guarantee"],
        redriven=counts["redriven"],
        parked=counts["parked"],
        failed=counts["failed"],
        failures={} if hidden else {str(sequence): reason for sequence, reason in counts["failures"].items()},
        causes={} if hidden else counts["causes"],
        changed=counts["changed"],
        samples=[
            PatchedLetter(
                sequence=letter["sequence"], job_id=readable_text(letter["job_id"]), difference=letter["difference"]
            )
            for letter in (counts["sample"] if patch else ())
        ],
        uncertain=counts["uncertain"],
        undeliverable=counts["undeliverable"],
        risks=counts["risks"],
        counted_at=datetime.now(UTC),
        awaits_ends=declared.events is not None,
        conf={
            "nats_conn_id": poller.conn_id,
            "queue": queue,
            "select": selection.model_dump(mode="json", exclude_defaults=True),
            "action": action,
            **({"patch": patch.text} if patch else {}),
        },
    )
