"""What another number of partitions would break while jobs are stored in them.

Another number sends the keys elsewhere: the stored jobs of a key and its new ones would have different consumers. And
where there are fewer, the last ones have no worker any more.
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
    connection: Connection, queue: WorkQueue, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Tell which consumers keep a queue from having the number of partitions that is declared.

    :param connection: the server
    :param queue: the declaration; its stream exists
    :param found: the server's configurations of the stream's consumers, declared or not, by name
    :return: why not, and what to do, by the consumer's name
    """
    blocks: dict[str, str] = {}
    families: dict[str, list[Consumer]] = {}
    for consumer in queue.consumers:
        if consumer.partition is not None:
            families.setdefault(consumer.base_name, []).append(consumer)
    for name, members in families.items():
        beyond = [each for each in found if _is_beyond(each, found[each], name, members)]
        there = [member.name for member in members if member.name in found]
        before = (_numbers_told(found, there) or {len(there) + len(beyond)}) - {len(members)}
        filters = [subject for member in members for subject in member.filter_subjects]
        left = {each: await _stored(connection, queue.name, _filters(found[each])) for each in beyond}
        if there and before:
            kept = await _stored(connection, queue.name, filters)
            if stored := kept + sum(left.values()):
                blocks[there[0]] = (
                    f"{name} would go from {max(before)} to {len(members)} partitions while {_jobs(stored)} stored in"
                    " them, and the later jobs of a key would have another consumer than those; stop publishing, let"
                    " workers finish, redrive or park its dead letters, then provision again; or declare a consumer of"
                    " another name on other subjects, publish there, and let this one run out"
                )
        for each, stored in left.items():
            if stored:
                blocks[each] = (
                    f"{name} is declared with {len(members)} partitions, and {_jobs(stored)} stored in this one beyond"
                    " them, which no worker of this declaration takes; run one with the declaration of before until"
                    " they are done"
                )
    return blocks


def _is_beyond(name: str, config: Mapping[str, Any], base: str, members: list[Consumer]) -> bool:
    """Tell whether a consumer is a partition that a larger number of them had."""
    number = name.removeprefix(f"{base}-")
    if name == number or not number.isdecimal() or int(number) < len(members):
        return False
    return all(
        any(_differ_by_number(ours, theirs, number) for ours in members[0].filter_subjects)
        for theirs in _filters(config)
    )


def _differ_by_number(first: str, other: str, number: str) -> bool:
    ours, theirs = first.split("."), other.split(".")
    different = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    return len(ours) == len(theirs) and different == [("0", number)]


def _numbers_told(found: Mapping[str, Mapping[str, Any]], names: list[str]) -> set[int]:
    """Tell how many partitions consumers were provisioned for; those made by hand say nothing."""
    told = [(found[name].get("metadata") or {}).get(PARTITIONS) for name in names]
    return {int(number) for number in told if number and number.isdecimal()}


def _filters(config: Mapping[str, Any]) -> list[str]:
    return config.get("filter_subjects") or [config.get("filter_subject") or ">"]


async def _stored(connection: Connection, stream: str, filters: list[str]) -> int:
    return sum([count for subject in filters async for _, count in subject_counts(connection, stream, subject)])


def _jobs(count: int) -> str:
    return "1 job is" if count == 1 else f"{count} jobs are"
