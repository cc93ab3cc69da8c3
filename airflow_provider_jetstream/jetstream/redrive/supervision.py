"""One redrive as an object of the audit, for the program that runs it: how it begins and goes on, and its waves."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import (
    Redrive,
    RedriveState,
    Wave,
    read_record,
)
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.redrive.redrive_plan import plan_of, plan_of_resumed
from airflow_provider_jetstream.jetstream.redrive.supervised_record import SupervisedRecord
from airflow_provider_jetstream.jetstream.redrive.wave_outcome import (
    WaveLetters,
    WaveWait,
    seconds_left,
)
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.audit.redrives import Engine
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

log = logging.getLogger(__name__)

_RULE = "rule"


class Supervision(SupervisedRecord):
    """One redrive as an object of the audit, with its waves; takes what :class:`SupervisedRecord` does."""

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        report: RedriveReport,
        stopped: Callable[[], bool],
        *,
        is_recorded: bool = True,
        engine: Engine = "python",
    ) -> None:
        super().__init__(connection, queue, request, report, stopped, is_recorded=is_recorded, engine=engine)
        self._is_loaded = False
        # Letters of the wave that were done before this step began, and what the report said then.
        self._wave_done = self._wave_base = 0

    @property
    def storing(self) -> WorkQueue:
        """The queue that gets the new jobs."""
        return self.request.target or self.queue

    async def open(self) -> None:
        """Read the redrive of the request's key where one was cut off; without the lease."""
        if not (self.has_key and self.request.waves):
            return
        created = (await stream_info(self._connection, self.queue.name))["created"]
        if (audit := await AuditLog.open(self._connection, self.queue, created)) is None:
            return
        self.run_record = await audit.open_run(str(self.request.run))
        redrive = (self.run_record.redrive if self.run_record else None) or str(self.request.run)
        if (record := await read_record(self._connection, audit, redrive)) and not record.state.is_over:
            self._audit, self.id = audit, redrive
            await self._take(record)
            await self.load()

    async def load(self) -> None:
        """Add to the report what the redrive did before it was cut off, once."""
        if self._is_loaded or self._audit is None or self.record is None:
            return
        self._is_loaded = True
        report = self.report
        async for letter in self._audit.letters_of_run(self.record.run, self.record.from_sequence):
            if letter.action == "parked":
                report.add_parked(letter.sequence)
            else:
                report.add_redriven(letter.sequence, letter.new_sequence or letter.sequence, letter.new_stream)
            report.resumed += 1
        wave = self.wave
        if wave and wave.number >= len(self.request.waves) and self.record.state != RedriveState.FAILED:
            # Whoever redrove the last wave knew which letters of it failed, and no other wave tries them.
            named = self.record.report.get("failures", {})
            report.failed, report.failures = {int(sequence): why for sequence, why in named.items()}, self.record.failed
        if report.resumed:
            log.info("Continuing a redrive that has already handled %d letters", report.resumed)

    async def begin(
        self, audit: AuditLog, scan: Scan, redrive: str | None, from_sequence: int, *, resumes: bool = False
    ) -> None:
        """Begin the redrive, or go on with it; to be called with the lease.

        :param audit: with the lease
        :param redrive: the id of the one that goes on, where that is known
        :param from_sequence: the first sequence of the audit that may hold one of its letters
        :param resumes: whether it is known to have begun before
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit refused the record
        :raises TransientError: it isn't known to be recorded
        """
        if self.record:
            await self.require_queue()
        self._audit, self.id = audit, redrive or self.id
        found = await read_record(self._connection, audit, self.id)
        resumes = resumes or found is not None
        request = self.request
        if found is None:
            found = Redrive(
                id=self.id,
                stream=self.queue.name,
                created=audit.created,
                run=str(request.run),
                engine=self.engine,
                who=request.who,
                why=request.why,
                selection=request.selection.model_dump(mode="json", exclude_defaults=True),
                plan=plan_of(request),
                until=scan.snapshot.state["last_seq"],
                letters=self._selected_letters(scan),
                began_at=scan.snapshot.taken_at,
                from_sequence=from_sequence,
            )
        elif not found.state.is_over:
            found = found.model_copy(update={"plan": plan_of_resumed(found.plan, request)})
        await self._take(found)
        if resumes:
            await self.load()
        self._is_loaded = True
        self._began, self._done_before = time.monotonic(), self._done
        if not self.may_redrive:
            return
        waves = self.record.waves if self.record else ()
        if request.waves:
            waves = await self._begin_wave(audit, waves)
        await self.save(RedriveState.RUNNING, audit=audit, waves=waves)

    def _selected_letters(self, scan: Scan) -> int | None:
        # Of a frame, the scan doesn't know which letters it has.
        is_known = self.request.selection.selects_all and self.engine == "python"
        return sum(1 for _ in scan.index.sequences(SEQUENCE)) if is_known else None

    async def _begin_wave(self, audit: AuditLog, waves: tuple[Wave, ...]) -> tuple[Wave, ...]:
        self._wave_base = self._done
        self._wave_done = 0
        if waves and waves[-1].state == "redriving":
            found = await self.wave_letters(waves[-1])
            self._wave_done = found.redriven + found.parked
            return waves
        # A redrive that failed after its last wave goes on with what is left.
        sizes = (*self.request.waves, "rest")
        size = sizes[min(len(waves), len(sizes) - 1)]
        info = await stream_info(self._connection, audit.stream)
        cursor = await take_cursor(self._connection, self.storing) if self.storing.events else None
        wave = Wave(
            number=len(waves) + 1,
            size=size if isinstance(size, int) else None,
            from_sequence=info["state"]["last_seq"] + 1,
            cursor=None if cursor is None else asdict(cursor),
            began_at=datetime.fromisoformat(info["ts"]),
        )
        return (*waves, wave)

    async def wave_letters(self, wave: Wave) -> WaveLetters:
        """Read which letters of a wave were redriven and parked."""
        found = WaveLetters()
        if self._audit and self.record:
            async for letter in self._audit.letters_of_run(self.record.run, wave.from_sequence):
                if letter.wave == wave.number:
                    found.add(letter, self.storing.name)
        return found

    async def wave_wait(self) -> WaveWait | None:
        """Return the wave whose jobs are to be awaited; ``None`` where there is none."""
        wave = self.wave
        if wave is None or wave.state != "awaiting" or wave.cursor is None or self.state != RedriveState.RUNNING:
            return None
        jobs = tuple((await self.wave_letters(wave)).new_jobs)
        left = await seconds_left(self._connection, self.storing, wave, self.request.stop_rule.within_seconds)
        return WaveWait(Cursor(**wave.cursor), jobs, left)

    @property
    def remaining(self) -> int | None:
        """How many letters the wave still takes; ``None`` for all."""
        wave = self.wave
        if wave is None or wave.size is None:
            return None
        return max(0, wave.size - self._wave_done - (self._done - self._wave_base))

    @property
    def selection(self) -> Selection:
        """Which letters are selected, with those that died again and are to be brought back once more."""
        selection = self.request.selection
        if selection.sequences is not None and (again := self.brought_again()):
            return selection.model_copy(update={"sequences": selection.sequences | frozenset(again)})
        return selection

    def brought_again(self) -> SequenceRanges:
        """Return the jobs that died again in waves after which a person let the redrive go on."""
        found = SequenceRanges()
        for wave in self.record.waves if self.record else ():
            if wave.passed_by not in ("", _RULE) and wave.returned:
                found |= SequenceRanges.decode(wave.returned)
        return found

    def of_wave(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Return those letters of a page that the wave takes: no copies of this redrive, unless a person said so."""
        if self.wave is None or self.record is None:
            return letters
        again, until, failed = self.brought_again(), self.record.until, self.report.failed
        taken = [
            letter
            for letter in letters
            if (letter.sequence <= until or letter.sequence in again) and letter.sequence not in failed
        ]
        return taken if self.remaining is None else taken[: self.remaining]

    async def end_step(self, audit: AuditLog, *, finished: bool) -> bool:
        """Record how a step ended, with the lease; return whether the redrive is over.

        :param finished: whether a redrive without waves is complete
        """
        record, wave, report = self.record, self.wave, self.report
        if record is None or report.cancelled:
            await self.save(RedriveState.RUNNING, audit=audit)
            return False
        if wave is None:
            state = self.final_state if finished or report.failures else RedriveState.RUNNING
            await self.save(state, audit=audit, reason=self.final_reason)
            return state == RedriveState.FINISHED
        letters = await self.wave_letters(wave)
        if not letters.sequences:
            # No letter was left.
            await self.save(self.final_state, audit=audit, waves=record.waves[:-1], reason=self.final_reason)
            return record.state == RedriveState.FINISHED
        # A wave may take longer to redrive than its jobs are awaited.
        now = datetime.fromisoformat((await stream_info(self._connection, audit.stream))["ts"])
        counts = {"redriven": letters.redriven, "parked": letters.parked}
        update = {"state": "awaiting", "awaited_from": now, **counts}
        waves = (*record.waves[:-1], wave.model_copy(update=update))
        await self.save(RedriveState.RUNNING, audit=audit, waves=waves)
        return False
