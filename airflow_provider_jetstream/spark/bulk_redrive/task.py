"""One task's share of a bulk redrive: the same judge and the same steps as everywhere, over a connection of its own.

Nothing here knows whether the share was begun before, or is being done elsewhere at this moment: the protocols make
that the same, and what an earlier try did counts as done by the same run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.log import AuditLog, RunRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.contract import run_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.ack_metrics import AckMetrics
from airflow_provider_jetstream.jetstream.dead_letters.classifier import NotDead, Status
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.queue.snapshot import refresh_snapshot
from airflow_provider_jetstream.jetstream.redrive.copies import max_job_size
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE, Preview, preview_letter
from airflow_provider_jetstream.jetstream.redrive.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import Outcomes
from airflow_provider_jetstream.spark.bulk_redrive.rows import TaskJob, read_windows
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.gc_tuning import relaxed_gc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.classifier import Classifier
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

CANCELLED: Final = "cancelled"

_WINDOW = 500
_BYTES_AT_A_TIME = 16 << 20
# As long as a redrive outside of Spark goes by one look at the consumers.
_LOOK_AGAIN = 0.2
_EXCLUDED = "the order's selection excludes it"
_PARKED = "it is parked; select parked to bring it back"
_TWICE = "the frame has another row for it, which counts"


class KnownMetrics(AckMetrics):
    """The ack metrics of some jobs, read before.

    :param connection: the server
    :param acknowledged: the jobs that were acknowledged
    """

    def __init__(self, connection: BlockingConnection, acknowledged: frozenset[int]) -> None:
        super().__init__(connection, None, "", (), datetime.now(UTC))
        self._acknowledged = acknowledged

    async def tell(self, sequence: int) -> bool:
        """Tell whether a job was acknowledged.

        :param sequence: its stream sequence
        :return: whether its ack metric was stored
        """
        return sequence in self._acknowledged


@dataclass(frozen=True)
class RedriveTask:
    """What every task of a bulk redrive does.

    :param given: where and as whom, as the data source's options say it
    :param server: whom the driver asked, as that tells of itself
    :param premises: what the driver's look goes by
    :param doubted: consumers that hold more jobs than the advisories leave room for
    :param acknowledged: jobs of which an ack metric tells, where that matters
    :param order: what is asked for, with the key of the run
    :param protocol: how letters are brought back
    :param rate: letters a second of one task
    :param audited: whether there is an audit
    :param dry: whether to say only what would be done
    """

    options: Mapping[str, str]
    server: Mapping[str, Any]
    context: ScanContext
    inconsistent_consumers: frozenset[str]
    acknowledged: frozenset[int]
    request: RedriveRequest
    protocol: Protocol
    rate: float | None
    audited: bool
    dry_run: bool = False

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Bring letters back.

        :param batches: what is asked for about which letters, and what the dead letter queue says about them
        :return: what became of each
        :raises TransientError: the connection broke; whatever was done is done
        """
        with relaxed_gc(), blocking_connection(self.options) as connection:
            task = _TaskRun(self, connection)
            for window in read_windows(batches, self._window()):
                yield task.do(window)
            yield task.rest()

    def _window(self) -> int:
        """Tell how many letters are held at once: fewer where they are large."""
        state = self.context.snapshot.state
        each = state["bytes"] / max(1, state["messages"])
        return max(1, min(_WINDOW, int(_BYTES_AT_A_TIME / max(1.0, each))))


class _TaskRun:
    def __init__(self, share: RedriveTask, connection: BlockingConnection) -> None:
        self._share = share
        self._connection = connection
        self._queue = share.context.queue
        self._around = share.context.snapshot
        self._looked_at = time.monotonic()
        self._pace = RateLimiter(share.rate)
        self._previewed = Preview(share.protocol, "")
        self._cancelled = False
        # Whether only a new look at the whole queue can tell what is dead.
        self._doubtful = _restarted(share.server, connection.socket.server_info)
        self._audit = (
            AuditLog(connection, self._queue.audit.name, self._queue.name, self._around.created)
            if share.audited and self._queue.audit
            else None
        )
        self._judge: Classifier = connection.run(self._open())

    async def _open(self) -> Classifier:
        premises = self._share.context
        streams = [self._queue, self._queue.archive, self._queue.audit, self._queue.events, self._queue.dead_letters]
        await self._connection.discover_capabilities(stream.name for stream in streams if stream)
        archive = await ArchiveReader.open(self._connection, self._queue, self._around.created_at)
        judge = await premises.classifier(
            self._connection,
            EntryIndex(),
            archive=archive,
            audit=self._audit,
            inconsistent_consumers=self._share.inconsistent_consumers,
        )
        judge.metrics = KnownMetrics(self._connection, self._share.acknowledged)
        return judge

    def do(self, window: list[TaskJob]) -> pa.RecordBatch:
        """Do a window of letters, by as many at a time as the rate allows."""
        outcomes = Outcomes()
        waiting = {work.row.sequence: work for work in window}
        left = list(waiting.values())
        if len(left) < len(window):
            self._name_repeats(window, waiting, outcomes)
        while left:
            batch = left[: self._pace.batch_size(_WINDOW)]
            del left[: len(batch)]
            if (early := self._pace.delay(len(batch))) > 0:
                time.sleep(early)
            self._connection.run(self._look())
            if self._cancelled or self._doubtful:
                outcomes.leave((work.row.sequence for work in (*batch, *left)), cancelled=self._cancelled)
                break
            self._bring_back(batch, outcomes)
        return outcomes.batch()

    def rest(self) -> pa.RecordBatch:
        """Say what is left to say at the end."""
        outcomes = Outcomes()
        if self._share.dry_run:
            outcomes.preview(self._previewed)
        return outcomes.batch()

    def _name_repeats(self, window: list[TaskJob], kept: dict[int, TaskJob], outcomes: Outcomes) -> None:
        for work in window:
            if kept[work.row.sequence] is not work:
                outcomes.fail(work.row.sequence, _TWICE)

    async def _look(self) -> None:
        if self._audit and not self._share.dry_run and self._share.request.run:
            subject = run_audit_subject(self._queue.name, self._share.request.run)
            if message := await last_message(self._connection, self._audit.stream, subject):
                self._cancelled = bool(RunRecord.model_validate_json(message.data).report.get(CANCELLED))
        if time.monotonic() - self._looked_at > _LOOK_AGAIN:
            await self._look_again()

    async def _look_again(self) -> None:
        self._looked_at = time.monotonic()
        around = await refresh_snapshot(self._connection, self._around)
        if around is None:
            self._doubtful = True
        else:
            self._around = self._judge.snapshot = around

    def _bring_back(self, batch: list[TaskJob], outcomes: Outcomes) -> None:
        found = self._connection.run(self._prove(batch))
        letters = [each for each in found if isinstance(each, DeadLetter)]
        ready = max((letter.ready_at for letter in letters), default=datetime.now(UTC))
        if not self._share.dry_run and (seconds := (ready - datetime.now(UTC)).total_seconds()) > 0:
            # A slow worker may be still at one, and finish it meanwhile.
            time.sleep(seconds)
            self._connection.run(self._look_again())
            if self._doubtful:
                outcomes.leave((work.row.sequence for work in batch), cancelled=False)
                return
            found = self._connection.run(self._prove(batch))
            letters = [each for each in found if isinstance(each, DeadLetter)]
        meant = [letter for letter in letters if self._is_meant(letter, outcomes)]
        dismissed = [each for each in found if isinstance(each, NotDead)]
        rows = {work.row.sequence: work.row for work in batch}
        order = replace(self._share.request, transform=lambda letter: rows[letter.sequence].repair(letter))
        if self._share.dry_run:
            limit = max_job_size(self._connection, marked=self._share.protocol == Protocol.ATOMIC)
            for letter in meant:
                preview_letter(self._previewed, order, letter, self._around, BY_CAUSE, limit)
            return
        self._pace.consume(len(meant))
        report = RedriveReport()
        # With an audit, the driver removes all entries at the end.
        clears = self._audit is None
        protocol = self._share.protocol
        steps = Steps(self._connection, self._queue, self._around, order, protocol, self._audit, report, clears=clears)
        self._connection.run(self._do(steps, report, meant, dismissed))
        outcomes.take(report)
        if self._connection.broken:
            # Spark tries again, and finds how far each letter came.
            raise self._connection.broken

    async def _prove(self, batch: list[TaskJob]) -> list[DeadLetter | NotDead]:
        return await self._judge.classify_all([(work.row.sequence, work.mentions) for work in batch])

    def _is_meant(self, letter: DeadLetter, outcomes: Outcomes) -> bool:
        selection = self._share.request.selection
        if selection.matches(letter):
            return True
        parked = letter.parked is not None and not selection.parked
        outcomes.fail(letter.sequence, _PARKED if parked else _EXCLUDED)
        return False

    async def _do(
        self, steps: Steps, report: RedriveReport, letters: list[DeadLetter], dismissed: list[NotDead]
    ) -> None:
        if audit := self._audit:
            redriven = [each.sequence for each in dismissed if each.status == Status.REDRIVEN]
            for record in await map_concurrently(audit.last_record, redriven):
                if record and record.run == self._share.request.run:
                    # By an earlier try of this task, or by another one at this moment.
                    if record.action == "parked":
                        report.add_parked(record.sequence)
                    else:
                        report.redriven.add(record.sequence, record.new_sequence or record.sequence)
        await steps.clean_up(dismissed)
        await steps.redrive(letters)


def _restarted(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether a server was started anew since the driver's look; it may have forgotten deaths then."""
    where = ("server_name", "host", "port")
    return all(before.get(key) == now.get(key) for key in where) and before["server_id"] != now["server_id"]
