"""Partitions: a key always goes to the same consumer, by a hash that publishers and servers share.

Protocol: FNV-1a with 32 bits over the key's UTF-8 bytes, modulo the number of partitions; nats-server's own subject
mapping ``{{partition(N, …)}}`` computes the same.
"""

from __future__ import annotations

PLACEHOLDER = "{partition}"

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193
_32_BITS = 0xFFFFFFFF


def partition_of(key: str | bytes, count: int) -> int:
    """Return the partition of a key, from 0 to ``count - 1``.

    :param key: text is hashed as its UTF-8 bytes
    :param count: the number of partitions
    :raises ValueError: there are no partitions
    """
    if count < 1:
        raise ValueError(f"expected at least 1 partition, found {count}")
    digest = _FNV_OFFSET
    for byte in key.encode() if isinstance(key, str) else key:
        digest = ((digest ^ byte) * _FNV_PRIME) & _32_BITS
    return digest % count


def partition_subject(template: str, partition: int | str) -> str:
    """Return a subject or filter with a partition in place of :data:`PLACEHOLDER`."""
    return template.replace(PLACEHOLDER, str(partition))


def placeholder_problem(template: str) -> str | None:
    """Return what is wrong with the placeholder of a subject or filter; ``None`` where it is exactly one token."""
    if template.split(".").count(PLACEHOLDER) == 1 and template.count("{") == template.count("}") == 1:
        return None
    return f"expected {PLACEHOLDER} as one of its tokens, once"
