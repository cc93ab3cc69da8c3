"""Requeues all dead letters of a consumer in place: the consumer is reset to the first of them.

Nothing is copied, so this works on a full queue and can't duplicate a job; but it brings back all of a consumer's
letters, unchanged, or none. The consumer is paused meanwhile, each time for a few seconds only: if this process is
killed, the consumer resumes by itself.

A reset that reaches the server when the consumer isn't paused any more would deliver live jobs once more, and the
server knows no deadline for requests. So before the reset the pause is made longer than a reset can be on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from contextlib import aclosing
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, list_consumers, paused
from airflow_provider_jetstream.jetstream.client.unsent import PING_SECONDS
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    LeaseLostError,
    NotFoundError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.preconditions import held_problem
from airflow_provider_jetstream.jetstream.redrive.next_letters import proved_pages
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_api import ConsumerPause
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.redrive.next_letters import ProvedPage
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.steps import Steps

log = logging.getLogger(__name__)

_POLL_PAUSE = 0.1
_MARGIN = timedelta(seconds=5)
# The reset's time limit in seconds, whatever the connection's is.
_RESET_SECONDS = 10.0
# How long a reset that has failed may still be on its way: in a proxy, or in a server that is stopped.
_LATE_SECONDS = 30.0
# For the requests between the longer pause and the reset.
_CHECK_SECONDS = 10.0


class Requeue(NamedTuple):
    """What a reset is to deliver again.

    :param first: the first letter's stream sequence
    :param filters: the subjects that the consumer took when its letters were proved
    """

    first: int
    filters: tuple[str, ...]


async def requeue(
    connection: Connection,
    queue: str,
    consumer: ConsumerState,
    record: Callable[[], Awaitable[Requeue | None]],
    require_lease: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Make a consumer deliver every stored job from its first dead letter on as if for the first time.

    :param record: proves the letters once more while nothing moves, records the requeue before it happens, and returns
        it; ``None`` where there is no letter any more
    :param require_lease: raises unless nobody else can change the letters during one more request
    :raises RedriveError: jobs stay in flight, the consumer takes other subjects since, or the server refused; nothing
        was reset
    """
    try:
        async with paused(connection, queue, consumer.name) as pause:
            await _wait_until_idle(connection, queue, consumer)
            if recorded := await record():
                await _reset(connection, queue, consumer.name, recorded, pause, require_lease)
    except ApiError as error:
        raise RedriveError(f"the server refused to reset consumer {consumer.name}: {error.description}") from None
    except NotFoundError as error:
        raise RedriveError(str(error)) from None


async def _wait_until_idle(connection: Connection, queue: str, consumer: ConsumerState) -> None:
    deadline = time.monotonic() + (consumer.max_ack_wait + _MARGIN).total_seconds()
    while in_flight := (await consumer_info(connection, queue, consumer.name))["num_ack_pending"]:
        if time.monotonic() > deadline:
            raise RedriveError(
                f"expected no job of consumer {consumer.name} in flight, found {in_flight} still after its ack wait:"
                " a reset would deliver them a second time; wait for its workers, or redrive by copies"
            )
        await asyncio.sleep(_POLL_PAUSE)


async def _reset(
    connection: Connection,
    queue: str,
    consumer: str,
    recorded: Requeue,
    pause: ConsumerPause,
    require_lease: Callable[[], Awaitable[None]] | None,
) -> None:
    limit = min(connection.timeout, _RESET_SECONDS)
    needed = limit + PING_SECONDS + _LATE_SECONDS
    await pause.prolong(needed + _CHECK_SECONDS)
    delivered, paused_until = await _require_idle(connection, queue, consumer, recorded.filters)
    if require_lease:
        await require_lease()
    if (left := paused_until - time.monotonic()) < needed:
        raise RedriveError(
            f"expected consumer {consumer} to be paused for {needed:g} s more, found {left:.1f} s: a reset that takes"
            " longer would deliver live jobs once more; nothing was reset; run it again"
        )
    try:
        await connection.api(f"CONSUMER.RESET.{queue}.{consumer}", {"seq": recorded.first}, time_limit=limit)
    except TransientError as error:
        if not await _was_reset(connection, queue, consumer, delivered):
            # Should it arrive, it finds the consumer paused.
            pause.left_alone = True
            raise RedriveError(
                f"consumer {consumer} isn't known to be reset ({error}); it stays paused for at most"
                f" {needed + _CHECK_SECONDS:g} s, in which a reset that is on its way does no harm; run it again after"
                " that"
            ) from None


async def _require_idle(
    connection: Connection, queue: str, consumer: str, filters: tuple[str, ...]
) -> tuple[int, float]:
    """Raise unless a reset would deliver nothing but dead letters.

    :return: the consumer's sequence of deliveries, and until when it is paused, by this process's monotonic clock
    """
    sent_at = time.monotonic()
    consumers = await list_consumers(connection, queue)
    if problem := held_problem(queue, consumers.held_above):
        raise RedriveError(f"expected only dead letters to be stored and delivered, found that {problem}; run it again")
    info = consumers.get(consumer, {})
    if not info.get("paused") or info["num_ack_pending"]:
        raise RedriveError(f"consumer {consumer} delivered jobs while it was paused for the reset; run it again")
    if set(now := filter_subjects(info["config"])) != set(filters):
        raise RedriveError(
            f"expected consumer {consumer} to take {', '.join(filters)} as when its letters were proved, found"
            f" {', '.join(now)}: a reset would deliver jobs that nobody has looked at; run it again"
        )
    # The time that is left by the server's clock, which ends the pause.
    return int(info["delivered"]["consumer_seq"]), sent_at + info["pause_remaining"] / NANOSECONDS


async def _was_reset(connection: Connection, queue: str, consumer: str, delivered: int) -> bool:
    """Look whether a reset that wasn't answered has arrived; as long as it may arrive, until the server answers.

    :param delivered: the consumer's sequence of deliveries before, with which a reset begins anew
    """
    deadline = time.monotonic() + _LATE_SECONDS
    while True:
        try:
            info = await consumer_info(connection, queue, consumer)
        except TransientError as error:
            if time.monotonic() > deadline:
                log.warning("It isn't known whether consumer %s was reset: %s", consumer, error)
                return False
            await asyncio.sleep(_POLL_PAUSE)
        else:
            return int(info["delivered"]["consumer_seq"]) < delivered


class Requeueing:
    """Requeues letters in place, consumer by consumer.

    :param report: what was done is added to it
    :param stopped: called before each consumer; true leaves its letters where they are
    :param wait_until: waits until a moment by the server's clock, or until it is stopped
    :param on_requeued: called after each consumer
    """

    def __init__(
        self,
        scan: Scan,
        steps: Steps,
        report: RedriveReport,
        stopped: Callable[[], bool],
        *,
        wait_until: Callable[[datetime], Awaitable[bool]],
        on_requeued: Callable[[], Awaitable[None]],
    ) -> None:
        self._scan = scan
        self._steps = steps
        self._report = report
        self._stopped = stopped
        self._wait_until = wait_until
        self._on_requeued = on_requeued

    async def requeue_rest(self) -> None:
        """Requeue in place the letters whose copies are too large for the queue."""
        rest = dict(self._steps.without_room)
        # A reset would run the job of a letter once more whose copy is stored.
        if rest and not self._report.failures and not self._report.cancelled:
            log.info(
                "%d copies are too large for %s: requeueing these letters in place", len(rest), self._scan.queue.name
            )
            unstored = set(await self.requeue_all(Selection(sequences=frozenset(rest))))
            rest = {sequence: why for sequence, why in rest.items() if sequence in unstored}
        for sequence, why in rest.items():
            self._report.add_failure(sequence, why)

    async def requeue_all(self, selection: Selection) -> list[int]:
        """Requeue stored letters in place; return the sequences of the others, which copies bring back."""
        unstored: set[int] = set()
        consumers = self._with_letters()
        for consumer, ready_at in consumers:
            # A slow worker may still be working on a job.
            if self._stopped() or (await self._wait_until(ready_at) and self._stopped()):
                self._report.cancelled = True
                break
            unstored |= await self._requeue(consumer, selection)
        if not consumers:
            async with aclosing(proved_pages(self._scan, selection, reads_ahead=True)) as pages:
                async for page in pages:
                    unstored |= await self._prepare(page)
        return sorted(unstored)

    def _with_letters(self) -> list[tuple[ConsumerState, datetime]]:
        """Return the consumers that may have stored letters, and when no worker can be working on one any more."""
        died_at = self._scan.index.last_recorded()
        found: list[tuple[ConsumerState, datetime]] = []
        for name, consumer in self._scan.snapshot.consumers.items():
            if consumer.dead or (consumer.dead is None and name in died_at):
                # A letter without an entry died at the latest when the last delivery ended.
                last = min(consumer.last_active + consumer.max_ack_wait, consumer.taken_at)
                found.append((consumer, max(last, died_at.get(name, last)) + consumer.max_ack_wait))
        return found

    async def _prepare(self, page: ProvedPage) -> set[int]:
        """Finish the letters that a reset must not deliver; return the sequences of letters that no reset delivers.

        A job that has ended, or has a new job, would be delivered once more.
        """
        await self._steps.clean_up(page.dismissed)
        await self._steps.redrive([letter for letter in page.letters if letter.copy_sequence is not None])
        return {
            letter.sequence for letter in page.letters if letter.source != BodySource.QUEUE or letter.consumer_absent
        }

    async def _requeue(self, consumer: ConsumerState, selection: Selection) -> set[int]:
        letters, entries, unstored = array("Q"), array("Q"), set[int]()

        async def record() -> Requeue | None:
            scan = await self._scan_again()
            if uncertain := scan.reconciliation.disputed:
                raise RedriveError(
                    f"expected each job without an entry to be dead, found {len(uncertain)} that may be in a worker's"
                    " hands: a reset would deliver them once more; use another protocol"
                )
            # All of them, since a reset delivers all of them.
            async with aclosing(proved_pages(scan, Selection(), reads_ahead=True)) as pages:
                async for page in pages:
                    unstored.update(await self._prepare(page))
                    self._require_resettable(page)
                    # By its filters of now.
                    requeueable = self._requeueable(page, scan.snapshot)
                    stored = [letter for name, letter in requeueable if name == consumer.name]
                    letters.extend(letter.sequence for letter in stored)
                    entries.extend(entry for letter in stored for entry in letter.entries)
                    await self._steps.records.write_requeued(stored)
            if self._scan.audit:
                await self._scan.audit.require_lease()
            return Requeue(letters[0], scan.snapshot.consumers[consumer.name].filters) if letters else None

        try:
            require_lease = self._scan.audit.require_lease if self._scan.audit else None
            await requeue(self._scan.connection, self._scan.queue.name, consumer, record, require_lease)
        except LeaseLostError:
            raise
        except (RedriveError, TransientError) as error:
            await self._fail_all(consumer.name, selection, str(error))
            return unstored
        for sequence in letters:
            self._report.redriven.add(sequence, sequence)
        config, finished = self._scan.context.dead_letter_queue["config"], await self._scan.unchanged(entries)
        left = await remove_entries(self._scan.connection, self._scan.queue, finished, config)
        self._report.entries_left += left + len(entries) - len(finished)
        await self._on_requeued()
        return unstored

    async def _scan_again(self) -> Scan:
        """Read the queue once more while nothing moves: jobs that were in flight until then may have died."""
        scan = await Scan.begin(self._scan.connection, self._scan.queue, since=self._scan)
        # The lease fences what is recorded.
        scan.audit = self._scan.audit
        return scan

    def _require_resettable(self, page: ProvedPage) -> None:
        """Raise where a reset would deliver a job that is handled or uncertain, or one that may have a new job.

        :raises RedriveError: the page has such a job
        """
        queue = self._scan.queue.name
        if handled := [job.sequence for job in page.dismissed if job.status == Status.HANDLED and job.stored]:
            raise RedriveError(
                f"expected no handled job in {queue}, found {handled[0]}: a reset would deliver it once more; use"
                " another protocol"
            )
        if uncertain := [job.sequence for job in page.dismissed if job.status == Status.UNCERTAIN and job.stored]:
            raise RedriveError(
                f"expected each stored job of {queue} to be known, found {uncertain[0]}, of which it isn't known"
                " whether it ended: a reset would deliver it once more; redrive it by its sequence first, or use"
                " another protocol"
            )
        left = [letter for letter in page.letters if letter.copy_sequence is None or not self._is_redriven(letter)]
        if unfinished := self._steps.unfinished(left):
            raise RedriveError(
                f"expected no letter that may have a new job, found {unfinished[0]}: a reset would run it once more;"
                " redrive it by its sequence first, or use another protocol"
            )

    def _is_redriven(self, letter: DeadLetter) -> bool:
        return letter.sequence in self._report.redriven

    async def _fail_all(self, consumer: str, selection: Selection, why: str) -> None:
        async for page in self._scan.pages(selection):
            for name, letter in self._requeueable(page, self._scan.snapshot):
                if name == consumer:
                    self._report.add_failure(letter.sequence, why)

    def _requeueable(self, page: Page | ProvedPage, snapshot: QueueSnapshot) -> Iterator[tuple[str, DeadLetter]]:
        """Return the letters that a reset would deliver again, each with the name of the consumer to reset."""
        for letter in page.letters:
            consumer = snapshot.consumer_for(letter.subject)
            if consumer and letter.source == BodySource.QUEUE and letter.copy_sequence is None:
                yield consumer.name, letter
