"""Dead letters: groups, pages, and one of them."""

from datetime import datetime
from typing import Any, Literal

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel, Problem


class ScanState(MonitorModel):
    """How far the scan is that letters are shown from.

    :param state: ``ready``, ``scanning`` while the first one runs, ``failed`` where none could be done
    :param problem: why it failed; older results are shown as long as there are some
    :param scanned_at: when the shown one ended
    :param age_seconds: how old it is now
    :param seen: letters that the running one has seen
    :param complete: whether the shown one holds every letter; else the first of them, by sequence
    """

    state: Literal["ready", "scanning", "failed"]
    problem: Problem | None = None
    scanned_at: datetime | None = None
    age_seconds: float | None = None
    seen: int = 0
    complete: bool = True


class Group(MonitorModel):
    """Dead letters that have something in common.

    :param key: a value for each field of ``group_by``; ``null`` where a letter has none
    :param count: how many there are
    :param first_seen: when the first died
    :param last_seen: when the last died
    :param example: the sequence of the first
    :param select: the selection that means exactly these letters, for ``letters``, ``dry-run`` and ``conf``; ``null``
        where none does, since a letter without an error class can't be selected by that
    """

    key: dict[str, str | None]
    count: int
    first_seen: datetime
    last_seen: datetime
    example: int
    select: dict[str, Any] | None


class Groups(MonitorModel):
    """A queue's dead letters, put together.

    :param scan: how far the scan is
    :param group_by: what letters of a group share
    :param total: letters in all groups
    :param uncertain: may be dead; it can't be told yet
    :param groups: the groups, largest first, at most 500
    :param groups_left_out: how many there are beyond those
    """

    scan: ScanState
    group_by: list[str]
    total: int
    uncertain: int
    groups: list[Group]
    groups_left_out: int


class OriginOfLetter(MonitorModel):
    """The Airflow task that published a job.

    :param dag_id: its DAG
    :param run_id: its run
    :param task_id: its task
    :param map_index: its index among mapped instances, -1 where it isn't mapped
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int


class LetterLine(MonitorModel):
    """A dead letter in a list.

    :param sequence: its stream sequence in the work queue
    :param job_id: its own id, or its sequence
    :param subject: its subject
    :param consumer: who delivered it
    :param reason: why it died
    :param error_class: the error's type
    :param error_message: the error's text, or the worker's words; ``null`` too where payloads are hidden
    :param error_place: where the handler failed
    :param fingerprint: the same for letters that died of the same thing
    :param traceback_digest: the same for letters that failed at the same place
    :param died_at: its last failure
    :param deliveries: how often it was delivered, where that is known
    :param redrives: how often it was redriven before
    :param size: bytes of its body
    :param parked: why it was taken out of circulation, where it was
    :param origin: who published it
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
    size: int
    parked: str | None
    origin: OriginOfLetter | None


class LetterPage(MonitorModel):
    """Some of a queue's dead letters, by sequence.

    :param scan: how far the scan is
    :param matching: letters that the selection means, on all pages
    :param letters: those of this page; fewer than asked for where some ended since the scan
    :param next_after: ``after`` of the next page; ``null`` on the last one
    :param gone: how many of this page are no dead letters any more
    """

    scan: ScanState
    matching: int
    letters: list[LetterLine]
    next_after: int | None
    gone: int


class Payload(MonitorModel):
    """The body of a job, as data; never to be shown as anything but text.

    :param kind: how ``text`` is to be read: ``json`` indented JSON, ``text`` UTF-8, ``hex`` a dump of 16 bytes a line
    :param text: the body, or the beginning of it
    :param size: bytes of the whole body
    :param truncated: whether ``text`` is only the beginning; JSON is then shown as text
    """

    kind: Literal["json", "text", "hex"]
    text: str
    size: int
    truncated: bool


class Attempt(MonitorModel):
    """One thing known about a letter's life, oldest first.

    :param at: when; ``null`` where that isn't known
    :param what: ``stored``, ``first_failure``, ``death``, ``redriven``, ``requeued`` or ``parked``
    :param text: a sentence
    :param sequence: the stream sequence it is about, where it isn't the letter's own
    """

    at: datetime | None
    what: Literal["stored", "first_failure", "death", "redriven", "requeued", "parked"]
    text: str
    sequence: int | None = None


class AuditLine(MonitorModel):
    """What was done with a letter.

    :param at: when
    :param action: ``redriven``, ``requeued`` or ``parked``
    :param sequence: which letter
    :param new_sequence: what came of it
    :param why: the reason given
    :param who: the Airflow task's identifying fields, or whatever was said
    """

    at: datetime
    action: str
    sequence: int
    new_sequence: int | None
    why: str | None
    who: dict[str, Any]


class LetterDetail(MonitorModel):
    """One dead letter.

    :param letter: as in the list
    :param source: where its body was found: ``queue``, ``copy`` or ``archive``
    :param stored_at: when it was stored
    :param first_failed_at: its first failure, where a worker told
    :param explanation: the worker's own words; ``null`` where payloads are hidden
    :param hidden: whether body, headers and texts are left out, since the one who asks may not see them
    :param payload: its body; ``null`` where hidden
    :param headers: its headers in order, name and value; empty where hidden
    :param entries: sequences in the dead letter queue that tell of it
    :param dead_letter_queue: that stream
    :param attempts: what is known about its life, oldest first
    :param audit: what was done with it, and with the letter that it was redriven from, newest first
    """

    letter: LetterLine
    source: str
    stored_at: datetime | None
    first_failed_at: datetime | None
    explanation: str | None
    hidden: bool
    payload: Payload | None
    headers: list[tuple[str, str]]
    entries: list[int]
    dead_letter_queue: str
    attempts: list[Attempt]
    audit: list[AuditLine]
