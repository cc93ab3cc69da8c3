"""What will be asked for soon, so that a connection that knows how gets many messages for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Wanted:
    """Some messages of one stream.

    :param stream: the stream
    :param sequences: of messages, in order
    :param subjects: whose last messages are meant
    """

    stream: str
    sequences: Sequence[int] = ()
    subjects: Sequence[str] = ()
