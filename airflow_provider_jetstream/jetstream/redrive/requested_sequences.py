"""Checks that the sequences which a request names are dead letters that it selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

_NAMED = 5
_NO_ENTRY = "no entry in the dead letter queue"
_EXCLUDED = "it is dead, but the rest of the selection excludes it"
_PARKED = "it is parked; select parked to bring it back"


async def require_sequences(scan: Scan, selection: Selection, done: Collection[int] = ()) -> None:
    """Raise unless every sequence that a selection names is a dead letter that it selects.

    :param done: sequences that an earlier try of the redrive has handled
    :raises DeadLetterGoneError: a sequence isn't a selected dead letter (any more)
    """
    if selection.sequences is None:
        return
    missing = set(selection.sequences) - set(done)
    causes: dict[int, str] = {}
    async for page in scan.pages(selection):
        missing -= {letter.sequence for letter in page.letters}
        causes.update({job.sequence: job.status.meaning for job in page.dismissed})
    if not missing:
        return
    causes |= await _excluded(scan, missing)
    named = "; ".join(f"{sequence}: {causes.get(sequence, _NO_ENTRY)}" for sequence in sorted(missing)[:_NAMED])
    raise DeadLetterGoneError(
        f"expected dead letters of {scan.queue.name}, found otherwise for {len(missing)} of {len(selection.sequences)}"
        f" sequences ({named}); nothing was redriven: leave them out, or redrive all"
    )


async def _excluded(scan: Scan, sequences: set[int]) -> dict[int, str]:
    """Return for each dead letter that the rest of a selection excludes why it does."""
    causes: dict[int, str] = {}
    for parked, cause in ((False, _EXCLUDED), (True, _PARKED)):
        every = Selection(sequences=frozenset(sequences), reasons=frozenset(Reason), parked=parked)
        causes |= {letter.sequence: cause async for letter in scan.letters(every)}
    return causes
