"""Claims the entries of letters from the handlers of the dead letter queue, so that each letter has one taker.

The server delivers an entry to whoever pulls first: the handler, or a redrive that pulls through the handler's own
consumer. A redrive holds what it has pulled by in-progress acknowledgements. Just before it stores a letter's new job,
it terminates the letter's entries, after which no handler can get them; the server reports the termination to the
audit, so that a scan doesn't mistake it for the work of a handler. What the redrive doesn't take, it gives back by a
nak.

The entries of a job that is gone are all that is left of it. They are held until the new job is stored and recorded.

An entry whose deliveries are used up never reaches the handler again, so it needs no claim.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import entry_copies_filter, entry_terminations
from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import read_handlers, removes_acknowledged
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import REMOVAL_DELAY
from airflow_provider_jetstream.jetstream.dead_letters.removed_entries import CLAIMED
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, TransientError
from airflow_provider_jetstream.jetstream.redrive.held_entries import Claim, HeldEntries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
# A redrive waits for entries that a handler has until the handler's ack wait has passed, but no longer than this.
_LONGEST_WAIT = timedelta(seconds=30)
_MARGIN = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class ClaimedLetters:
    """What a claim has found.

    :param ready: letters whose entries no handler can get
    :param gone: letters of which an entry was removed meanwhile: by a handler, or by another redrive
    :param busy: letters of which a handler has an entry
    """

    ready: list[DeadLetter]
    gone: list[DeadLetter]
    busy: list[DeadLetter]


class Claims:
    """The entries that one redrive has claimed; an async context manager, which gives back what is left at its end.

    :param queue: the work queue
    :param config: the dead letter queue's configuration
    :param reports_terminations: whether the audit stores the server's reports of terminated entries
    """

    def __init__(
        self, connection: Connection, queue: str, config: Mapping[str, Any], *, reports_terminations: bool
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._config = config
        self._stream: str = config["name"]
        self._terminates = reports_terminations
        self._held = HeldEntries(connection, queue, config)
        # By the stream sequence of the job: the entries that were claimed for it.
        self._claimed: dict[int, list[Claim]] = {}
        self._taken: set[int] = set()

    @classmethod
    def of_scan(cls, connection: Connection, context: ScanContext) -> Claims | None:
        """Return the claims of a redrive; ``None`` where an acknowledgement doesn't remove entries.

        :param context: of the redrive's scan
        :raises RedriveRequestError: what handlers have handled can't be known now
        """
        config, audit, queue = context.dead_letter_queue["config"], context.audit, context.snapshot.queue
        if not removes_acknowledged(config):
            return None
        subjects = (audit["config"].get("subjects") or []) if audit else []
        copies = entry_copies_filter(queue)
        is_copied = (config.get("republish") or {}).get("dest") == copies
        if context.handlers and is_copied and not covered_by_any(subjects, copies):
            raise RedriveRequestError(
                f"expected an audit that stores {copies}, the copies of the entries of {config['name']}, found"
                f" {'an audit that does not' if audit else 'none'}: which letters its consumer"
                f" {', '.join(context.handler_names)} has handled isn't known, and they would run again; provision the"
                " queue again"
            )
        reports = covered_by_any(subjects, entry_terminations(config["name"]))
        return cls(connection, queue, config, reports_terminations=reports)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.give_back_all()

    async def claim(self, letters: Sequence[DeadLetter]) -> ClaimedLetters:
        """Claim the entries of letters; return as soon as any letter is ready or gone.

        Where a handler has all of them, it waits until the handler's ack wait has passed.

        :raises TransientError: the server didn't answer
        """
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            self._held.forget_lost()
            subjects = await self._stored_subjects(letters)
            handlers = await read_handlers(self._connection, self._config, self._queue)
            self._held.forget_recreated(handlers)
            await self._held.pull(handlers, subjects)
            found = await self._sort(letters, subjects)
            waits = [wait for handler in handlers for wait in handler.waits]
            limit = min(max(waits, default=timedelta()), _LONGEST_WAIT) + _MARGIN
            if found.ready or found.gone or time.monotonic() - began > limit.total_seconds():
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def take(self, letters: Sequence[DeadLetter]) -> dict[int, str]:
        """Terminate the claimed entries of letters whose jobs are stored, so that no handler gets them any more.

        :param letters: letters that are ready
        :return: by stream sequence why a letter can't be redriven now
        """
        self._held.forget_lost()
        stored = {letter.sequence for letter in letters if letter.source == BodySource.QUEUE}
        wanted = {claim: letter.sequence for letter in letters for claim in self._claimed.pop(letter.sequence, ())}
        failed = {
            sequence: f"the claim of its entry {claim[1]} has ended, and a handler may have it now; run it again"
            for claim, sequence in wanted.items()
            if not self._held.is_held(claim)
        }
        # The body of a job that is gone is in its entries, or in an archive that keeps it for the sake of the entries.
        ended = [claim for claim, sequence in wanted.items() if sequence not in failed and sequence in stored]
        if self._terminates and ended:
            requests = [(self._held.reply(claim), f"+TERM {CLAIMED}".encode()) for claim in ended]
            answers = await self._connection.request_many(requests)
            for claim, answer in zip(ended, answers, strict=True):
                if isinstance(answer, TransientError):
                    failed[wanted[claim]] = f"its entry {claim[1]} couldn't be taken ({answer}); run it again"
                    continue
                self._held.drop([claim])
                if self._config["retention"] == "workqueue":
                    # An interest stream keeps the entry for its other consumers.
                    self._taken.add(claim[1])
        return failed

    def release(self, letter: DeadLetter) -> list[int]:
        """End the claims of a letter that is done; return its entries that :meth:`take` hasn't removed.

        They aren't given back either: no handler may get what is done.
        """
        left = [entry for entry in letter.entries if entry not in self._taken]
        self._held.drop(self._held.of(left))
        return left

    async def _stored_subjects(self, letters: Sequence[DeadLetter]) -> dict[int, str]:
        """Return the subjects of the letters' entries that are stored now."""
        entries = [entry for letter in letters for entry in letter.entries]

        async def subject(entry: int) -> str | None:
            message = await get_message(self._connection, self._stream, entry)
            return message.subject if message else None

        found = zip(entries, await map_concurrently(subject, entries), strict=True)
        return {entry: subject for entry, subject in found if subject is not None}

    async def _sort(self, letters: Sequence[DeadLetter], subjects: Mapping[int, str]) -> ClaimedLetters:
        # Counted before the consumers are read: what arrives in between counts as somebody else's.
        held = self._held.counts()
        handlers = await read_handlers(self._connection, self._config, self._queue)
        # Entries that a handler may get.
        open_entries: set[int] = set()
        any_used_up = False
        for handler in handlers:
            for entry, subject in subjects.items():
                if (handler.name, entry) in self._held or not handler.takes(subject):
                    continue
                if handler.has_used_up(entry, others=handler.in_flight - held[handler.name]):
                    any_used_up = True
                else:
                    open_entries.add(entry)
        if any_used_up:
            # An acknowledged entry leaves the stream a moment after the consumer's state has changed.
            await asyncio.sleep(REMOVAL_DELAY)
            subjects = await self._stored_subjects(letters)
        found = ClaimedLetters([], [], [])
        for letter in letters:
            if any(entry not in subjects for entry in letter.entries):
                found.gone.append(letter)
            elif any(entry in open_entries for entry in letter.entries):
                found.busy.append(letter)
            else:
                self._claimed[letter.sequence] = self._held.of(letter.entries)
                found.ready.append(letter)
        return found
