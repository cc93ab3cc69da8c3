"""The redrives of a queue as the audit stores them: what each has done, and what people ask of it.

The last message on ``audit.<queue>.redrives.<id>`` is the redrive as its holder recorded it, on condition that the
holder has the queue's lease. What people ask of it (pause, resume, abort) are messages on
``audit.<queue>.redrive-controls.<id>``, in the order in which the server stored them; the holder reads and obeys them
between pages and at the gates of waves.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import parse_record
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.streams import last_message, read_range
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError, NotFoundError, RedriveRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

ControlAction = Literal["pause", "resume", "abort"]
Engine = Literal["python", "spark"]

# A redrive has the sequences that a wave returned in memory one by one; two of them in text may stand for any number.
_MOST_RETURNED: Final = 10_000_000


def _returned(text: str) -> str:
    if text and (count := SequenceRanges.decode(text).count) > _MOST_RETURNED:
        raise ValueError(f"expected at most {_MOST_RETURNED:,} sequences, found {count:,}")
    return text


class RedriveState(StrEnum):
    """The state of a redrive."""

    PLANNED = "planned"
    """Not recorded yet: the state of a report before its redrive begins."""
    RUNNING = "running"
    """Letters are redriven, or the jobs of a wave are awaited."""
    PAUSED = "paused"
    """A person paused it; ``resume`` goes on."""
    AT_GATE = "at_gate"
    """A wave ended so that a person has to decide: ``resume`` goes on with the next one."""
    ABORTED = "aborted"
    """A person aborted it; the other letters stay where they are."""
    FINISHED = "finished"
    """Every selected letter was handled, and every wave's outcome is known."""
    FAILED = "failed"
    """It ended with letters that couldn't be redriven, or with an error; running it again goes on."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is redriven, however often it is run."""
        return self in (RedriveState.ABORTED, RedriveState.FINISHED)


class _RedrivePart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RedriveControl(_RedrivePart):
    """What a person asked of a redrive.

    :param version: of the record's form
    :param action: ``pause``, ``resume`` or ``abort``
    :param who: the person's name
    :param why: the reason given
    :param park_returned: with ``resume`` at a gate: park the letters of the wave that died again, all of them
    :param at: when the server stored it
    :param sequence: its sequence in the audit
    """

    version: Literal[1] = 1
    action: ControlAction
    who: str = Field(max_length=200)
    why: str | None = Field(default=None, max_length=2_000)
    park_returned: bool = False
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    sequence: int = 0

    @property
    def summary(self) -> str:
        """What was asked, by whom and why."""
        return f"{self.action} by {self.who}" + (f": {self.why}" if self.why else "")


class DeathCount(_RedrivePart):
    """How many jobs died again of one cause.

    :param fingerprint: the digest that letters of one cause share; empty where it isn't known
    :param error: the error's type and text, or the reason of the death, shortened
    :param count: how many
    :param as_before: how many of them died of the same cause as the letter that they are a copy of
    """

    fingerprint: str
    error: str = ""
    count: int
    as_before: int = 0


class RedriveOutcomes(_RedrivePart):
    """What became of redriven letters.

    :param completed: completed after the redrive; a cancelled job, too, counts as completed
    :param died_again: dead letters once more, and not brought back since
    :param still_running: neither has been seen yet
    :param unknown: how the job ended isn't known: nothing tells, or it is gone without evidence
    """

    completed: int = 0
    died_again: int = 0
    still_running: int = 0
    unknown: int = 0

    @classmethod
    def of_wait(cls, report: Mapping[str, Any]) -> RedriveOutcomes:
        """Return what a wait for all jobs has found.

        :param report: a :class:`~airflow_provider_jetstream.jetstream.WaitReport`, as JSON
        """
        return cls(
            completed=report["completed"] + report.get("cancelled", 0),
            died_again=report["dead"],
            still_running=report["awaited"],
            unknown=report.get("unaccounted", 0),
        )


class Wave(_RedrivePart):
    """A part of a redrive whose jobs' ends are awaited before the next part begins.

    :param number: from 1
    :param size: how many letters at most; ``None`` for all that remain
    :param state: ``redriving`` letters, ``awaiting`` the ends of their jobs, ``at_gate``, or ``passed``
    :param from_sequence: the first sequence of the audit that may hold one of its letters
    :param cursor: from where the ends of its jobs are read; ``None`` where nothing tells of an end
    :param began_at: when it began
    :param awaited_from: when its last letter was redriven, so that the ends of its jobs are awaited; by the server's
        clock, like ``began_at``
    :param redriven: how many letters became jobs
    :param parked: how many were parked
    :param outcomes: what became of them, as far as it is known
    :param died_of: of what those died that died again, the most frequent causes first
    :param returned: the stream sequences of the jobs that died again, as ranges in text
    :param parked_again: how many of them were parked at the gate
    :param brought_again: how many of its letters had died again in a wave before
    :param passed_by: who let the redrive go on: ``rule``, or the person's name; empty where nobody has
    :param reason: the decision in words, with its numbers
    """

    number: int
    size: int | None = None
    state: Literal["redriving", "awaiting", "at_gate", "passed"] = "redriving"
    from_sequence: int
    cursor: dict[str, Any] | None = None
    began_at: datetime
    awaited_from: datetime | None = None
    redriven: int = 0
    parked: int = 0
    outcomes: RedriveOutcomes = RedriveOutcomes()
    died_of: tuple[DeathCount, ...] = ()
    returned: Annotated[str, AfterValidator(_returned)] = ""
    parked_again: int = 0
    brought_again: int = 0
    passed_by: str = ""
    reason: str = ""


class Redrive(_RedrivePart):
    """One redrive: what was selected, by whom and why, how far it is, and what became of it.

    :param version: of the record's form
    :param id: its id, one token; a later redrive of the same program has a higher one
    :param stream: the work queue
    :param created: when the work queue was created, in the server's own text
    :param run: the key under which it is run again and goes on; its id where the request has no key
    :param engine: ``python`` or ``spark``
    :param who: who requested it: the Airflow task as its identifying fields, with the ``person`` who triggered its run
        where that is known, or whatever the caller passed
    :param why: the reason given for it
    :param selection: which letters, as the fields of a :class:`~airflow_provider_jetstream.jetstream.Selection`
    :param plan: how: the other fields of the request, as JSON; a function is described by its name
    :param until: with waves: the last stream sequence that was stored when it began, so that copies aren't selected
    :param letters: about how many letters there were when it began; ``None`` where that isn't known
    :param state: its state, with what people asked of it since the holder's last record
    :param reason: why it is in this state, a sentence; empty where the state says it
    :param began_at: when it began, by the server's clock
    :param at: when the holder's last record was stored, by the server's clock
    :param from_sequence: the first sequence of the audit that may hold one of its letters
    :param redriven: how many letters became jobs; a letter that died again and was brought back counts once more
    :param parked: how many were parked
    :param discarded: how many were discarded
    :param failed: how many stayed dead letters although they were selected
    :param gone: how many were no dead letters any more
    :param rate: letters a second since it began or went on; ``None`` before the first ones
    :param outcomes: what became of the letters
    :param waves: its waves so far; empty where the request has none
    :param report: the :class:`~airflow_provider_jetstream.jetstream.RedriveReport` so far, as JSON
    :param controls_to: the sequence in the audit of the last control that the holder has obeyed
    :param controls: what people asked of it, oldest first; only where one redrive is read
    :param revision: the sequence of the holder's last record in the audit
    """

    version: Literal[1] = 1
    id: str
    stream: str
    created: str
    run: str
    engine: Engine = "python"
    who: dict[str, Any] = Field(default_factory=dict)
    why: str | None = None
    selection: dict[str, Any] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)
    until: int = 0
    letters: int | None = None
    state: RedriveState = RedriveState.PLANNED
    reason: str = ""
    began_at: datetime
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    from_sequence: int = 0
    redriven: int = 0
    parked: int = 0
    discarded: int = 0
    failed: int = 0
    gone: int = 0
    rate: float | None = None
    outcomes: RedriveOutcomes = RedriveOutcomes()
    waves: tuple[Wave, ...] = ()
    report: dict[str, Any] = Field(default_factory=dict)
    controls_to: int = 0
    controls: tuple[RedriveControl, ...] = Field(default=(), exclude=True)
    revision: int = Field(default=0, exclude=True)

    @property
    def pending(self) -> tuple[RedriveControl, ...]:
        """What people asked and the holder hasn't obeyed yet; a redrive that nobody runs obeys when it is run again."""
        return tuple(control for control in self.controls if control.sequence > self.controls_to)

    def with_controls(self, controls: Sequence[RedriveControl]) -> Redrive:
        """Return the redrive in the state that people asked for."""
        state, reason = self.state, self.reason
        for control in controls:
            # What was asked before it came to a gate was asked of a redrive that was paused.
            if self.state == RedriveState.AT_GATE and control.action == "resume" and control.sequence < self.revision:
                continue
            if control.sequence > self.controls_to:
                state = next_state(state, control.action)
                reason = reason if state == self.state else control.summary
        return self.model_copy(update={"state": state, "reason": reason, "controls": tuple(controls)})


def next_state(state: RedriveState, action: ControlAction) -> RedriveState:
    """Return a redrive's state after it has obeyed a control; the same state where the control changes nothing."""
    if state.is_over or (state == RedriveState.FAILED and action != "abort"):
        return state
    if action == "abort":
        return RedriveState.ABORTED
    if action == "resume":
        return RedriveState.RUNNING if state in (RedriveState.PAUSED, RedriveState.AT_GATE) else state
    return state if state == RedriveState.AT_GATE else RedriveState.PAUSED


def redrive_subject(queue: object, redrive: str) -> str:
    """Return the subject on which the state of a redrive is recorded.

    :param redrive: its id, one token; ``*`` for the filter of all
    """
    return f"audit.{queue}.redrives.{redrive}"


def redrive_control_subject(queue: object, redrive: str) -> str:
    """Return the subject on which people pause, resume and abort a redrive.

    :param redrive: its id, one token; ``*`` for the filter of all
    """
    return f"audit.{queue}.redrive-controls.{redrive}"


def new_redrive_id() -> str:
    """Return the id of another redrive: the time and some random characters."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{token_hex(4)}"


_LONGEST_NAME = 200
_BEGINNING = attrgetter("from_sequence", "id")


async def list_redrives(connection: Connection, queue: WorkQueue, *, limit: int = 50) -> list[Redrive]:
    """Read the redrives of a queue, the latest first, each in the state that people asked for.

    :param limit: how many at most
    :raises NotFoundError: the queue, or its audit, doesn't exist
    """
    audit = await _open(connection, queue)
    ids = [
        subject.rpartition(".")[2]
        async for subject, _ in subject_counts(connection, audit.stream, redrive_subject(audit.queue, "*"))
    ]
    ids = sorted(ids, reverse=True)[:limit]
    found = await map_concurrently(lambda redrive: _read(audit, connection, redrive), ids)
    # Ids have the time by the clock of the program; where in the audit a redrive began is the server's.
    return sorted((redrive for redrive in found if redrive), key=_BEGINNING, reverse=True)


async def read_redrive(connection: Connection, queue: WorkQueue, redrive: str) -> Redrive:
    """Read one redrive, with what people asked of it.

    :param redrive: its id
    :raises NotFoundError: there is no redrive of this id; or the queue, or its audit, doesn't exist
    """
    return await require_redrive(connection, await _open(connection, queue), redrive)


async def pause_redrive(
    connection: Connection, queue: WorkQueue, redrive: str, *, who: str, why: str | None = None
) -> Redrive:
    """Have a redrive stop before its next letters, until it is resumed; nothing changes where it is paused.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is over, or has failed
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "pause", who, why)


async def resume_redrive(
    connection: Connection,
    queue: WorkQueue,
    redrive: str,
    *,
    who: str,
    why: str | None = None,
    park_returned: bool = False,
) -> Redrive:
    """Have a redrive go on that is paused, or that waits at the gate of a wave; nothing changes where it runs.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :param park_returned: at a gate: park the letters of the wave that died again; otherwise a later wave brings them
        back once more
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is over, or has failed
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "resume", who, why, park_returned=park_returned)


async def abort_redrive(
    connection: Connection, queue: WorkQueue, redrive: str, *, who: str, why: str | None = None
) -> Redrive:
    """End a redrive: letters that aren't begun stay where they are; nothing changes where it is aborted.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is finished
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "abort", who, why)


async def _control(
    connection: Connection,
    queue: WorkQueue,
    redrive: str,
    action: ControlAction,
    who: str,
    why: str | None,
    **fields: Any,
) -> Redrive:
    if not isinstance(who, str) or not who.strip() or len(who) > _LONGEST_NAME:
        raise ArgumentError(f"expected the name of the person who asks for it as who, found {who!r}: give a name")
    try:
        control = RedriveControl(action=action, who=who, why=why, **fields)
        body = control.model_dump_json(exclude={"at", "sequence"}, exclude_none=True).encode()
    except ValueError as error:
        raise ArgumentError(f"expected who and why as text, found otherwise: {error}") from None
    audit = await _open(connection, queue)
    found = await require_redrive(connection, audit, redrive)
    if next_state(found.state, action) == found.state:
        _require_effect(found, action)
        return found
    ack = await store(connection, redrive_control_subject(audit.queue, redrive), body)
    found = await require_redrive(connection, audit, redrive)
    # It may have ended before its holder read this.
    if found.controls_to < ack.sequence and not any(control.sequence >= ack.sequence for control in found.pending):
        _require_effect(found, action)
    return found


def _require_effect(redrive: Redrive, action: ControlAction) -> None:
    """Raise where a control could never be obeyed."""
    if redrive.state == RedriveState.ABORTED and action == "abort":
        return
    if redrive.state.is_over or redrive.state == RedriveState.FAILED:
        what = "start another one" if redrive.state.is_over else f"run it again with run={redrive.run!r}, which goes on"
        since = f"{redrive.at:%Y-%m-%dT%H:%M:%SZ}"
        raise RedriveRequestError(
            f"expected a redrive of {redrive.stream} that can {action}, found {redrive.id} {redrive.state.value} since"
            f" {since}{f' ({redrive.reason})' if redrive.reason else ''}: {what}"
        )


async def require_redrive(connection: Connection, audit: AuditLog, redrive: str) -> Redrive:
    """Read one redrive with its controls.

    :raises NotFoundError: there is none of this id
    """
    if (
        "." not in redrive
        and not subject_problem(redrive, wildcards=False)
        and (found := await _read(audit, connection, redrive))
    ):
        return found
    raise NotFoundError(
        f"expected a redrive of {audit.queue} with the id {redrive!r}, found none in {audit.stream}: list them, or see"
        " whether the audit's max_age is over"
    )


async def _read(audit: AuditLog, connection: Connection, redrive: str) -> Redrive | None:
    found = await read_record(connection, audit, redrive)
    return found and found.with_controls(await read_controls(connection, audit, redrive))


async def read_record(connection: Connection, audit: AuditLog, redrive: str) -> Redrive | None:
    """Read a redrive as its holder recorded it last; ``None`` where there is none."""
    message = await last_message(connection, audit.stream, redrive_subject(audit.queue, redrive))
    return parse_redrive(message, audit.created) if message else None


def parse_redrive(message: StoredMessage, created: str) -> Redrive | None:
    """Parse a record; ``None`` where it isn't one of this queue."""
    found = parse_record(Redrive, message, created)
    if found is None or found.id != message.subject.rpartition(".")[2]:
        return None
    return found.model_copy(update={"revision": message.sequence})


async def read_controls(connection: Connection, audit: AuditLog, redrive: str, after: int = 0) -> list[RedriveControl]:
    """Read what people asked of a redrive, oldest first.

    :param after: only what the audit stored after this sequence
    """
    subject = redrive_control_subject(audit.queue, redrive)
    last = await last_message(connection, audit.stream, subject)
    if last is None or last.sequence <= after:
        return []
    return [
        control.model_copy(update={"sequence": message.sequence})
        async for message in read_range(connection, audit.stream, subject, after + 1, last.sequence)
        if (control := parse_record(RedriveControl, message))
    ]


async def _open(connection: Connection, queue: WorkQueue) -> AuditLog:
    created = (await stream_info(connection, queue.name))["created"]
    audit = await AuditLog.open(connection, queue, created)
    if audit is None:
        raise NotFoundError(
            f"expected an audit of {queue.name}, which stores its redrives, found none: declare audit (the default) and"
            " provision the queue"
        )
    return audit
