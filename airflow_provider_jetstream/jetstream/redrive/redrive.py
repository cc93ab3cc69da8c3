"""One redrive from the first look to the report: which letters, when, how fast, and what is told meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.classifier import NotDead, Status
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, Source
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Page, Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import ApiError, DeadLetterGoneError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.in_place import requeue
from airflow_provider_jetstream.jetstream.redrive.protocol import ProtocolChoice, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.snapshot import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
# A letter that was proved longer ago than this is proved again before it is touched.
_PROOF_SECONDS = 0.5


async def redrive_dead_letters(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest | None = None,
    *,
    progress: Callable[[RedriveReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> RedriveReport:
    """Bring dead letters back.

    Waits until no worker can be presumed to be still at a letter: at most the consumer's ack wait after its death.

    :param connection: the server
    :param queue: the work queue, with its dead letter queue
    :param order: which letters, and how; all in circulation, as they were, where absent
    :param progress: called every five seconds
    :param stopped: asked before each batch whether to leave the rest where it is
    :return: the report, also of letters that failed; nothing is raised for them
    :raises RedriveOrderError: what is asked for isn't possible here; nothing was done
    :raises DeadLetterGoneError: a sequence that was asked for is no dead letter (any more); nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    asked = request or RedriveRequest()
    scan = await Scan.begin(connection, queue, vanished=asked.selection.vanished)
    choice = choose_protocol(asked, scan.snapshot, connection.api_level)
    log.info("Redriving %s by %s (%s): %s", queue.name, choice.protocol.value, choice.reason, choice.guarantee)
    return await _Run(connection, queue, asked, scan, choice, progress, stopped).run()


class _Run:
    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        order: RedriveRequest,
        scan: Scan,
        choice: ProtocolChoice,
        progress: Callable[[RedriveReport], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._order = order
        self._scan = scan
        self._progress = progress
        self._stopped = stopped
        self._pace = RateLimiter(order.rate)
        self._record: RunRecord | None = None
        self._told_at = time.monotonic()
        self._report = RedriveReport(
            protocol=choice.protocol,
            guarantee=choice.guarantee,
            uncertain=scan.reconciliation.uncertain,
            undeliverable=scan.undeliverable,
            risks=scan.risks,
        )
        self._steps = Steps(connection, queue, scan.snapshot, order, choice.protocol, scan.audit, self._report)

    async def run(self) -> RedriveReport:
        await self._resume()
        await require_sequences(self._scan, self._order.selection, {*self._report.redriven, *self._report.parked})
        selection = self._order.selection
        if self._report.protocol == Protocol.IN_PLACE:
            selection = Selection(sequences=frozenset(await self._requeue_all()))
        async for page in self._scan.pages(selection):
            if self._report.cancelled:
                break
            await self._steps.clean_up(page.dismissed)
            await self._bring_back(page.letters)
        over = not self._report.cancelled and not self._report.failures
        await self._tell(finished=over and not self._order.keep_open)
        return self._report

    async def _resume(self) -> None:
        audit, run = self._scan.audit, self._order.run
        if run is None or audit is None:
            return
        try:
            self._record = await audit.begin_run(run, self._order.who, self._order.why)
        except (ApiError, TransientError) as error:
            raise RedriveError(
                f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it that"
                " the audit takes records, then run it again"
            ) from None
        async for done in audit.letters_of_run(self._record):
            if done.action == "parked":
                self._report.add_parked(done.sequence)
            else:
                self._report.redriven.add(done.sequence, done.new_sequence or done.sequence)
            self._report.resumed += 1
        if self._report.resumed:
            log.info("Going on with a redrive that has done %d letters already", self._report.resumed)

    async def _bring_back(self, letters: Sequence[DeadLetter]) -> None:
        proved_at, waiting = time.monotonic(), list(letters)
        while waiting:
            if self._stopped():
                self._report.cancelled = True
                return
            batch = waiting[: self._pace.batch_size(PAGE)]
            del waiting[: len(batch)]
            await self._pace.wait(len(batch))
            waited = await _until(max(letter.ready_at for letter in batch))
            # A slow worker may have finished one meanwhile, and a server that crashed may have forgotten a death.
            if waited or time.monotonic() - proved_at > _PROOF_SECONDS:
                batch = await self._prove_again(batch, waited=waited)
            self._pace.consume(len(batch))
            await self._steps.redrive(batch)
            if time.monotonic() - self._told_at > _PROGRESS_SECONDS:
                await self._tell()

    async def _prove_again(self, letters: Sequence[DeadLetter], *, waited: bool) -> list[DeadLetter]:
        found = await self._scan.classify_again(letters, refresh=waited)
        ended: list[NotDead] = []
        dead: list[DeadLetter] = []
        for each in found:
            if isinstance(each, DeadLetter) and self._is_meant(each):
                dead.append(each)
            elif isinstance(each, DeadLetter) or each.status == Status.STALE:
                self._report.add_failure(each.sequence, "its consumer or its stream was deleted or recreated meanwhile")
            else:
                ended.append(each)
        await self._steps.clean_up(ended)
        return dead

    def _is_meant(self, letter: DeadLetter) -> bool:
        reason = letter.death.reason
        return reason != Reason.UNDELIVERABLE or reason in (self._order.selection.reasons or ())

    async def _requeue_all(self) -> list[int]:
        """Requeue in place what is still stored; give what isn't, which is left to the copies."""
        waiting: dict[str, datetime] = {}
        unstored: list[int] = []
        async for page in self._scan.pages(Selection()):
            # What is done already, or has a new job, would be delivered once more.
            await self._steps.clean_up(page.dismissed)
            await self._steps.redrive([letter for letter in page.letters if letter.copy_sequence is not None])
            unstored += (letter.sequence for letter in page.letters if letter.source != Source.QUEUE)
            for name, letter in self._requeueable(page):
                waiting[name] = max(waiting.get(name, letter.ready_at), letter.ready_at)
        for name, ready_at in waiting.items():
            if self._stopped():
                self._report.cancelled = True
                break
            # A slow worker may be still at one.
            await _until(ready_at)
            await self._requeue(self._scan.snapshot.consumers[name])
        return unstored

    async def _requeue(self, consumer: ConsumerState) -> None:
        letters, entries = array("Q"), array("Q")

        async def write_down() -> int:
            async for page in self._scan.pages(Selection()):
                stored = [letter for name, letter in self._requeueable(page) if name == consumer.name]
                letters.extend(letter.sequence for letter in stored)
                entries.extend(entry for letter in stored for entry in letter.entries)
                await self._steps.record_requeued(stored)
            return letters[0] if letters else 0

        try:
            await requeue(self._connection, self._queue.name, consumer, write_down)
        except (RedriveError, TransientError) as error:
            await self._fail_all(consumer.name, str(error))
            return
        for sequence in letters:
            self._report.redriven.add(sequence, sequence)
        self._report.entries_left += await remove_entries(self._connection, self._queue, entries)
        await self._tell()

    async def _fail_all(self, consumer: str, why: str) -> None:
        async for page in self._scan.pages(Selection()):
            for name, letter in self._requeueable(page):
                if name == consumer:
                    self._report.add_failure(letter.sequence, why)

    def _requeueable(self, page: Page) -> Iterator[tuple[str, DeadLetter]]:
        """Give the letters that a reset would bring back, each with the consumer to reset."""
        for letter in page.letters:
            taker = self._scan.snapshot.consumer_for(letter.subject)
            if taker and letter.source == Source.QUEUE and letter.copy_sequence is None:
                yield taker.name, letter

    async def _tell(self, *, finished: bool = False) -> None:
        self._told_at = time.monotonic()
        report = self._report
        log.info(
            "Redriving %s: %d letters redriven, %d parked, %d stayed, %d were none",
            *(self._queue.name, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        self._progress(report)
        if self._record and self._scan.audit:
            update = {"report": self._report.as_json(), "finished": finished}
            try:
                await self._scan.audit.record_progress(self._record.model_copy(update=update))
            except (ApiError, TransientError) as error:
                log.warning("The progress of the redrive couldn't be recorded: %s", error)


async def _until(moment: datetime) -> bool:
    seconds = (moment - datetime.now(UTC)).total_seconds()
    if seconds > 0:
        await asyncio.sleep(seconds)
    return seconds > 0


_NAMED = 5
_UNTOLD = "no entry in the dead letter queue"
_EXCLUDED = "it is dead, but the rest of the selection excludes it"
_PARKED = "it is parked; select parked to bring it back"


async def require_sequences(scan: Scan, selection: Selection, done: Collection[int] = ()) -> None:
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
        told.update({each.sequence: each.status.meaning for each in page.dismissed})
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
