"""One redrive from the scan to the report: which letters, when and at what rate, with progress and cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from contextlib import nullcontext
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Page, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import ApiError, DeadLetterGoneError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.claims import Claims
from airflow_provider_jetstream.jetstream.redrive.in_place import requeue
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
# A letter that was proved longer ago than this is proved again before anything is done with it.
_PROOF_SECONDS = 0.5


async def redrive_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest | None = None,
    *,
    progress: Callable[[RedriveReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> RedriveReport:
    """Bring dead letters back as jobs with fresh deliveries.

    Waits until no worker can be working on a letter any more: at most the consumer's ack wait after the letter's death.

    :param queue: the work queue, with its dead letter queue
    :param request: which letters, and how; all in circulation, unchanged, where absent
    :param progress: called every five seconds
    :param stopped: called before each batch; true leaves the remaining letters where they are
    :return: the report, which includes letters that failed; nothing is raised for them
    :raises RedriveRequestError: the request isn't possible for this queue; nothing was done
    :raises DeadLetterGoneError: a requested sequence is no dead letter (any more); nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    request = request or RedriveRequest()
    scan = await Scan.begin(connection, queue, vanished=request.selection.vanished)
    choice = choose_protocol(request, scan.snapshot, connection.api_level, scan.context.handler_names)
    log.info("Redriving %s by %s (%s): %s", queue.name, choice.protocol.value, choice.reason, choice.guarantee)
    return await _Redrive(connection, queue, request, scan, choice, progress, stopped).run()


class _Redrive:
    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        scan: Scan,
        choice: ProtocolChoice,
        progress: Callable[[RedriveReport], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._request = request
        self._scan = scan
        self._progress = progress
        self._stopped = stopped
        self._rate_limiter = RateLimiter(request.rate)
        self._record: RunRecord | None = None
        self._reported_at = time.monotonic()
        self._report = RedriveReport(
            protocol=choice.protocol,
            guarantee=choice.guarantee,
            uncertain=scan.reconciliation.uncertain,
            undeliverable=scan.undeliverable,
            risks=scan.risks,
        )
        self._claims = Claims.of_scan(connection, scan.context)
        self._steps = Steps(
            *(connection, queue, scan.snapshot, request, choice.protocol, scan.audit, self._report),
            claims=self._claims,
            rest_in_place=choice.rest_in_place,
        )

    async def run(self) -> RedriveReport:
        async with self._claims or nullcontext():
            return await self._run()

    async def _run(self) -> RedriveReport:
        await self._resume()
        await require_sequences(self._scan, self._request.selection, {*self._report.redriven, *self._report.parked})
        selection = self._request.selection
        if self._report.protocol == Protocol.IN_PLACE:
            selection = Selection(sequences=frozenset(await self._requeue_all(Selection())))
        async for page in self._scan.pages(selection):
            if self._report.cancelled:
                break
            await self._scan.record_handled()
            await self._steps.clean_up(page.dismissed)
            await self._redrive(page.letters)
        await self._requeue_rest()
        complete = not self._report.cancelled and not self._report.failures
        await self._report_progress(finished=complete and not self._request.keep_open)
        return self._report

    async def _resume(self) -> None:
        audit, run = self._scan.audit, self._request.run
        if run is None or audit is None:
            return
        try:
            self._record = await audit.begin_run(run, self._request.who, self._request.why)
        except (ApiError, TransientError) as error:
            raise RedriveError(
                f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it that"
                " the audit takes records, then run it again"
            ) from None
        async for letter in audit.letters_of_run(self._record):
            if letter.action == "parked":
                self._report.add_parked(letter.sequence)
            else:
                self._report.redriven.add(letter.sequence, letter.new_sequence or letter.sequence)
            self._report.resumed += 1
        if self._report.resumed:
            log.info("Continuing a redrive that has already handled %d letters", self._report.resumed)

    async def _redrive(self, letters: Sequence[DeadLetter]) -> None:
        proved_at, waiting = time.monotonic(), list(letters)
        while waiting:
            if self._stopped():
                self._report.cancelled = True
                return
            batch = waiting[: self._rate_limiter.batch_size(PAGE)]
            del waiting[: len(batch)]
            await self._rate_limiter.wait(len(batch))
            waited = await _wait_until(self._scan, max(letter.ready_at for letter in batch))
            # Meanwhile a slow worker may have finished a job, or a server that crashed may have forgotten a death.
            if waited or time.monotonic() - proved_at > _PROOF_SECONDS:
                batch = await self._prove_again(batch, waited=waited)
            if self._claims and batch:
                batch, waiting[:0] = await self._claim(self._claims, batch)
            self._rate_limiter.consume(len(batch))
            await self._steps.redrive(batch)
            self._rate_limiter.record_stored(len(batch))
            if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
                await self._report_progress()

    async def _claim(self, claims: Claims, letters: Sequence[DeadLetter]) -> tuple[list[DeadLetter], list[DeadLetter]]:
        """Return the letters that no handler can get, and those to be claimed once more after them."""
        began = time.monotonic()
        found = await claims.claim(letters)
        ready, later = found.ready, found.busy
        if not ready and not found.gone:
            log.info("%d letters are left to the handlers that have their entries", len(later))
            self._report.left_to_handlers.extend(letter.sequence for letter in later)
            later = []
        for letter in found.gone:
            self._report.add_gone(letter.sequence)
        if ready and time.monotonic() - began > _PROOF_SECONDS:
            ready = await self._prove_again(ready, waited=True)
        return ready, later

    async def _prove_again(self, letters: Sequence[DeadLetter], *, waited: bool) -> list[DeadLetter]:
        ended: list[NotDead] = []
        dead: list[DeadLetter] = []
        for job in await self._scan.classify_again(letters, refresh=waited):
            if isinstance(job, DeadLetter) and self._is_selected(job):
                dead.append(job)
            elif isinstance(job, DeadLetter) or job.status == Status.STALE:
                self._report.add_failure(job.sequence, "its consumer or its stream was deleted or recreated meanwhile")
            else:
                ended.append(job)
        await self._steps.clean_up(ended)
        return dead

    def _is_selected(self, letter: DeadLetter) -> bool:
        reason = letter.death.reason
        return reason != Reason.UNDELIVERABLE or reason in (self._request.selection.reasons or ())

    async def _requeue_rest(self) -> None:
        """Requeue in place the letters whose copies are too large for the queue."""
        rest = dict(self._steps.without_room)
        # A reset would run the job of a letter once more whose copy is stored.
        if rest and not self._report.failures and not self._report.cancelled:
            log.info("%d copies are too large for %s: requeueing these letters in place", len(rest), self._queue.name)
            unstored = set(await self._requeue_all(Selection(sequences=frozenset(rest))))
            rest = {sequence: why for sequence, why in rest.items() if sequence in unstored}
        for sequence, why in rest.items():
            self._report.add_failure(sequence, why)

    async def _requeue_all(self, selection: Selection) -> list[int]:
        """Requeue stored letters in place; return the sequences of the others, which copies bring back."""
        waiting: dict[str, datetime] = {}
        unstored: list[int] = []
        async for page in self._scan.pages(selection):
            # A job that has ended, or has a new job, would be delivered once more.
            await self._steps.clean_up(page.dismissed)
            await self._steps.redrive([letter for letter in page.letters if letter.copy_sequence is not None])
            unstored += (letter.sequence for letter in page.letters if letter.source != BodySource.QUEUE)
            for name, letter in self._requeueable(page):
                waiting[name] = max(waiting.get(name, letter.ready_at), letter.ready_at)
        for name, ready_at in waiting.items():
            if self._stopped():
                self._report.cancelled = True
                break
            # A slow worker may still be working on a job.
            await _wait_until(self._scan, ready_at)
            await self._requeue(self._scan.snapshot.consumers[name], selection)
        return unstored

    async def _requeue(self, consumer: ConsumerState, selection: Selection) -> None:
        letters, entries = array("Q"), array("Q")

        async def record() -> int:
            async for page in self._scan.pages(selection):
                if handled := [job.sequence for job in page.dismissed if job.status == Status.HANDLED and job.stored]:
                    raise RedriveError(
                        f"expected no handled job in {self._queue.name}, found {handled[0]}: a reset would deliver it"
                        " once more; use another protocol"
                    )
                stored = [letter for name, letter in self._requeueable(page) if name == consumer.name]
                letters.extend(letter.sequence for letter in stored)
                entries.extend(entry for letter in stored for entry in letter.entries)
                await self._steps.record_requeued(stored)
            return letters[0] if letters else 0

        try:
            await requeue(self._connection, self._queue.name, consumer, record)
        except (RedriveError, TransientError) as error:
            await self._fail_all(consumer.name, selection, str(error))
            return
        for sequence in letters:
            self._report.redriven.add(sequence, sequence)
        self._report.entries_left += await remove_entries(
            self._connection, self._queue, entries, self._scan.context.dead_letter_queue["config"]
        )
        await self._report_progress()

    async def _fail_all(self, consumer: str, selection: Selection, why: str) -> None:
        async for page in self._scan.pages(selection):
            for name, letter in self._requeueable(page):
                if name == consumer:
                    self._report.add_failure(letter.sequence, why)

    def _requeueable(self, page: Page) -> Iterator[tuple[str, DeadLetter]]:
        """Return the letters that a reset would deliver again, each with the name of the consumer to reset."""
        for letter in page.letters:
            consumer = self._scan.snapshot.consumer_for(letter.subject)
            if consumer and letter.source == BodySource.QUEUE and letter.copy_sequence is None:
                yield consumer.name, letter

    async def _report_progress(self, *, finished: bool = False) -> None:
        self._reported_at = time.monotonic()
        report = self._report
        log.info(
            "Redriving %s: %d letters redriven, %d parked, %d failed, %d were no dead letters",
            *(self._queue.name, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        self._progress(report)
        if self._record and self._scan.audit:
            update = {"report": self._report.as_json(), "finished": finished}
            try:
                await self._scan.audit.record_progress(self._record.model_copy(update=update))
            except (ApiError, TransientError) as error:
                log.warning("The progress of the redrive couldn't be recorded: %s", error)


async def _wait_until(scan: Scan, moment: datetime) -> bool:
    """Wait until a moment by the server's clock; return whether it was in the future."""
    if moment <= scan.snapshot.taken_at:
        return False
    clock = await ServerClock.read(scan.connection, scan.queue.name)
    if (seconds := clock.seconds_until(moment)) > 0:
        await asyncio.sleep(seconds)
    return seconds > 0


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
