"""What a consumer tells of a message in its reply subject: sequence, time, position.

Protocol: "JetStream wire API reference" in the NATS documentation; ADR-15 for the form with a domain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from airflow_provider_jetstream.spark.errors import WireError
from airflow_provider_jetstream.spark.gathering import as_integers, contents, gathered

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


def deliveries(replies: pa.BinaryArray) -> Deliveries:
    """Read the reply subjects of messages that one consumer delivered.

    :param replies: at least one
    :return: what they tell
    :raises WireError: they aren't a consumer's
    """
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
