"""Previews a redrive: what it would do, without changing anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import unified_diff
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.audit.intent import no_audit
from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE, LetterGroups
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.errors import CopyTooLargeError, RedriveError
from airflow_provider_jetstream.jetstream.queue.stream_config import StreamRoom
from airflow_provider_jetstream.jetstream.redrive.discard import Discards, require_discarded, returning_letters
from airflow_provider_jetstream.jetstream.redrive.json_patch import json_text, parse_json
from airflow_provider_jetstream.jetstream.redrive.key_order import check_order
from airflow_provider_jetstream.jetstream.redrive.letter_records import LetterRecords
from airflow_provider_jetstream.jetstream.redrive.protocol import (
    RedriveTarget,
    choose_protocol,
    own_request,
    read_target,
    require_sequences,
)
from airflow_provider_jetstream.jetstream.redrive.redriven_job import CopyLimit, failure_text, redriven_job, take_room
from airflow_provider_jetstream.jetstream.redrive.repair import new_content
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

_SAMPLE = 5
_NAMED_FAILURES = 100
_BODY_SHOWN = 200
# Comparing longer bodies takes long, and nobody reads more.
_LARGEST_COMPARED: Final = 64 * 1024
_MOST_LINES: Final = 2_000
_SHOWN_LINES: Final = 40
_SHOWN_CHARACTERS: Final = 200


@dataclass(slots=True)
class Preview(TaskReport):
    """What a redrive would do.

    :param protocol: how letters would be brought back
    :param guarantee: what the protocol guarantees
    :param target: the queue that would get the new jobs, where it is another one
    :param redriven: how many letters would be redriven
    :param parked: how many would be parked
    :param discarded: how many would be discarded
    :param without_copy: how many of these nothing could bring back
    :param failed: original sequence → why it would stay a dead letter; the first hundred
    :param failures: how many would stay dead letters
    :param causes: why they would stay → how many; the first hundred causes
    :param changed: how many of the redriven would get another body or other headers, by a transform or a patch
    :param groups: the letters by cause
    :param sample: the first few letters; with a patch, the first few that it changes
    :param uncertain: more jobs that may be dead: they can't be identified yet
    :param undeliverable: jobs that match no consumer
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    """

    protocol: Protocol
    guarantee: str
    target: str | None = None
    redriven: int = 0
    parked: int = 0
    discarded: int = 0
    without_copy: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    changed: int = 0
    groups: LetterGroups = field(default_factory=LetterGroups)
    sample: list[dict[str, Any]] = field(default_factory=list)
    uncertain: int = 0
    undeliverable: int = 0
    risks: tuple[str, ...] = ()

    def add_failure(self, sequence: int, why: str) -> None:
        """Count a letter that would stay a dead letter.

        :param sequence: its original stream sequence
        """
        self.failures += 1
        if len(self.failed) < _NAMED_FAILURES:
            self.failed[sequence] = why
        if why in self.causes or len(self.causes) < _NAMED_FAILURES:
            self.causes[why] = self.causes.get(why, 0) + 1

    def add(self, other: Preview) -> None:
        """Add the preview of other letters, which another process has made."""
        self.redriven += other.redriven
        self.parked += other.parked
        self.failures += other.failures
        self.changed += other.changed
        for cause, count in other.causes.items():
            self.causes[cause] = self.causes.get(cause, 0) + count
        self.failed = dict([*self.failed.items(), *other.failed.items()][:_NAMED_FAILURES])
        self.sample = sorted([*self.sample, *other.sample], key=itemgetter("sequence"))[:_SAMPLE]
        for key, group in other.groups.items():
            self.groups.merge(key, group)

    def as_json(self) -> dict[str, Any]:
        """Return the preview in a form that fits an XCom: counts, the largest groups and a sample."""
        return {
            "dry_run": True,
            "protocol": self.protocol.value,
            "guarantee": self.guarantee,
            "target": self.target,
            "redriven": self.redriven,
            "parked": self.parked,
            "discarded": self.discarded,
            "without_copy": self.without_copy,
            "failed": self.failures,
            "failures": dict(list(self.failed.items())[:20]),
            "causes": dict(sorted(self.causes.items(), key=lambda cause: -cause[1])[:20]),
            "changed": self.changed,
            "groups": [{"group": list(key), "count": group.count} for key, group in self.groups.largest()[:100]],
            "sample": self.sample,
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "risks": [str(risk) for risk in self.risks],
        }


async def preview(
    connection: Connection, queue: WorkQueue, request: RedriveRequest, group_by: Sequence[GroupField] = BY_CAUSE
) -> Preview:
    """Return what a redrive would do, and change nothing.

    :param request: which letters, and how
    :param group_by: the fields whose values the letters of a group share
    :raises RedriveRequestError: the request isn't possible for this queue
    :raises DeadLetterGoneError: a requested sequence is no dead letter (any more)
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    request = own_request(request, queue)
    check_order(request, queue)
    scan = await Scan.begin(
        connection, queue, unaccounted=request.selection.unaccounted, count_under_pause=request.count_under_pause
    )
    if scan.audit is None:
        raise no_audit(queue.name)
    target = await read_target(connection, request, scan)
    choice = choose_protocol(
        *(request, scan.snapshot, connection.api_level, scan.context.handler_names), target=target.other_snapshot
    )
    if request.undo is None:
        await require_sequences(scan, request.selection)
    result = Preview(
        choice.protocol,
        choice.guarantee,
        target.stream if target.is_other else None,
        uncertain=scan.uncertain,
        undeliverable=scan.undeliverable,
    )
    if request.discard or request.undo:
        await _preview_discard(result, scan, scan.audit, request, group_by)
        result.risks = scan.risks
        return result
    limit = CopyLimit.of(connection, target.snapshot.config)
    state = target.snapshot.state
    room = StreamRoom(target.snapshot.config, state["messages"], state["bytes"])
    async for letter in scan.letters(request.selection):
        await preview_letter(
            *(result, request, letter, target, group_by, limit),
            room=None if choice.protocol == Protocol.IN_PLACE else room,
            rest_in_place=choice.rest_in_place,
        )
    # Some are found only while the letters are read.
    result.risks = (*scan.risks, *target.risks)
    return result


async def _preview_discard(
    result: Preview, scan: Scan, audit: AuditLog, request: RedriveRequest, group_by: Sequence[GroupField]
) -> None:
    """Add to a preview which letters would be discarded, or brought back."""
    if request.undo is not None:
        await require_discarded(audit, request.undo, request.selection, ())
        async for letters in returning_letters(scan, audit, request.undo, request.selection, result.add_failure):
            for letter in letters:
                result.groups.add(letter, group_by)
                result.parked += 1
        return
    discards = Discards(scan, request, lambda: "", LetterRecords(audit, request))
    async for page in scan.pages(request.selection):
        for letter in page.letters:
            result.groups.add(letter, group_by)
        done, failed = await discards.records_of([letter for letter in page.letters if letter.copy_sequence is None])
        result.redriven += len(page.letters) - len(done) - len(failed)
        result.discarded += len(done)
        result.without_copy += sum(record.kept is None or record.kept.copy_in == "nowhere" for _, record in done)
        for sequence, why in failed.items():
            result.add_failure(sequence, why)


async def preview_letter(
    result: Preview,
    request: RedriveRequest,
    letter: DeadLetter,
    target: RedriveTarget,
    group_by: Sequence[GroupField],
    limit: CopyLimit,
    *,
    room: StreamRoom | None = None,
    rest_in_place: bool = False,
) -> None:
    """Add to a preview what a redrive would do with one letter.

    :param target: the queue that would get the new job
    :param limit: the largest size of a new job
    :param room: what that queue stores without dropping a job, where that is known; the new job is counted in it
    :param rest_in_place: whether letters whose copies are too large are requeued in place
    """
    result.groups.add(letter, group_by)
    if letter.copy_sequence is not None:
        # A redrive that was cut off has stored its new job already.
        result.redriven += 1
        return
    if request.must_park(letter):
        result.parked += 1
        return
    try:
        content = await new_content(letter, request.transform, request.body_patch)
        target.check_subject(content.subject, request.subject or letter.subject)
        job = redriven_job(letter, content, request.subject, limit)
        if room:
            take_room(room, job)
    except CopyTooLargeError as error:
        if not rest_in_place or letter.source != BodySource.QUEUE:
            result.add_failure(letter.sequence, str(error))
        else:
            result.redriven += 1
        return
    except RedriveError as error:
        result.add_failure(letter.sequence, failure_text(letter, error))
        return
    result.redriven += 1
    result.changed += content.changes is not None
    # Of a patch, people want to see what it changes.
    if len(result.sample) < _SAMPLE and (request.patch is None or content.changes):
        result.sample.append(
            {
                "sequence": letter.sequence,
                "job_id": letter.job_id,
                "subject": job.subject,
                "reason": letter.death.reason.value,
                "error_class": letter.death.error_class,
                "error_place": letter.death.error_place,
                "redrives": letter.redrives,
                "body": job.content.body[:_BODY_SHOWN].decode("utf-8", "replace"),
                "changes": job.content.changes,
                "difference": body_difference(letter.body, job.content.body),
            }
        )


def body_difference(before: bytes, after: bytes) -> str:
    """Return the first lines in which two bodies differ. JSON is shown with a line for each value.

    What isn't UTF-8 is escaped. Empty where nothing differs.
    """
    if before == after:
        return ""
    if max(len(before), len(after)) > _LARGEST_COMPARED:
        return f"{len(before)} bytes before, {len(after)} after: too long to show what differs"
    old, new = _lines(before), _lines(after)
    if old == new:
        # White space of JSON.
        old, new = (body.decode("utf-8", "backslashreplace").splitlines() for body in (before, after))
    if max(len(old), len(new)) > _MOST_LINES:
        return f"{len(old)} lines before, {len(new)} after: too many to show what differs"
    lines = list(unified_diff(old, new, "before", "after", lineterm=""))
    shown = [_short(line) for line in lines[:_SHOWN_LINES]]
    return "\n".join([*shown, f"… {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else shown)


def _lines(body: bytes) -> list[str]:
    text = body.decode("utf-8", "backslashreplace")
    try:
        return json_text(parse_json(text), indent="  ").split("\n")
    except (ValueError, OverflowError):
        return text.splitlines()


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}… ({len(line)} characters)"
