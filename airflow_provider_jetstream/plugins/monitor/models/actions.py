"""Models of a user's permissions, of dry runs, redrives and edits, and of a task's jobs."""

from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.figure import Figure, MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState


class Me(MonitorModel):
    """The user's permissions, and the page's settings.

    :param may_act: whether Airflow lets the user trigger the DAG that redrives
    :param payloads: whether the user sees bodies and headers of jobs
    :param dag_id: the DAG that redrives
    :param refresh_seconds: the interval at which servers are polled
    :param connections: ids of the Airflow connections that are shown
    :param version: the package's
    :param user: the user's name, as the audit will say
    :param default_timezone: Airflow's ``[core] default_timezone``; all times of the API are in UTC
    """

    may_act: bool
    payloads: bool
    dag_id: str
    refresh_seconds: float
    connections: list[str]
    version: str
    user: str = ""
    default_timezone: str = "UTC"


Act: TypeAlias = Literal["redrive", "park", "in_place", "discard", "undo"]


class DryRunRequest(MonitorModel):
    """A request to count what an action would do.

    :param select: which letters, as in ``conf``; all in circulation where empty
    :param patch: a JSON Patch (RFC 6902) of the letters' bodies, as its JSON text; only with ``redrive``
    :param undo: the id of the redrive whose discarded letters come back, with ``undo``
    """

    select: dict[str, Any] = Field(default_factory=dict)
    action: Act = "redrive"
    patch: str | None = Field(default=None, max_length=65_536)
    undo: str | None = Field(default=None, max_length=200)


class SampleLetter(MonitorModel):
    """One of the letters that an action would change.

    :param error_place: the code location where the handler failed
    :param difference: what a patch changes of its body, in the unified form: JSON with a line for each value, the first
        forty lines; empty without a patch
    """

    sequence: int
    job_id: str
    subject: str
    reason: str
    error_class: str | None = None
    error_place: str | None = None
    difference: str = ""


class DryRun(MonitorModel):
    """What the action would do now; when it runs, it includes letters that have died by then.

    :param protocol: the redrive protocol
    :param guarantee: what the protocol guarantees
    :param redriven: how many letters would be redriven
    :param parked: how many would be parked
    :param discarded: how many would be discarded
    :param failed: how many would stay where they are
    :param failures: sequence → why it would stay; the first 20
    :param causes: why letters would stay → how many; the 20 most frequent. Like ``failures`` empty where some of the
        letters may be of DAGs that the user may not see
    :param changed: how many of the redriven a patch would change
    :param samples: five of the letters that would be redriven; with a patch, of those that it changes. Empty like
        ``failures``
    :param uncertain: jobs that may be dead but aren't proved yet
    :param undeliverable: jobs that match no consumer's filter
    :param risks: what could be lost in the queue's present state, a sentence each
    :param awaits_ends: whether the ends of redriven jobs are stored, so that a canary can be awaited
    :param conf: the DAG run's configuration for this action; ``why``, ``rate`` and ``dry_run`` may be added
    """

    protocol: str
    guarantee: str
    redriven: int
    parked: int
    discarded: int
    failed: int
    failures: dict[str, str]
    causes: dict[str, int] = Field(default_factory=dict)
    changed: int = 0
    samples: list[SampleLetter] = Field(default_factory=list)
    uncertain: int
    undeliverable: int
    risks: list[str]
    counted_at: datetime
    awaits_ends: bool
    conf: dict[str, Any]


class TaskQueue(MonitorModel):
    """The jobs of one task instance in one queue.

    :param connection: the Airflow connection's id
    :param map_index: -1 where the task isn't mapped
    :param published_at: when the task began to publish
    :param published: the number of published jobs on record
    :param ended: of those, how many have ended: unknown once the task is closed, since its jobs aren't recorded then
    :param stored: of those, how many are still in the queue; unknown likewise
    :param closed: whether the task has published all jobs and awaited those that it waits for
    :param letters: dead letters in circulation whose headers name the task
    :param parked: parked letters likewise
    :param select: the selection of those letters
    """

    connection: str
    queue: str
    task_id: str | None
    map_index: int | None
    published_at: datetime | None = None
    published: Figure
    ended: Figure
    stored: Figure
    closed: bool | None = None
    letters: Figure
    parked: Figure
    select: dict[str, Any] = Field(default_factory=dict)


class TaskJobs(MonitorModel):
    """The jobs of a DAG run or of one of its tasks.

    :param task_id: ``null`` for all tasks of the run
    :param map_index: the mapped instance; ``null`` for all of them
    :param queues: a line for each queue and task instance with a manifest or a dead letter
    :param connections: the states of the connections, without their queues
    :param scanning: queues whose dead letters haven't been scanned yet, as ``connection/queue``
    """

    dag_id: str
    run_id: str
    task_id: str | None
    map_index: int | None
    queues: list[TaskQueue]
    connections: list[ConnectionState]
    scanning: list[str]


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
    :param discarded: how many were discarded
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
    discarded: int
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


class JobAsked(MonitorModel):
    """What was done with a job that waited for its next delivery.

    :param asked: ``retry`` where it is delivered now, ``give_up`` where it is a dead letter now
    :param attempt: which delivery was the last one by then
    """

    sequence: int
    asked: Literal["retry", "give_up"]
    attempt: int


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
