"""Partitions: jobs of one key go to one consumer, chosen by a hash that publishers and servers share.

Protocol: FNV-1a with 32 bits over the key's UTF-8 bytes, modulo the number of partitions; what nats-server's own
subject mapping ``{{partition(N, …)}}`` computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from airflow_provider_jetstream.jetstream.queue.declaration import Consumer

PLACEHOLDER = "{partition}"

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193
_32_BITS = 0xFFFFFFFF


def partition_of(key: str | bytes, count: int) -> int:
    """Tell to which partition a key belongs.

    :param key: what jobs that belong together have in common; text counts as its UTF-8 bytes
    :param count: the number of partitions
    :return: from 0 to ``count - 1``
    :raises ValueError: there are no partitions
    """
    if count < 1:
        raise ValueError(f"expected at least 1 partition, found {count}")
    digest = _FNV_OFFSET
    for byte in key.encode() if isinstance(key, str) else key:
        digest = ((digest ^ byte) * _FNV_PRIME) & _32_BITS
    return digest % count


def partition_subject(template: str, partition: int | str) -> str:
    """Fill in a subject or filter.

    :param template: a subject or filter with :data:`PLACEHOLDER` in place of one token
    :param partition: what stands there
    :return: the subject or filter
    """
    return template.replace(PLACEHOLDER, str(partition))


def placeholder_problem(template: str) -> str | None:
    """Say what is wrong with the place of the partition in a subject.

    :param template: a subject or filter
    :return: one clause; ``None`` where it is one token of it, once
    """
    if template.split(".").count(PLACEHOLDER) == 1 and template.count("{") == 1:
        return None
    return f"expected {PLACEHOLDER} as one of its tokens, once"


def partition_count(consumers: Iterable[Consumer], template: str) -> int | None:
    """Tell among how many partitions the jobs of a subject are divided.

    :param consumers: a queue's consumers
    :param template: the jobs' subject, with :data:`PLACEHOLDER`
    :return: their number; ``None`` where no consumer in partitions takes such jobs
    """
    subject = partition_subject(template, 0)
    for consumer in consumers:
        if consumer.partition == 0 and covered_by_any(consumer.filter_subjects, subject):
            return consumer.partitions
    return None


def partition_base_name(consumer: Consumer) -> str:
    """Give the name under which a consumer in partitions was declared.

    :param consumer: one of the partitions' consumers
    :return: its name without the number
    """
    return consumer.name.removesuffix(f"-{consumer.partition}")


def partition_problems(consumer: Consumer) -> Iterator[str]:
    """Find what is wrong with how a consumer's partitions are declared.

    :param consumer: the declaration, before or after it became several
    :return: a sentence each
    """
    numbered = consumer.partition is not None
    if numbered and not (
        consumer.partitions is not None
        and 0 <= (consumer.partition or 0) < consumer.partitions
        and consumer.name.endswith(f"-{consumer.partition}")
    ):
        yield (
            f"consumer {consumer.name}: expected partition {consumer.partition} to be one of its partitions and the end"
            " of its name: declare partitions only, and the partition follows"
        )
    templates = consumer.partitions is not None and not numbered
    if templates and not consumer.filter_subjects:
        yield (
            f"consumer {consumer.name} has partitions and no filter subject: give it one such as"
            f' "tasks.{PLACEHOLDER}.>"'
        )
    for subject in consumer.filter_subjects:
        if templates and (problem := placeholder_problem(subject)):
            yield f"filter subject {subject!r} of consumer {consumer.name}, which has partitions: {problem}"
        if not templates and PLACEHOLDER in subject:
            yield f"filter subject {subject!r} of consumer {consumer.name} needs partitions: declare their number"
