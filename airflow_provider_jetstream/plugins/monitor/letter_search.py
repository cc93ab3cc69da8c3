"""A search in the texts of a queue's letters: streamed, since nothing indexes them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, parse_record
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, readable_text
from airflow_provider_jetstream.jetstream.contract import letter_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.plugins.monitor.letter_view import letter_line, recorded_line
from airflow_provider_jetstream.plugins.monitor.models.search import FoundLetter, SearchEnd, SearchProgress

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from pydantic import BaseModel

    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, LetterTable
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding

Place: TypeAlias = Literal["job_id", "error", "body", "header"]
PLACES: tuple[Place, ...] = ("job_id", "error", "body", "header")
_AT_ONCE = 100
_PROGRESS_SECONDS = 0.5
# Proxies give up at 30 or 60 seconds; a search goes on where it stopped.
_SECONDS = 25.0


async def search_letters(
    scan: Scan,
    table: LetterTable,
    query: LetterQuery,
    hiding: Hiding,
    text: str,
    where: Collection[Place],
    after: int,
    limit: int,
    *,
    growing: bool,
) -> AsyncGenerator[BaseModel, None]:
    """Search a text, whatever its case; yield what is found, the progress, and at last how it ended.

    Letters in circulation or parked come first, each proved again; then, for job ids, what the audit knows of.

    :param after: only letters of higher sequences
    :param limit: how many to find at most
    :param growing: whether the letters are still being read for the first time; the search ends with those that are
        indexed, and goes on behind them
    """
    indexed = max(table.last, after)
    sequences = await table.page(query, after=after)
    started = reported = time.monotonic()
    read = found = 0
    yield SearchProgress(read=0, of=len(sequences))
    try:
        while read < len(sequences) and time.monotonic() - started <= _SECONDS:
            some, worked = sequences[read : read + _AT_ONCE], time.thread_time()
            for sequence, letter in zip(some, await scan.classify(some), strict=True):
                read += 1
                if line := _found(letter, query, hiding, text.casefold(), where):
                    found += 1
                    yield line
                if found >= limit:
                    yield SearchEnd(reason="limit", read=read, found=found, next_after=sequence)
                    return
            if time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                yield SearchProgress(read=read, of=len(sequences))
            # The other half of the core is the API server's.
            await asyncio.sleep(time.thread_time() - worked)
        if growing or read < len(sequences):
            last = sequences[read - 1] if read else after
            next_after = last if read < len(sequences) else max(last, indexed)
            yield SearchEnd(reason="time", read=read, found=found, next_after=next_after)
            return
        # Of which DAG they are isn't known any more.
        if "job_id" in where and not query.selection.parked and not hiding.of_unknown:
            async for record in _recorded(scan, table, text.casefold(), limit - found):
                found += 1
                yield record
    except JetStreamProviderError as error:
        yield SearchEnd(reason="error", read=read, found=found, problem=str(error))
        return
    yield SearchEnd(reason="all", read=read, found=found)


def _found(
    letter: DeadLetter | NotDead, query: LetterQuery, hiding: Hiding, text: str, where: Collection[Place]
) -> FoundLetter | None:
    if not isinstance(letter, DeadLetter) or not query.includes(letter):
        return None
    hidden = hiding.hides(letter)
    places = _places(letter, text, where, hidden=hidden)
    if not places:
        return None
    state: Literal["parked", "dead"] = "dead" if letter.parked is None else "parked"
    return FoundLetter(letter=letter_line(letter, hidden=hidden), state=state, where=places)


def _places(letter: DeadLetter, text: str, where: Collection[Place], *, hidden: bool) -> list[Place]:
    """Return what of a letter holds a text; what the user may not see isn't searched either."""
    found: list[Place] = []
    if "job_id" in where and text in readable_text(letter.job_id).casefold():
        found.append("job_id")
    if hidden:
        return found
    if "error" in where and any(
        text in readable_text(part).casefold()
        for part in (letter.death.error_class, letter.death.error_message, letter.death.explanation)
        if part
    ):
        found.append("error")
    if "body" in where and text in decode_text(letter.body).casefold():
        found.append("body")
    if "header" in where and any(
        text in readable_text(f"{name}: {value}").casefold() for name, value in letter.headers
    ):
        found.append("header")
    return found


async def _recorded(scan: Scan, table: LetterTable, text: str, limit: int) -> AsyncGenerator[FoundLetter, None]:
    """Find jobs by their ids that were letters and are none any more."""
    if scan.audit is None:
        return
    subject = letter_audit_subject(scan.audit.queue, 0).removesuffix("0") + "*"
    async for message in read_range(scan.connection, scan.audit.stream, subject):
        record = parse_record(LetterRecord, message)
        if record is None or record.created != scan.audit.created or not record.job_id:
            continue
        if text in record.job_id.casefold() and not await table.known([record.sequence]):
            yield FoundLetter(letter=recorded_line(record), state=record.action, where=["job_id"])
            limit -= 1
            if limit <= 0:
                return
