"""Finds out what became of the letters of redrives that were cut off, and finishes what they began.

The intent of such a letter has no record behind it in the audit. Its new job, or its parked record, may be stored all
the same. Evidence, in this order: the copy in the stream that was to store it, or in that stream's archive; the parked
record in the dead letter queue. A letter of which nothing is stored is redriven as any other. One whose new
job may have run unseen is set aside, until a request names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.audit.intent import read_open_intents
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import parked_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.status import ENDED
from airflow_provider_jetstream.jetstream.queue.server_uptime import server_up_since
from airflow_provider_jetstream.jetstream.redrive.copies import CopySearch, find_copies, is_record_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.intent import IntendedLetter, IntentLog, OpenIntent
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.redrive.letter_records import Done, LetterRecords
    from airflow_provider_jetstream.jetstream.redrive.steps import Steps

# No request is sent so long after its intent: the lease has run out, and the client has dropped it.
_LATEST = timedelta(minutes=15)
# What is stored once more has to arrive inside the duplicate window.
_MARGIN = timedelta(seconds=10)

_UNRECORDED = "an earlier redrive stored its new job, but that couldn't be recorded; run it again soon"
_UNDECIDED = "an earlier redrive was cut off while it was about to store its new job; run it again soon"
_UNREPEATED = "an earlier redrive may have stored its new job, which couldn't be found out now; run it again soon"
# What the next redrive may find out.
_RETRIED = frozenset({_UNRECORDED, _UNDECIDED, _UNREPEATED})

_Opened: TypeAlias = "Mapping[int, Sequence[OpenIntent]]"
# A target's stream, its creation and its archive.
_Place: TypeAlias = tuple[str, str, str | None]


@dataclass(slots=True)
class RecoveredLetters:
    """What became of letters.

    :param stored: letters whose new job or parked record is stored, with the record of that
    :param repeatable: letters whose new job may be stored once more: if it is stored, the server drops the second one
    :param unknown: by stream sequence why it can't be known
    """

    stored: list[Done] = field(default_factory=list)
    repeatable: list[DeadLetter] = field(default_factory=list)
    unknown: dict[int, str] = field(default_factory=dict)


async def recover(
    connection: Connection,
    context: ScanContext,
    classify: Callable[[list[int]], Awaitable[Sequence[DeadLetter | NotDead]]],
    steps: Steps,
    intents: IntentLog,
    since: int | None,
    *,
    can_repeat: bool = True,
) -> None:
    """Finish the intents of redrives that were cut off; set aside the letters whose progress isn't known.

    :param context: of the scan that has just begun
    :param classify: proves letters by their stream sequences
    :param steps: of the redrive that is about to begin
    :param intents: of the same redrive, which carries on the intents that stay open
    :param since: the audit's sequence from which intents may be open; ``None`` where none is
    :param can_repeat: whether letters' new jobs may be stored once more as the request says
    """
    opened = await read_open_intents(connection, intents.audit, since) if since else {}
    if not opened:
        return
    results = await classify(sorted(opened))
    letters = [result for result in results if isinstance(result, DeadLetter)]
    undecided = [
        result.sequence for result in results if not isinstance(result, DeadLetter) and result.status not in ENDED
    ]
    recovered = await recover_letters(connection, context, steps, opened, letters, can_repeat=can_repeat)
    steps.set_aside = recovered.unknown | dict.fromkeys(undecided, _UNDECIDED)
    await _carry_on(intents, opened, steps.set_aside)


async def recover_letters(
    connection: Connection,
    context: ScanContext,
    steps: Steps,
    opened: _Opened,
    letters: Sequence[DeadLetter],
    *,
    can_repeat: bool = True,
) -> RecoveredLetters:
    """Finish what was begun for letters.

    :param opened: their intents, by stream sequence
    :param letters: letters that were just proved
    :param can_repeat: whether their new jobs may be stored once more as the request says
    """
    up_since = await server_up_since(connection, context.audit) if context.audit else None
    letters_stream = context.dead_letter_queue["config"]["name"]
    found = await look_up(connection, letters_stream, steps.records, opened, letters, up_since)
    recorded = await steps.finish_begun(found.stored)
    found.unknown |= {record.sequence: _UNRECORDED for _, record in found.stored if record.sequence not in recorded}
    if can_repeat:
        recorded |= await steps.repeat(found.repeatable, opened)
    found.unknown |= {letter.sequence: _UNREPEATED for letter in found.repeatable if letter.sequence not in recorded}
    return found


async def look_up(
    connection: Connection,
    dead_letter_queue: str,
    records: LetterRecords,
    opened: _Opened,
    letters: Sequence[DeadLetter],
    up_since: datetime | None,
) -> RecoveredLetters:
    """Find out how far letters came.

    :param opened: their intents, by stream sequence
    :param letters: proved letters with intents
    :param up_since: since when the server hasn't restarted, as far as that is known
    """
    findings = RecoveredLetters()
    searches = await _search_all(connection, [opened[letter.sequence] for letter in letters])
    for letter in letters:
        done = await _stored(connection, dead_letter_queue, records, letter, opened[letter.sequence], searches)
        if done:
            findings.stored.append(done)
            continue
        open_copies = [
            found
            for found in opened[letter.sequence]
            if found.intent.action == "redriven" and not searches[_place(found)].complete
        ]
        if not open_copies:
            continue
        if all(_is_repeatable(found, searches[_place(found)], up_since) for found in open_copies):
            findings.repeatable.append(letter)
        else:
            findings.unknown[letter.sequence] = open_copies[0].intent.why or _unknown(open_copies[0])
    return findings


async def _search_all(connection: Connection, letters: Sequence[Sequence[OpenIntent]]) -> dict[_Place, CopySearch]:
    """Look for the new jobs of letters, once in each stream; where that was in vain before, it isn't done again."""
    places: dict[_Place, list[OpenIntent]] = {}
    for found in (found for intents in letters for found in intents if found.intent.action == "redriven"):
        places.setdefault(_place(found), []).append(found)
    searches: dict[_Place, CopySearch] = {}
    for place, intents in places.items():
        wanted = [found for found in intents if found.intent.why is None]
        searches[place] = CopySearch()
        if wanted:
            first = min(wanted, key=lambda found: found.intent.target.last)
            until = max(found.at for found in wanted) + _LATEST
            copies: dict[str, set[str]] = {}
            for found in wanted:
                copies.setdefault(found.message_id, set()).add(found.content)
            searches[place] = await find_copies(connection, first.intent.target, copies, until)
    return searches


async def _stored(
    connection: Connection,
    dead_letter_queue: str,
    records: LetterRecords,
    letter: DeadLetter,
    intents: Sequence[OpenIntent],
    searches: Mapping[_Place, CopySearch],
) -> Done | None:
    """Return the record of what is stored for a letter; ``None`` where nothing is known to be."""
    if letter.copy_sequence is not None:
        return letter, records.of_begun(letter)
    for found in intents:
        if found.intent.action == "redriven":
            if copy := searches[_place(found)].found.get((found.message_id, found.content)):
                stream = found.intent.target.stream
                new_stream = stream if stream != letter.death.stream else None
                sequence, subject = copy.sequence, copy.subject
                record = records.record(
                    *(letter, "redriven"), new_sequence=sequence, subject=subject, new_stream=new_stream
                )
                return letter, record
            continue
        subject = parked_subject(letter.death.stream, letter.death.consumer, letter.sequence)
        parked = await last_message(connection, dead_letter_queue, subject)
        if parked and parked.sequence > found.intent.target.last and is_record_of(letter, parked):
            return letter, records.record(letter, "parked", new_sequence=parked.sequence, subject=letter.subject)
    return None


def _is_repeatable(found: OpenIntent, search: CopySearch, up_since: datetime | None) -> bool:
    if search.now is None or up_since is None or found.at < up_since:
        return False
    return search.now + _MARGIN < found.at + search.duplicate_window


async def _carry_on(intents: IntentLog, opened: _Opened, aside: Mapping[int, str]) -> None:
    """Record the intents that stay open once more, behind the closed ones, where the next redrive finds them."""
    groups: dict[int, tuple[OpenIntent, list[IntendedLetter]]] = {}
    for sequence in aside:
        for found in opened[sequence]:
            groups.setdefault(id(found.intent), (found, []))[1].append((sequence, found.message_id, found.content))
    for found, letters in groups.values():
        reasons = {aside[sequence] for sequence, _, _ in letters}
        whys = reasons if reasons.isdisjoint(_RETRIED) else {None}
        await intents.begin(
            *(found.intent.action, found.intent.target, letters),
            begun_at=found.at,
            why=next(iter(whys)) if len(whys) == 1 else None,
        )


def _place(found: OpenIntent) -> _Place:
    target = found.intent.target
    return target.stream, target.created, target.archive


def _unknown(found: OpenIntent) -> str:
    target = found.intent.target
    archive = f"its archive {target.archive} has no copy of it" if target.archive else "it has no archive"
    return (
        f"whether the redrive that began at {found.at:%Y-%m-%dT%H:%M:%SZ} and was cut off stored its new job isn't"
        f" known: {target.stream} no longer holds all that it stored since, and {archive}; find out whether the job has"
        " run, and redrive it by its sequence if it hasn't; original kept"
    )
