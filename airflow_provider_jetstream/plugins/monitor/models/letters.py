"""Models of dead letters and stored jobs: groups, pages, details, searches, diagnoses."""

from datetime import datetime
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis
from airflow_provider_jetstream.plugins.monitor.models.figure import Figure, MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.queues import Problem


class ScanState(MonitorModel):
    """The progress of the scans of a queue.

    :param state: ``ready``, ``scanning`` while the first scan runs, ``failed`` where no scan has succeeded
    :param problem: why the last scan failed; older results are shown if there are some
    :param scanned_at: when the shown scan ended
    :param age_seconds: how long ago that was
    :param seen: letters that the running scan has seen
    :param complete: whether the shown scan holds every letter; if not, it holds the first ones, by sequence
    """

    state: Literal["ready", "scanning", "failed"]
    problem: Problem | None = None
    scanned_at: datetime | None = None
    age_seconds: float | None = None
    seen: int = 0
    complete: bool = True


class Group(MonitorModel):
    """Dead letters that share the values of some fields.

    :param key: a value for each field of ``group_by``; ``null`` where the letters have none
    :param first_seen: when the first letter died
    :param last_seen: when the last letter died
    :param example: the lowest sequence
    :param share: the part of all letters of these groups, from 0 to 1
    :param error_message: the error's text, or the worker's explanation, of one of its letters; ``null`` too where it
        isn't known or payloads are hidden
    :param select: the selection of exactly these letters, for ``letters``, ``dry-run`` and ``conf``; ``null`` where
        there is none, since a letter without an error class can't be selected by its absence
    """

    key: dict[str, str | None]
    count: Figure
    first_seen: datetime
    last_seen: datetime
    example: int
    share: float = 0.0
    error_message: str | None = None
    select: dict[str, Any] | None


class Groups(MonitorModel):
    """The groups of a queue's dead letters.

    :param group_by: the fields that letters of a group share
    :param total: letters in all groups
    :param uncertain: jobs that may be dead but aren't proved yet
    :param groups: largest first, at most 500
    :param groups_left_out: the number of further groups
    :param not_shown: matching letters of DAGs whose task instances the user may not see
    """

    scan: ScanState
    group_by: list[str]
    total: Figure
    uncertain: Figure
    groups: list[Group]
    groups_left_out: int
    not_shown: int


class OriginOfLetter(MonitorModel):
    """The Airflow task that published a job.

    :param map_index: its index among mapped instances, -1 where it isn't mapped
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int


class LetterLine(MonitorModel):
    """A dead letter in a list.

    :param sequence: its stream sequence in the work queue
    :param job_id: its id, or its sequence where it has none
    :param consumer: the consumer that delivered it
    :param reason: why it died
    :param error_class: the error's type
    :param error_message: the error's text, or the worker's explanation; ``null`` too where payloads are hidden
    :param error_place: the code location where the handler failed
    :param fingerprint: equal for letters of the same cause
    :param traceback_digest: equal for letters whose handler failed with the same call stack
    :param died_at: the time of its last failure
    :param deliveries: how often it was delivered, if that is known
    :param redrives: how often it was redriven before
    :param size: bytes of its body; ``null`` where only the audit knows of it
    :param parked: why it was parked, if it was
    :param origin: the task that published it; ``null`` where none did, or where that isn't known
    :param origin_known: whether it is known who published it
    """

    sequence: int
    job_id: str
    subject: str
    consumer: str | None
    reason: str
    error_class: str | None
    error_message: str | None
    error_place: str | None
    fingerprint: str
    traceback_digest: str | None
    died_at: datetime
    deliveries: int | None
    redrives: int
    size: int | None
    parked: str | None
    origin: OriginOfLetter | None
    origin_known: bool = True


class LetterPage(MonitorModel):
    """A page of a queue's dead letters.

    :param matching: letters that match the selection, on all pages
    :param letters: those of this page; fewer than ``limit`` where some ended since the scan
    :param next_after: ``after`` of the next page where letters are sorted by ``sequence``; ``null`` on the last one
    :param next_offset: ``offset`` of the next page; ``null`` on the last one
    :param gone: how many letters of this page have ended since the scan
    """

    scan: ScanState
    matching: Figure
    letters: list[LetterLine]
    next_after: int | None
    next_offset: int | None = None
    gone: int


class Payload(MonitorModel):
    """The body of a job; it must not be displayed as anything else than text.

    :param kind: ``json``, ``text`` where it is UTF-8, ``binary``
    :param raw: the bytes as text, exactly as they are stored; ``null`` where they aren't UTF-8
    :param hex: a dump of 16 bytes a line, where they aren't UTF-8
    :param parsed: the same text indented, where it is a JSON object or list; ``null`` where it isn't, or is cut
    :param notes: what readers of the JSON may take differently, a sentence each, such as a name that comes twice
    :param size: bytes of the whole body
    :param sha256: of the whole body, in hexadecimal; an edit names it
    :param truncated: whether this is only the beginning; ``…/body`` returns all of it
    :param text: one of the three, for a page that shows one only
    """

    kind: Literal["json", "text", "binary"]
    raw: str | None = None
    hex: str | None = None
    parsed: str | None = None
    notes: list[str] = Field(default_factory=list)
    size: int
    sha256: str
    truncated: bool
    text: str


class Attempt(MonitorModel):
    """An event in a letter's history.

    :param at: ``null`` where the time isn't known
    :param text: a phrase for people
    :param sequence: the stream sequence of the event, if it isn't the letter's own
    """

    at: datetime | None
    what: Literal["stored", "first_failure", "death", "redriven", "requeued", "parked", "discarded", "handled"]
    text: str
    sequence: int | None = None


class AuditLine(MonitorModel):
    """An audit record about a letter.

    :param action: ``redriven``, ``requeued``, ``parked``, ``discarded`` or ``handled``
    :param sequence: the letter's
    :param new_sequence: the redriven job's
    :param new_stream: the redriven job's queue, where it is another one
    :param why: the reason of the redrive
    :param who: the Airflow task's identifying fields, or those that another program recorded
    :param user: the person's name in Airflow, where one started it
    :param run: the id of the redrive
    :param discarded_by: the id of the redrive that discarded it, by which that is undone, as long as a copy is stored
    :param changes: what was changed in the job, if something was; without texts where payloads are hidden
    """

    at: datetime
    action: str
    sequence: int
    new_sequence: int | None
    new_stream: str | None
    why: str | None
    who: dict[str, Any]
    user: str | None = None
    run: str | None = None
    discarded_by: str | None = None
    changes: dict[str, Any] | None = None


class JobAttempt(MonitorModel):
    """One attempt at a job, as far as workers store that.

    :param number: which delivery of the job it was
    :param state: ``running``, ``failed``, or ``unanswered`` where the server has delivered the job again without it
    :param at: when its worker said something last; ``null`` where it said nothing
    :param fraction: how much of the job was done, from 0 to 1
    :param text: what the handler was doing; ``null`` too where payloads are hidden
    :param seconds: how long it took until it failed
    :param error_message: the error's text, or that there was no answer; ``null`` too where payloads are hidden
    :param error_place: the code location where the handler failed
    :param waits_until: until then the job waited for its next delivery, as far as its worker knew
    :param asked: what somebody has asked for since: ``retried`` or ``given up``, by whom, and why
    """

    number: int
    state: Literal["running", "failed", "unanswered"]
    at: datetime | None
    worker: str | None
    fraction: float | None
    text: str | None
    seconds: float | None
    error_class: str | None
    error_message: str | None
    error_place: str | None
    waits_until: datetime | None
    asked: str | None


LetterState: TypeAlias = Literal["dead", "parked", "redriven", "requeued", "discarded", "handled", "ended"]


class LetterDetail(MonitorModel):
    """The details of a dead letter, or of a job that was one.

    :param letter: as in the list; of a job that is no dead letter any more, what the audit holds
    :param state: ``dead`` in circulation, ``parked``; else what became of it: ``redriven`` as another job, ``requeued``
        in place, ``handled`` by a handler of the dead letter queue, ``ended``
    :param now: what is known of the job now, a sentence; ``null`` for a dead letter
    :param next: the sequence of the job that it became, where it was redriven
    :param next_queue: that job's queue, where it is another one
    :param source: where its body was read from: ``queue``, ``copy`` or ``archive``; ``null`` where it isn't stored any
        more
    :param first_failed_at: the time of its first failure, if a worker reported it
    :param worker: the worker that had its last delivery, if it recorded that
    :param seconds: how long its handler ran then, if the worker recorded that
    :param traceback: the handler's own functions on the way to the error, the outermost first
    :param explanation: the worker's explanation; ``null`` where payloads are hidden
    :param hidden: whether body, headers and texts are left out, since the user may not see them
    :param payload: ``null`` where hidden
    :param headers: in order, name and value; empty where hidden
    :param entries: sequences of its entries in the dead letter queue
    :param dead_letter_queue: that stream
    :param attempts: its history, oldest first
    :param tries: the attempts at its job, in their order; empty where workers store none
    :param audit: records about it, and about the letter that it was redriven from, newest first
    """

    letter: LetterLine
    state: LetterState = "dead"
    now: str | None = None
    next: int | None = None
    next_queue: str | None = None
    source: str | None
    stored_at: datetime | None
    first_failed_at: datetime | None
    worker: str | None = None
    seconds: float | None = None
    traceback: list[str] = Field(default_factory=list)
    explanation: str | None
    hidden: bool
    payload: Payload | None
    headers: list[tuple[str, str]]
    entries: list[int]
    dead_letter_queue: str
    attempts: list[Attempt]
    tries: list[JobAttempt] = Field(default_factory=list)
    audit: list[AuditLine]


class FoundLetter(MonitorModel):
    """A letter that was found.

    :param where: what of it holds the text: ``job_id``, ``error``, ``body``, ``header``
    :param state: ``dead`` or ``parked``, or what became of it, as the audit says
    """

    type: Literal["found"] = "found"
    letter: LetterLine
    state: LetterState
    where: list[Literal["job_id", "error", "body", "header"]]


class SearchProgress(MonitorModel):
    """How far the search has come; every second at least.

    :param read: letters that were read
    :param of: letters that are to be read
    """

    type: Literal["progress"] = "progress"
    read: int
    of: int


class SearchEnd(MonitorModel):
    """The last line.

    :param reason: ``all`` were read; ``limit`` so many were found; ``time`` the time was over, in
        which letters are also read for the first time; ``error``
    :param next_after: ``after`` of a search that goes on; ``null`` where all were read
    :param not_shown: letters that were left out, of DAGs whose task instances the user may not see
    :param problem: with ``error``, what went wrong
    """

    type: Literal["end"] = "end"
    reason: Literal["all", "limit", "time", "error"]
    read: int
    found: int
    next_after: int | None = None
    not_shown: int = 0
    problem: str | None = Field(default=None)


JobState: TypeAlias = Literal["pending", "delivered", "unserved"]


class JobLine(MonitorModel):
    """A stored job.

    :param sequence: its stream sequence
    :param job_id: its id, or its sequence where it has none
    :param consumer: the consumer whose filter it matches; ``null`` where none does
    :param state: ``pending`` never delivered; ``delivered`` delivered at least once and still stored: in flight, or it
        waits for its next delivery, or it is dead; ``unserved`` matches no consumer
    :param stored_at: when it was stored
    :param size: bytes of its body
    :param redrives: how often it was redriven before
    :param origin: the task that published it
    :param attempt: the attempt of which a worker said something last; ``null`` where none did
    """

    sequence: int
    job_id: str
    subject: str
    consumer: str | None
    state: JobState
    stored_at: datetime
    size: int
    redrives: int
    origin: OriginOfLetter | None
    attempt: JobAttempt | None = None


class JobPage(MonitorModel):
    """A page of a queue's jobs, by sequence.

    :param total: how many jobs there are in that state, as the consumers count; of delivered ones those in flight
    :param jobs: those of this page; without those of DAGs whose task instances the user may not see
    :param next_after: ``after`` of the next page; ``null`` on the last one
    :param not_shown: how many jobs of the page are left out
    """

    state: JobState
    total: int
    jobs: list[JobLine] = Field(default_factory=list)
    next_after: int | None = None
    not_shown: int = 0


class JobDetail(MonitorModel):
    """The details of a job.

    :param hidden: whether body and headers are left out, since the user may not see them
    :param payload: ``null`` where hidden
    :param headers: in order, name and value; empty where hidden
    :param attempts: the attempts at it, in their order; empty where workers store none
    """

    job: JobLine
    hidden: bool
    payload: Payload | None
    headers: list[tuple[str, str]]
    attempts: list[JobAttempt] = Field(default_factory=list)


_QUOTING = ("error_message", "advice", "evidence", "headline")


class DiagnosisView(MonitorModel):
    """A diagnosis of dead letters, as ``diagnose_dead_letters`` makes it.

    :param headline: the diagnosis in one line; ``null`` where texts are hidden
    :param groups: the letters by cause, largest first; without texts that may quote bodies where these are hidden
    :param letters_left_out: letters of causes that aren't among the groups
    """

    queue: str
    at: str
    dead: int
    uncertain: int
    action: str
    headline: str | None
    groups: list[dict[str, Any]]
    letters_left_out: int

    @classmethod
    def of(cls, diagnosis: Diagnosis, *, hidden: bool) -> Self:
        """Return a diagnosis for the page.

        :param hidden: whether texts that may quote bodies are left out
        """
        values = diagnosis.as_json()
        if hidden:
            values["headline"] = None
            values["groups"] = [
                {name: None if name in _QUOTING else value for name, value in group.items()}
                for group in values["groups"]
            ]
        return cls(**{name: values[name] for name in cls.model_fields})
