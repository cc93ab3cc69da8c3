"""Finds what a change of the number of partitions would break while jobs are stored in them.

With another number, keys map to other partitions: the stored jobs of a key and its new ones would have different
consumers. With a smaller number, the last partitions lose their workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import subject_counts
from airflow_provider_jetstream.jetstream.contract import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


async def resize_blockers(
    connection: Connection, queue: WorkQueue, existing: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return by consumer why a queue can't have the declared number of partitions now, and what to do.

    :param queue: the declaration; its stream exists
    :param existing: the server's configurations of the stream's consumers, declared or not, by name
    """
    blockers: dict[str, str] = {}
    declared: dict[str, list[Consumer]] = {}
    for consumer in queue.consumers:
        if consumer.partition is not None:
            declared.setdefault(consumer.base_name, []).append(consumer)
    for base_name, partitions in declared.items():
        surplus = [name for name in existing if _is_surplus(name, existing[name], base_name, partitions)]
        provisioned = [consumer.name for consumer in partitions if consumer.name in existing]
        counts = _recorded_counts(existing, provisioned) or {len(provisioned) + len(surplus)}
        other_counts = counts - {len(partitions)}
        filters = [subject for consumer in partitions for subject in consumer.filter_subjects]
        surplus_jobs = {name: await _stored(connection, queue.name, _filters(existing[name])) for name in surplus}
        if provisioned and other_counts:
            jobs = await _stored(connection, queue.name, filters)
            if stored := jobs + sum(surplus_jobs.values()):
                blockers[provisioned[0]] = (
                    f"{base_name} would go from {max(other_counts)} to {len(partitions)} partitions while"
                    f" {_jobs(stored)} stored in them, and the later jobs of a key would have another consumer than"
                    " those; stop publishing, let workers finish, redrive or park its dead letters, then provision"
                    " again; or declare a consumer of another name on other subjects, publish there, and let this one"
                    " run out"
                )
        for name, stored in surplus_jobs.items():
            if stored:
                blockers[name] = (
                    f"{base_name} is declared with {len(partitions)} partitions, and {_jobs(stored)} stored in this"
                    " surplus one, of which no worker of this declaration pulls; run a worker with the earlier"
                    " declaration until they are done"
                )
    return blockers


def _is_surplus(name: str, config: Mapping[str, Any], base_name: str, partitions: list[Consumer]) -> bool:
    """Return whether a consumer is a partition of an earlier, larger number of them."""
    number = name.removeprefix(f"{base_name}-")
    if name == number or not number.isdecimal() or int(number) < len(partitions):
        return False
    return all(
        any(_differ_by_number(declared, existing, number) for declared in partitions[0].filter_subjects)
        for existing in _filters(config)
    )


def _differ_by_number(first: str, other: str, number: str) -> bool:
    first_tokens, other_tokens = first.split("."), other.split(".")
    different = [pair for pair in zip(first_tokens, other_tokens, strict=False) if pair[0] != pair[1]]
    return len(first_tokens) == len(other_tokens) and different == [("0", number)]


def _recorded_counts(existing: Mapping[str, Mapping[str, Any]], names: list[str]) -> set[int]:
    """Return the numbers of partitions in the metadata of consumers; those made by hand have none."""
    counts = [(existing[name].get("metadata") or {}).get(PARTITIONS) for name in names]
    return {int(count) for count in counts if count and count.isdecimal()}


def _filters(config: Mapping[str, Any]) -> list[str]:
    return config.get("filter_subjects") or [config.get("filter_subject") or ">"]


async def _stored(connection: Connection, stream: str, filters: list[str]) -> int:
    return sum([count for subject in filters async for _, count in subject_counts(connection, stream, subject)])


def _jobs(count: int) -> str:
    return "1 job is" if count == 1 else f"{count} jobs are"
