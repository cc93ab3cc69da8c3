"""What lies at many places of a buffer, looked at for all of them together.

Copying some tens of bytes from each place costs little beside a search through everything between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Octets = NDArray[np.uint8]

_MOST_DIGITS = 19
_POWERS = np.array([10**at for at in reversed(range(_MOST_DIGITS))], np.int64)
_ZERO = ord("0")
_DIGITS = 10


def blocks(data: Octets, starts: Integers, width: int) -> Octets:
    """Copy a block from each place.

    :param data: the buffer
    :param starts: the blocks' first bytes; every block lies within the buffer
    :param width: how many bytes each has, at least one
    :return: a row for each
    """
    places = np.ndarray((len(data) - width + 1,), np.dtype((np.void, width)), data, strides=(1,))
    return places[starts].view(np.uint8).reshape(len(starts), width)


def fours(data: Octets) -> NDArray[np.uint32]:
    """See a buffer as words of four bytes that begin at every byte.

    :param data: the buffer, at least as long as a word
    :return: as many as there is room for
    """
    return np.ndarray((len(data) - 3,), np.uint32, data, strides=(1,))


def eights(data: Octets) -> NDArray[np.uint64]:
    """See a buffer as words of eight bytes that begin at every byte.

    :param data: the buffer, at least as long as a word
    :return: as many as there is room for
    """
    return np.ndarray((len(data) - 7,), np.uint64, data, strides=(1,))


def value(digits: Octets) -> Integers | None:
    """Read numbers that have as many digits each.

    :param digits: a row for each
    :return: the numbers, or ``None`` if something there isn't a digit, or there are too many
    """
    width = digits.shape[1]
    numbers = digits - np.uint8(_ZERO)
    if not 0 < width <= _MOST_DIGITS or np.max(numbers, initial=0) >= _DIGITS:
        return None
    read: Integers = numbers @ _POWERS[_MOST_DIGITS - width :]
    # The largest numbers of nineteen digits don't fit, and come out negative.
    return read if width < _MOST_DIGITS or (read >= 0).all() else None
