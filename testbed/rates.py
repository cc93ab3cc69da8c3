"""Counts what happens within a period of time."""

from collections.abc import Sequence


def most_within(moments: Sequence[float], period: float) -> int:
    """Return the largest number of moments in any period; its first and last moment belong to it.

    :param moments: in ascending order, in seconds
    """
    first = most = 0
    for last, moment in enumerate(moments):
        while moment - moments[first] > period:
            first += 1
        most = max(most, last - first + 1)
    return most
