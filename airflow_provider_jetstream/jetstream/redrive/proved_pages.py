"""The pages of a scan for a redrive: the next one is proved while the one before is redriven."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

# What was proved longer ago than this is proved again before anything is done with it.
PROOF_SECONDS: Final = 0.5
# How many pages are proved at the same time as the next one: while the answers of one arrive, the others are judged.
_AHEAD: Final = 1


@dataclass(frozen=True, slots=True)
class ProvedPage:
    """A page of a scan.

    :param letters: dead letters that were selected
    :param dismissed: jobs that have entries and are no dead letters
    :param at: when the letters were proved at the earliest, in seconds of the monotonic clock
    """

    letters: Sequence[DeadLetter]
    dismissed: Sequence[NotDead]
    at: float


class ProvedPages:
    """Reads the pages of a scan in order; an async context manager.

    :param reads_ahead: whether the next pages are read while the caller works on the one before
    """

    def __init__(self, scan: Scan, selection: Selection, *, reads_ahead: bool) -> None:
        self._scan = scan
        ahead = _AHEAD if reads_ahead else 0
        self._pages = scan.pages(selection, ahead=ahead)
        # When the pages were asked for, of which the first is the next one.
        self._began: deque[float] = deque(maxlen=ahead + 1)
        self._reads_ahead = reads_ahead
        self._reading: asyncio.Task[ProvedPage | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading:
            self._reading.cancel()
            # What reading the next page raised doesn't matter any more.
            with suppress(asyncio.CancelledError, Exception):
                await self._reading
        await self._pages.aclose()

    async def next(self) -> ProvedPage | None:
        """Return the next page; ``None`` behind the last one."""
        page = await (self._reading or self._read())
        self._reading = asyncio.create_task(self._read()) if page and self._reads_ahead else None
        if page and page.dismissed and time.monotonic() - page.at > PROOF_SECONDS:
            again = await self._scan.classify([job.sequence for job in page.dismissed], refresh=True)
            return ProvedPage(page.letters, [job for job in again if isinstance(job, NotDead)], page.at)
        return page

    async def _read(self) -> ProvedPage | None:
        self._began.append(time.monotonic())
        if (page := await anext(self._pages, None)) is None:
            return None
        await self._scan.record_handled()
        # Its proof began as soon as the scan was asked for one so far before it.
        return ProvedPage(page.letters, page.dismissed, self._began[0])
