"""The edit of one letter: what it changes, shown as a difference, and its redrive with the change."""

from __future__ import annotations

import difflib
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JobError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS, UNCHANGED, Repair, apply_repair
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.plugins.monitor.letter_view import dag_of
from airflow_provider_jetstream.plugins.monitor.models.redrives import EditResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.target import RedriveTarget
    from airflow_provider_jetstream.plugins.monitor.models.redrives import EditRequest

# A difference of more lines takes long, and nobody reads it.
_MAX_LINES = 2_000
_MAX_BYTES = 512 * 1024
_LEASE_SECONDS = 10.0


def edited(letter: DeadLetter, request: EditRequest, target: RedriveTarget) -> EditResult:
    """Return what an edit changes.

    :param target: the queue that gets the job
    :raises RedriveRequestError: the letter isn't the one that was edited, or it can't be a job with the change
    """
    require_same(letter, request)
    repair = _repair(letter, request)
    try:
        apply_repair(letter, repair)
        target.check_subject(repair.subject, letter.subject)
    except (JobError, RedriveError) as error:
        raise RedriveRequestError(f"the edit can't be sent: {error}") from None
    after = letter.body if repair.body is UNCHANGED else bytes(repair.body)
    diff, warnings = _diff(letter.body, after)
    if _is_json(letter.body) and not _is_json(after):
        warnings.append("the body was JSON and isn't any more")
    own = [(name, value) for name, value in letter.headers if not is_servers(name)]
    changed = []
    for name, values in repair.headers.items():
        before = [value for key, value in own if key == name]
        now = list(values) if isinstance(values, tuple) else []
        if before != now:
            changed.append((readable_text(name), _joined(before), _joined(now)))
    return EditResult(
        sequence=letter.sequence,
        diff=diff,
        headers=changed,
        subject=repair.subject,
        size_before=len(letter.body),
        size_after=len(after),
        warnings=warnings,
    )


async def redrive_edited(
    connection: Connection,
    queue: WorkQueue,
    letter: DeadLetter,
    request: EditRequest,
    who: Mapping[str, Any],
    result: EditResult,
) -> EditResult:
    """Redrive a letter with a change; it is refused if the letter isn't the one that was edited.

    :param result: what the edit changes
    :raises RedriveError: the letter stays as it is
    """

    def change(found: DeadLetter) -> Repair:
        require_same(found, request)
        return _repair(found, request)

    report = await redrive_dead_letters(
        connection,
        queue,
        RedriveRequest(
            # With its DAG, whose redrive this is, so that whoever may see the letter may see the redrive.
            selection=Selection(sequences=[letter.sequence], dag_id=_named_dag(letter)),
            transform=change,
            why=request.why,
            who=dict(who),
            lease_timeout=_LEASE_SECONDS,
        ),
    )
    if letter.sequence not in report.redriven:
        why = report.failed.get(letter.sequence, "it is no dead letter any more")
        raise RedriveError(f"expected job {letter.sequence} to be redriven with the change, found: {why}")
    return result.model_copy(update={"redriven": report.redriven[letter.sequence], "redrive": report.redrive})


def _named_dag(letter: DeadLetter) -> str | None:
    dag_id = dag_of(letter)
    return dag_id if dag_id and readable_text(dag_id) == dag_id else None


def require_same(letter: DeadLetter, request: EditRequest) -> None:
    """Return if a letter has the body that was edited.

    :raises RedriveRequestError: it has another one
    """
    found = sha256(letter.body).hexdigest()
    if found != request.sha256.lower():
        raise RedriveRequestError(
            f"expected the body that was edited, of sha256 {request.sha256[:64]}, found {found}: read the letter again"
        )


def _repair(letter: DeadLetter, request: EditRequest) -> Repair:
    headers: dict[str, str | tuple[str, ...] | None] = {}
    if request.headers is not None:
        kept = {name for name, _ in letter.headers if is_servers(name) or name in ORIGIN_HEADERS}
        wanted: dict[str, list[str]] = {}
        for name, value in request.headers:
            if name not in kept:
                wanted.setdefault(name, []).append(value)
        present: dict[str, list[str]] = {}
        for name, value in letter.headers:
            if name not in kept:
                present.setdefault(name, []).append(value)
        # A header that a person was shown with replacements for what isn't UTF-8 counts as unchanged.
        shown = {readable_text(name): [readable_text(value) for value in values] for name, values in present.items()}
        for name, values in wanted.items():
            if shown.get(name) != values:
                headers[name] = tuple(values)
        headers |= {name: None for name in present if readable_text(name) not in wanted}
    subject = request.subject if request.subject not in (None, letter.subject) else None
    return Repair(UNCHANGED if request.body is None else request.body.encode(), headers, subject)


def _diff(before: bytes, after: bytes) -> tuple[str, list[str]]:
    if before == after:
        return "", []
    try:
        old, new = before.decode().splitlines(), after.decode().splitlines()
    except UnicodeDecodeError:
        return "", ["the body wasn't UTF-8 text: all of it is replaced"]
    if max(len(before), len(after)) > _MAX_BYTES or max(len(old), len(new)) > _MAX_LINES:
        return "", ["the body is too long to show what differs"]
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="")), []


def _joined(values: list[str]) -> str | None:
    return "\n".join(map(readable_text, values)) if values else None


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def person(name: str) -> dict[str, Any]:
    """Return who acts, for the audit."""
    return {"person": name, "program": "monitor"}
