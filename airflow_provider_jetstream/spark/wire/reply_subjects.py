"""What a consumer tells of a message in its reply subject: sequence, time, position.

Protocol: "JetStream wire API reference" in the NATS documentation; ADR-15 for the form with a domain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.spark.wire.arrow_buffers import as_integers, contents, gathered
from airflow_provider_jetstream.spark.wire.byte_blocks import blocks, value

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_DOT = ord(".")
# $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>
_DOTS = 8
_BEFORE_SEQUENCE = 4
# $JS.ACK.<domain>.<account>.<stream>.… and, with some servers, one more token at the end
_DOTS_WITH_DOMAIN = 10


class Deliveries(NamedTuple):
    """What a consumer tells of messages.

    :param sequences: in the stream
    :param positions: the consumer's own count
    :param times: when they were stored, in nanoseconds since 1970
    :param pending: what the consumer had left after the last of them
    """

    sequences: Integers
    positions: Integers
    times: Integers
    pending: int


def deliveries(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> Deliveries:
    """Read the reply subjects of messages that one consumer delivered.

    :param buffer: where they lie
    :param starts: their first bytes, ascending; at least one
    :param ends: the bytes after their last
    :return: what they tell
    :raises WireError: they aren't a consumer's
    """
    return _alike(buffer, starts, ends) or _each(gathered(buffer, starts, ends))


def _alike(buffer: bytearray | bytes, starts: Integers, ends: Integers) -> Deliveries | None:
    """Read them where they differ in digits only, as most that follow each other do."""
    first = bytes(buffer[int(starts[0]) : int(ends[0])])
    tokens = first.split(b".")
    if len(tokens) != _DOTS + 1 or (ends - starts != len(first)).any():
        return None
    found = blocks(np.frombuffer(buffer, np.uint8), starts, len(first))
    numbers, end = [], len(first)
    for token in reversed(tokens[_BEFORE_SEQUENCE + 1 :]):
        numbers.append(value(found[:, end - len(token) : end]))
        end -= len(token) + 1
        if not (found[:, end] == _DOT).all():
            return None
    if not (found[:, :end] == found[0, :end]).all():
        return None
    pending, times, positions, sequences = numbers
    if pending is None or times is None or positions is None or sequences is None:
        return None
    return Deliveries(sequences, positions, times, int(pending[-1]))


def _each(replies: pa.BinaryArray) -> Deliveries:
    content, bounds = contents(replies)
    dots = np.flatnonzero(content == _DOT)
    each, rest = divmod(len(dots), len(replies))
    table = dots.reshape(len(replies), each) if not rest else np.zeros((0, 0), np.int64)
    uniform = not rest and each >= _DOTS and (table[:, 0] >= bounds[:-1]).all() and (table[:, -1] < bounds[1:]).all()
    if not uniform or (each != _DOTS and each < _DOTS_WITH_DOMAIN):
        raise WireError(f"expected messages of a consumer, found the reply subject {replies[0].as_py()[:120]!r}")
    first = _BEFORE_SEQUENCE if each == _DOTS else _BEFORE_SEQUENCE + 2
    try:
        numbers = [as_integers(gathered(content, table[:, at] + 1, table[:, at + 1])) for at in range(first, first + 3)]
        sequences, positions, times = numbers
        return Deliveries(sequences, positions, times, int(replies[-1].as_py().split(b".")[first + 4]))
    except ValueError:
        raise WireError(f"expected numbers in the reply subject {replies[0].as_py()[:120]!r}") from None
