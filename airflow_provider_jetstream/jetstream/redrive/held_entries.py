"""Entries of a dead letter queue that a redrive has pulled through the consumers of handlers, and holds.

While it holds them by in-progress acknowledgements, no handler gets them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields, pull_request, pull_subject
from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import read_handlers
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.dead_letters.dead_letter_handler import DeadLetterHandler
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

# A consumer of the dead letter queue, and an entry: an interest stream delivers an entry to several consumers.
Claim: TypeAlias = tuple[str, int]

_PULL_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
_SIGNALS_PER_WAIT = 3


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


class HeldEntries:
    """The entries that one redrive holds.

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
            self._subscription = await self._connection.subscribe(self._inbox, self._receive, self._on_denied)
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

    async def _receive(self, message: Msg) -> None:
        if not message.reply:
            # A status: the request has ended.
            self._answered.set()
            return
        metadata = message.metadata
        handler = self._pulled[metadata.consumer]
        wait = min(handler.waits).total_seconds()
        held = _Held(message.reply, handler.created, wait, time.monotonic())
        self._held[metadata.consumer, metadata.sequence.stream] = held
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
