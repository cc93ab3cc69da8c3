"""Keeps the passes of Python's garbage collector short while triggers wait.

A full pass looks at all objects of the process, and stops all of its threads meanwhile: with the objects of Airflow and
of ten thousand triggers for a tenth of a second and more, in which every trigger is late. What lives as long as a wait
is therefore left out of passes (:func:`gc.freeze`, as Airflow does in the processes that it forks) until the last wait
has ended. Reference counting frees such objects as before; only what is part of a circle stays until then.
"""

from __future__ import annotations

import gc
from typing import Final

# The objects of so many waits are looked at by a full pass, some milliseconds long.
_WAITS = 512


class ShortCollections:
    """Leaves what is allocated so far out of full passes, in a ``with`` around each wait."""

    # One for all waits: none of them needs anything of its own.
    def __init__(self) -> None:
        self._waits = 0
        self._freeze_at = 1

    def __enter__(self) -> None:
        """Begin a wait that has its modules and its connection."""
        self._waits += 1
        if self._waits < self._freeze_at:
            return
        gc.freeze()
        # At a new highest number only, so that what is never looked at is bounded where waits come and go.
        self._freeze_at = self._waits + _WAITS

    def __exit__(self, *_: object) -> None:
        """End a wait."""
        self._waits -= 1
        if self._waits == 0:
            self._freeze_at = 1
            gc.unfreeze()


SHORT_COLLECTIONS: Final = ShortCollections()
