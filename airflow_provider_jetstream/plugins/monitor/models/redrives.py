"""Models of redrives, of a letter's edit, and of consumers' pauses."""

from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel

RedriveStateName: TypeAlias = Literal["planned", "running", "paused", "at_gate", "aborted", "finished", "failed"]


class OutcomesView(MonitorModel):
    """What became of redriven letters: of those that were awaited.

    :param completed: completed after the redrive
    :param died_again: dead letters once more
    :param still_running: neither has been seen yet
    :param unknown: nothing tells how they ended
    """

    completed: int = 0
    died_again: int = 0
    still_running: int = 0
    unknown: int = 0


class DeathCountView(MonitorModel):
    """How many jobs died again of one cause.

    :param error: the error's type and text, or the reason; only the reason's name where payloads are hidden
    :param as_before: how many of them died of the same cause as before
    """

    fingerprint: str
    error: str
    count: int
    as_before: int


class WaveView(MonitorModel):
    """A part of a redrive whose outcome is awaited before the next one.

    :param number: from 1
    :param size: how many letters at most; ``null`` for all that remain
    :param state: ``redriving``, ``awaiting`` the ends of its jobs, ``at_gate`` where a person decides, ``passed``
    :param parked_again: how many that died again were parked at the gate
    :param brought_again: how many of its letters had died again in a wave before
    :param passed_by: ``rule``, or the person's name; empty where nobody has let it pass
    :param reason: the decision in words, with its numbers
    """

    number: int
    size: int | None
    state: str
    began_at: datetime
    redriven: int
    parked: int
    outcomes: OutcomesView
    died_of: list[DeathCountView]
    parked_again: int
    brought_again: int
    passed_by: str
    reason: str


class ControlView(MonitorModel):
    """What a person asked of a redrive.

    :param action: ``pause``, ``resume`` or ``abort``
    :param obeyed: whether the program that runs the redrive has read it
    """

    action: str
    who: str
    why: str | None
    at: datetime
    obeyed: bool


class RedriveView(MonitorModel):
    """A redrive: what was selected, by whom and why, what was done, and what became of it.

    :param state: with what people asked for; ``at_gate`` waits for ``resume`` or ``abort``; ``failed`` goes on when it
        is run again
    :param reason: why it is in this state; empty where the state says it
    :param user: the person's name, where one started it
    :param who: the Airflow task's identifying fields, or those that another program recorded
    :param selection: the fields of the selection
    :param plan: the other fields of the request: protocol, rate, waves, the rule that stops it
    :param letters: about how many letters were selected when it began
    :param at: when it was recorded last
    :param redriven: how many letters became jobs
    :param failed: how many stayed dead letters although they were selected
    :param gone: how many were no dead letters any more
    :param rate: letters a second; ``null`` before the first ones
    :param failures: sequence → why it stayed; the first 20
    :param waves: empty where it has none
    :param controls: oldest first; only of a single redrive
    :param hidden: whether reasons, selection and failures are left out, since its letters may be of DAGs that the user
        may not see
    :param summary: what was done and what became of it, a sentence
    """

    id: str
    queue: str
    state: RedriveStateName
    reason: str
    user: str | None
    who: dict[str, Any]
    why: str | None
    selection: dict[str, Any]
    plan: dict[str, Any]
    letters: int | None
    began_at: datetime
    at: datetime
    redriven: int
    parked: int
    failed: int
    gone: int
    rate: float | None
    outcomes: OutcomesView
    failures: dict[str, str] = Field(default_factory=dict)
    waves: list[WaveView] = Field(default_factory=list)
    controls: list[ControlView] = Field(default_factory=list)
    hidden: bool = False
    summary: str


class RedriveList(MonitorModel):
    """Redrives of a queue, newest first.

    :param not_shown: further ones, of DAGs whose task instances the user may not see
    """

    redrives: list[RedriveView]
    not_shown: int = 0


class SteerRequest(MonitorModel):
    """A request to pause, resume or abort a redrive, or to resume a consumer.

    :param why: a reason, for the audit
    :param park_returned: with ``resume`` of a redrive at a gate: park the letters of the wave that died again
    """

    why: str | None = Field(default=None, max_length=500)
    park_returned: bool = False


class PauseRequest(SteerRequest):
    """A request to pause a consumer.

    :param seconds: for how long; at most ``QueueDetail.max_pause_seconds``
    """

    seconds: float = Field(gt=0)


class ConsumerPaused(MonitorModel):
    """The state of a consumer after it was paused or resumed.

    :param paused_until: ``null`` where it isn't paused
    :param recorded: whether the audit records it; a queue without an audit can't
    """

    consumer: str
    paused_until: datetime | None
    recorded: bool


class EditRequest(MonitorModel):
    """A request to change one letter and redrive it.

    :param sha256: the digest of the body that was edited, as ``Payload.sha256``: another one is refused
    :param body: the new body as text; ``null`` to leave the bytes as they are
    :param headers: the new headers, all of them; ``null`` to leave them as they are
    :param subject: the new subject; ``null`` to leave it as it is
    :param why: a reason, for the audit
    :param dry_run: whether only the difference is returned
    """

    sha256: str
    body: str | None = None
    headers: list[tuple[str, str]] | None = None
    subject: str | None = None
    why: str | None = Field(default=None, max_length=500)
    dry_run: bool = True


class EditResult(MonitorModel):
    """What an edit changes, and what was done.

    :param diff: of the body's lines, in the unified form; empty where nothing differs or the body isn't text
    :param headers: the headers that differ: name, value before, value after; ``null`` where there is none
    :param subject: the subject after, if it differs
    :param warnings: what the edit may break, a sentence each, such as a body that was JSON and isn't any more
    :param redriven: the new job's sequence; ``null`` for a dry run
    :param redrive: the id of the redrive; ``null`` for a dry run
    """

    sequence: int
    diff: str
    headers: list[tuple[str, str | None, str | None]]
    subject: str | None
    size_before: int
    size_after: int
    warnings: list[str]
    redriven: int | None = None
    redrive: str | None = None
