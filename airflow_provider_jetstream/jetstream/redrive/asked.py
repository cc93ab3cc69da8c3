"""Making sure that every letter that was asked for by its sequence is there, before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.death import Reason
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

_NAMED = 5
_UNTOLD = "no entry in the dead letter queue"
_EXCLUDED = "it is dead, but the rest of the selection excludes it"
_PARKED = "it is parked; select parked to bring it back"


async def require_asked(scan: Scan, selection: Selection, done: Collection[int] = ()) -> None:
    """Do nothing if all sequences of a selection are dead letters that it selects.

    :param scan: the look at the queue
    :param selection: which dead letters are asked for
    :param done: sequences that an earlier try has brought back
    :raises DeadLetterGoneError: some aren't (any more)
    """
    if selection.sequences is None:
        return
    missing = set(selection.sequences) - set(done)
    told: dict[int, str] = {}
    async for page in scan.pages(selection):
        missing -= {letter.sequence for letter in page.letters}
        told.update({each.sequence: each.verdict.meaning for each in page.dismissed})
    if not missing:
        return
    told |= await _excluded(scan, missing)
    named = "; ".join(f"{sequence}: {told.get(sequence, _UNTOLD)}" for sequence in sorted(missing)[:_NAMED])
    raise DeadLetterGoneError(
        f"expected dead letters of {scan.queue.name}, found otherwise for {len(missing)} of {len(selection.sequences)}"
        f" sequences ({named}); nothing was redriven: leave them out, or redrive all"
    )


async def _excluded(scan: Scan, sequences: set[int]) -> dict[int, str]:
    """Tell which of the sequences the rest of a selection excludes."""
    told: dict[int, str] = {}
    for parked, meaning in ((False, _EXCLUDED), (True, _PARKED)):
        every = Selection(sequences=frozenset(sequences), reasons=frozenset(Reason), parked=parked)
        told |= {letter.sequence: meaning async for letter in scan.letters(every)}
    return told
