"""Claims the entries of letters from the handlers of the dead letter queue, so that each letter has one taker.

The server delivers an entry to whoever pulls first: the handler, or a redrive that pulls through the handler's own
consumer. A redrive holds what it has pulled by in-progress acknowledgements. Just before it stores a letter's new job,
it terminates the letter's entries, after which no handler can get them; the server reports the termination to the
audit, so that a scan doesn't mistake it for the work of a handler. What the redrive doesn't take, it gives back by a
nak.

An entry whose deliveries are used up never reaches the handler again, so it needs no claim.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields, pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import entry_terminations
from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import read_handlers, removes_acknowledged
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import REMOVAL_DELAY
from airflow_provider_jetstream.jetstream.dead_letters.removed_entries import CLAIMED
from airflow_provider_jetstream.jetstream.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import DeadLetterHandler
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext

log = logging.getLogger(__name__)

_PULL_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
# A redrive waits for entries that a handler has until the handler's ack wait has passed, but no longer than this.
_LONGEST_WAIT = timedelta(seconds=30)
_MARGIN = timedelta(seconds=1)
_SIGNALS_PER_WAIT = 3


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


@dataclass(frozen=True, slots=True)
class _Held:
    """An entry that was pulled and isn't settled.

    :param reply: the subject of its acknowledgements
    :param wait: seconds until the server delivers it again
    :param since: when it was received, in seconds of the monotonic clock
    """

    consumer: str
    reply: str
    wait: float
    since: float


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
        self._reconnects = connection.reconnects
        self._held: dict[int, _Held] = {}
        # By the stream sequence of the job: the entries that were claimed for it.
        self._claimed: dict[int, list[int]] = {}
        self._taken: set[int] = set()
        self._waits: dict[str, float] = {}
        # Consumers that may have too few entries in flight to be pulled past others.
        self._blocked: set[str] = set()
        self._signalled = 0.0
        self._signals: asyncio.Task[None] | None = None
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._expected = 0
        self._answered = asyncio.Event()

    @classmethod
    def of_scan(cls, connection: Connection, context: ScanContext) -> Claims | None:
        """Return the claims of a redrive; ``None`` where an acknowledgement doesn't remove entries.

        :param context: of the redrive's scan
        """
        config, audit = context.dead_letter_queue["config"], context.audit
        if not removes_acknowledged(config):
            return None
        subjects = (audit["config"].get("subjects") or []) if audit else []
        reports = covered_by_any(subjects, entry_terminations(config["name"]))
        return cls(connection, context.snapshot.queue, config, reports_terminations=reports)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._signals:
            self._signals.cancel()
        with suppress(TransientError):
            await self._give_back(list(self._held))
        if self._subscription:
            await self._subscription.unsubscribe()

    async def claim(self, letters: Sequence[DeadLetter]) -> ClaimedLetters:
        """Claim the entries of letters; return as soon as any letter is ready or gone.

        Where a handler has all of them, it waits until the handler's ack wait has passed.

        :raises TransientError: the server didn't answer
        """
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            self._forget_lost()
            subjects = await self._stored_subjects(letters)
            handlers = await read_handlers(self._connection, self._config, self._queue)
            await self._pull_all(handlers, subjects)
            found = await self._sort(letters, subjects)
            waits = [wait for handler in handlers for wait in handler.waits]
            limit = min(max(waits, default=timedelta()), _LONGEST_WAIT) + _MARGIN
            if found.ready or found.gone or time.monotonic() - began > limit.total_seconds():
                return found
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def take(self, letters: Sequence[DeadLetter]) -> dict[int, str]:
        """Terminate the claimed entries of letters, so that no handler gets them any more.

        :param letters: letters that are ready
        :return: by stream sequence why a letter can't be redriven now
        """
        self._forget_lost()
        wanted = {entry: letter.sequence for letter in letters for entry in self._claimed.pop(letter.sequence, ())}
        failed = {
            sequence: f"the claim of its entry {entry} has ended, and a handler may have it now; run it again"
            for entry, sequence in wanted.items()
            if not self._is_held(entry)
        }
        if self._terminates:
            entries = [entry for entry, sequence in wanted.items() if sequence not in failed]
            requests = [(self._held[entry].reply, f"+TERM {CLAIMED}".encode()) for entry in entries]
            answers = await self._connection.request_many(requests) if requests else []
            for entry, answer in zip(entries, answers, strict=True):
                if isinstance(answer, TransientError):
                    failed[wanted[entry]] = f"its entry {entry} couldn't be taken ({answer}); run it again"
                else:
                    del self._held[entry]
                    self._taken.add(entry)
        return failed

    def left_of(self, letter: DeadLetter) -> list[int]:
        """Return the entries of a letter that :meth:`take` hasn't removed."""
        return [entry for entry in letter.entries if entry not in self._taken]

    async def _stored_subjects(self, letters: Sequence[DeadLetter]) -> dict[int, str]:
        """Return the subjects of the letters' entries that are stored now."""
        entries = [entry for letter in letters for entry in letter.entries]

        async def subject(entry: int) -> str | None:
            message = await get_message(self._connection, self._stream, entry)
            return message.subject if message else None

        found = zip(entries, await map_concurrently(subject, entries), strict=True)
        return {entry: subject for entry, subject in found if subject is not None}

    async def _pull_all(self, handlers: Sequence[DeadLetterHandler], subjects: Mapping[int, str]) -> None:
        for handler in handlers:
            wanted = [entry for entry, subject in subjects.items() if handler.takes(subject)]
            missing = [entry for entry in wanted if entry not in self._held]
            if missing and handler.can_be_pulled and handler.name not in self._blocked:
                await self._pull(handler, missing, wanted)

    async def _pull(self, handler: DeadLetterHandler, missing: Sequence[int], wanted: Collection[int]) -> None:
        """Pull for missing entries, and no further than the last of them."""
        # Those that were delivered before come again one by one, and nothing tells when.
        count = sum(entry > handler.delivered for entry in missing) or 1
        received: set[int] = set()
        while missing:
            maximum = handler.config.get("max_ack_pending", -1)
            if maximum > 0:
                count = min(count, maximum - handler.in_flight)
            if count <= 0:
                others = [entry for entry in self._held if entry not in wanted]
                if others and not received & set(wanted):
                    # To get past these, their last deliveries would be used up: the letters are left to the handler.
                    self._blocked.add(handler.name)
                    await self._give_back(others)
                return
            before = set(self._held)
            await self._request(handler, count)
            received = self._held.keys() - before
            missing = [entry for entry in missing if entry not in self._held]
            if len(received) < count:
                return
            handlers = await read_handlers(self._connection, self._config, self._queue)
            handler = next((later for later in handlers if later.name == handler.name), handler)
            new = sum(entry > handler.delivered for entry in missing)
            if not new and not received & set(wanted):
                return
            count = new or min(2 * count, len(missing))

    async def _request(self, handler: DeadLetterHandler, count: int) -> None:
        if self._subscription is None:
            self._inbox = self._connection.new_inbox()
            self._subscription = await self._connection.subscribe(self._inbox, self._receive)
            self._signals = asyncio.create_task(self._signal_progress())
        self._waits[handler.name] = min(handler.waits).total_seconds()
        self._expected = count
        self._answered.clear()
        request = pull_request(count, expires=_PULL_SECONDS, priority=priority_fields(handler.config))
        subject = pull_subject(self._stream, handler.name, self._connection.api_prefix)
        await self._connection.publish(subject, request, reply=self._inbox)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PULL_SECONDS + _ANSWER_SECONDS):
                await self._answered.wait()

    async def _receive(self, message: Msg) -> None:
        if not message.reply:
            # A status: the request has ended.
            self._answered.set()
            return
        metadata = message.metadata
        wait = self._waits.get(metadata.consumer, 0.0)
        self._held[metadata.sequence.stream] = _Held(metadata.consumer, message.reply, wait, time.monotonic())
        self._expected -= 1
        if self._expected <= 0:
            self._answered.set()

    async def _sort(self, letters: Sequence[DeadLetter], subjects: Mapping[int, str]) -> ClaimedLetters:
        # Counted before the consumers are read: what arrives in between counts as somebody else's.
        held = [claim.consumer for claim in self._held.values()]
        handlers = await read_handlers(self._connection, self._config, self._queue)
        takers = {
            entry: _handler_of(handlers, subject) for entry, subject in subjects.items() if entry not in self._held
        }
        used_up = {
            entry
            for entry, handler in takers.items()
            if handler and handler.has_used_up(entry, others=handler.in_flight - held.count(handler.name))
        }
        if used_up:
            # An acknowledged entry leaves the stream a moment after the consumer's state has changed.
            await asyncio.sleep(REMOVAL_DELAY)
            subjects = await self._stored_subjects(letters)
        found = ClaimedLetters([], [], [])
        for letter in letters:
            if any(entry not in subjects for entry in letter.entries):
                found.gone.append(letter)
            elif all(entry in self._held or entry in used_up or not takers.get(entry) for entry in letter.entries):
                self._claimed[letter.sequence] = [entry for entry in letter.entries if entry in self._held]
                found.ready.append(letter)
            else:
                found.busy.append(letter)
        return found

    def _is_held(self, entry: int) -> bool:
        held = self._held.get(entry)
        return held is not None and time.monotonic() - max(held.since, self._signalled) < held.wait

    def _forget_lost(self) -> None:
        """Forget entries that the server may have delivered to somebody else since."""
        # In-progress signals may have been lost with the connection.
        reconnected = self._connection.reconnects != self._reconnects
        self._reconnects = self._connection.reconnects
        for entry in [entry for entry in self._held if reconnected or not self._is_held(entry)]:
            del self._held[entry]

    async def _signal_progress(self) -> None:
        while True:
            await asyncio.sleep(min(self._waits.values()) / _SIGNALS_PER_WAIT)
            began = time.monotonic()
            with suppress(TransientError):
                for held in list(self._held.values()):
                    await self._connection.publish(held.reply, b"+WPI")
                self._signalled = began

    async def _give_back(self, entries: Sequence[int]) -> None:
        for entry in entries:
            await self._connection.publish(self._held.pop(entry).reply, b"-NAK")


def _handler_of(handlers: Sequence[DeadLetterHandler], subject: str) -> DeadLetterHandler | None:
    return next((handler for handler in handlers if handler.takes(subject)), None)
