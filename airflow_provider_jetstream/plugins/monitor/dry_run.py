"""Counting what the DAG that redrives would do, and telling what to trigger it with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.client.readahead import read_ahead
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.redrive.preview import preview
from airflow_provider_jetstream.plugins.monitor.models import DryRun
from airflow_provider_jetstream.reprocessing.actions import request_for_action

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.plugins.monitor.models import Act


async def dry_run(connection: str, queue: str, selection: Selection, action: Act) -> DryRun:
    """Count what would be done, and change nothing.

    :param connection: the Airflow connection's id
    :param queue: the queue
    :param selection: which letters
    :param action: what with them
    :return: the counts
    :raises RedriveOrderError: what is asked for isn't possible here
    :raises QueueDeclarationError: the queue has no dead letter queue
    :raises NotFoundError: the queue doesn't exist
    """
    async with JetStreamHook(connection).shared() as opened:
        declared = await discover_queue(opened, queue)
        # What is counted has changed a moment later anyway; the DAG proves each letter before it acts.
        found = await preview(
            await read_ahead(opened, declared.name, declared.companion_names()),
            declared,
            request_for_action(action, selection),
        )
    told = found.as_json()
    conf: dict[str, Any] = {
        "nats_conn_id": connection,
        "queue": queue,
        "select": selection.model_dump(mode="json", exclude_defaults=True),
        "action": action,
    }
    return DryRun(
        protocol=told["protocol"],
        guarantee=told["guarantee"],
        redriven=told["redriven"],
        parked=told["parked"],
        failed=told["failed"],
        failures={str(sequence): reason for sequence, reason in told["failures"].items()},
        uncertain=told["uncertain"],
        undeliverable=told["undeliverable"],
        risks=told["risks"],
        counted_at=datetime.now(UTC),
        conf=conf,
    )
