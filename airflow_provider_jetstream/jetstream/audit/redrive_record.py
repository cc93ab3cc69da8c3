"""What the audit stores about a redrive as a whole, and what people ask of it.

The last message on ``audit.<queue>.redrives.<id>`` is the redrive as its holder recorded it, on condition that the
holder has the queue's lease. What people ask of it (pause, resume, abort) are messages on
``audit.<queue>.redrive-controls.<id>``, in the order in which the server stored them; the holder reads and obeys them
between pages and at the gates of waves.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
            unknown=report.get("vanished", 0),
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
    """Return the state of a redrive in which a control is obeyed; the same one where it changes nothing."""
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
