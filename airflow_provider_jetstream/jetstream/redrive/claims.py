"""Claims the entries of letters from the handlers of the dead letter queue, so that each letter is taken once.

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
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import priority_fields, pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire import DELIVERY_REPLY
from airflow_provider_jetstream.jetstream.contract import entry_copies_filter, entry_terminations
from airflow_provider_jetstream.jetstream.dead_letters.handlers import CLAIMED, read_handlers, removes_acknowledged
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import REMOVAL_DELAY
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, TransientError
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.handlers import DeadLetterHandler
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
# A redrive waits for entries that a handler has until the handler's ack wait has passed, but no longer than this.
_LONGEST_WAIT = timedelta(seconds=30)
_MARGIN = timedelta(seconds=1)
# A consumer of the dead letter queue, and an entry: an interest stream delivers an entry to several consumers.
Claim: TypeAlias = tuple[str, int]

_PULL_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
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
        self._held = _HeldEntries(connection, queue, config)
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


@dataclass(frozen=True, slots=True)
class _Held:
    """A delivery that isn't settled.

    :param reply: the subject of its acknowledgements
    :param created: when the consumer was created that delivered it
    :param wait: seconds until the server delivers it again
    :param since: when it was received, in seconds of the monotonic clock
    """

    reply: str
    created: datetime
    wait: float
    since: float


class _HeldEntries:
    """The entries that one redrive has pulled through the consumers of handlers, and holds.

    While it holds them by in-progress acknowledgements, no handler gets them.

    :param queue: the work queue
    :param config: the dead letter queue's configuration
    """

    def __init__(self, connection: Connection, queue: str, config: Mapping[str, Any]) -> None:
        self._connection = connection
        self._queue = queue
        self._config = config
        self._held: dict[Claim, _Held] = {}
        self._pulled: dict[str, DeadLetterHandler] = {}
        # Consumers that may have too few entries in flight to be pulled past others.
        self._blocked: set[str] = set()
        self._reconnects = connection.reconnects
        self._signalled = 0.0
        self._signals: asyncio.Task[None] | None = None
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._expected = 0
        self._answered = asyncio.Event()
        self._denial: PermissionDeniedError | None = None

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._held

    def of(self, entries: Collection[int]) -> list[Claim]:
        """Return the claims of some entries."""
        return [claim for claim in self._held if claim[1] in entries]

    def counts(self) -> Counter[str]:
        """Return how many entries of each consumer are held."""
        return Counter(consumer for consumer, _ in self._held)

    def reply(self, claim: Claim) -> str:
        """Return the subject of the acknowledgements of an entry."""
        return self._held[claim].reply

    def is_held(self, claim: Claim) -> bool:
        """Return whether the server can't have delivered an entry to anybody else since."""
        held = self._held.get(claim)
        return held is not None and time.monotonic() - max(held.since, self._signalled) < held.wait

    def drop(self, claims: Iterable[Claim]) -> None:
        """Hold entries no longer, without giving them back."""
        for claim in claims:
            del self._held[claim]

    def forget_lost(self) -> None:
        """Drop entries that the server may have delivered to somebody else since."""
        # In-progress signals may have been lost with the connection.
        reconnected = self._connection.reconnects != self._reconnects
        self._reconnects = self._connection.reconnects
        self.drop([claim for claim in self._held if reconnected or not self.is_held(claim)])

    def forget_recreated(self, handlers: Sequence[DeadLetterHandler]) -> None:
        """Drop entries of consumers that are gone: another one of the same name delivers them again."""
        created = {handler.name: handler.created for handler in handlers}
        self.drop([claim for claim, held in self._held.items() if created.get(claim[0]) != held.created])

    async def pull(self, handlers: Sequence[DeadLetterHandler], subjects: Mapping[int, str]) -> None:
        """Pull entries through the consumers of all handlers that get them.

        :param subjects: the subjects of the entries
        """
        for handler in handlers:
            wanted = {entry for entry, subject in subjects.items() if handler.takes(subject)}
            missing = [entry for entry in wanted if (handler.name, entry) not in self._held]
            if missing and handler.can_be_pulled and handler.name not in self._blocked:
                await self._pull(handler, missing, wanted)

    async def give_back_all(self) -> None:
        """Give all entries back, and stop."""
        if self._signals:
            self._signals.cancel()
        with suppress(TransientError):
            await self._give_back(list(self._held))
        if self._subscription:
            await self._subscription.unsubscribe()

    async def _pull(self, handler: DeadLetterHandler, missing: Sequence[int], wanted: set[int]) -> None:
        """Pull for missing entries, and no further than the last of them."""
        # Those that were delivered before come again one by one, and nothing tells when.
        count = sum(entry > handler.delivered for entry in missing) or 1
        received: set[int] = set()
        while missing:
            count = min(count, handler.room)
            if count <= 0:
                others = [claim for claim in self._held if claim[0] == handler.name and claim[1] not in wanted]
                if others and not received & wanted:
                    # To get past these, their last deliveries would be used up: the letters are left to the handler.
                    self._blocked.add(handler.name)
                    await self._give_back(others)
                return
            before = set(self._held)
            await self._request(handler, count)
            received = {entry for _, entry in self._held.keys() - before}
            missing = [entry for entry in missing if (handler.name, entry) not in self._held]
            if len(received) < count:
                return
            handlers = await read_handlers(self._connection, self._config, self._queue)
            handler = next((later for later in handlers if later.name == handler.name), handler)
            new = sum(entry > handler.delivered for entry in missing)
            if not new and not received & wanted:
                return
            count = new or min(2 * count, len(missing))

    async def _request(self, handler: DeadLetterHandler, count: int) -> None:
        self._pulled[handler.name] = handler
        if self._subscription is None:
            self._inbox = self._connection.new_inbox()
            self._subscription = await self._connection.subscribe_raw(self._inbox, self._receive, self._on_denied)
            self._signals = asyncio.create_task(self._signal_progress())
        self._expected = count
        self._answered.clear()
        self._denial = None
        longest = handler.config.get("max_expires", 0) / NANOSECONDS
        expires = min(_PULL_SECONDS, longest) if longest > 0 else _PULL_SECONDS
        request = pull_request(count, expires=expires, priority=priority_fields(handler.config))
        subject = pull_subject(self._config["name"], handler.name, self._connection.api_prefix)
        await self._connection.publish(subject, request, reply=self._inbox)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PULL_SECONDS + _ANSWER_SECONDS):
                await self._answered.wait()
        if self._denial:
            raise self._denial

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        pulls = (pull_subject(self._config["name"], name, self._connection.api_prefix) for name in self._pulled)
        if denial.subject in (self._inbox, *pulls):
            self._denial = denial
            self._answered.set()

    def _receive(self, _subject: bytes, reply: bytes, _headers: bytes | None, _data: bytes) -> None:
        if (delivery := DELIVERY_REPLY.fullmatch(reply)) is None:
            # A status: the request has ended.
            self._answered.set()
            return
        consumer, entry = delivery[2].decode(), int(delivery[4])
        handler = self._pulled[consumer]
        wait = min(handler.waits).total_seconds()
        self._held[consumer, entry] = _Held(reply.decode(), handler.created, wait, time.monotonic())
        self._expected -= 1
        if self._expected <= 0:
            self._answered.set()

    async def _signal_progress(self) -> None:
        while True:
            waits = [min(handler.waits).total_seconds() for handler in self._pulled.values()]
            await asyncio.sleep(min(waits) / _SIGNALS_PER_WAIT)
            began = time.monotonic()
            with suppress(TransientError):
                for held in list(self._held.values()):
                    await self._connection.publish(held.reply, b"+WPI")
                self._signalled = began

    async def _give_back(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            await self._connection.publish(self._held.pop(claim).reply, b"-NAK")
