"""What people do on the page: count what an action would do, steer redrives and consumers, edit a letter."""

from __future__ import annotations

import asyncio
import difflib
import json
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.audit.consumer_control import pause_consumer, resume_consumer
from airflow_provider_jetstream.jetstream.audit.redrives import (
    abort_redrive,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.client.sequence_ranges import ranges_text
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.account import account_for_jobs, last_account
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    JobError,
    NotFoundError,
    RedriveError,
    RedriveRequestError,
)
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.redrive.preview import preview
from airflow_provider_jetstream.jetstream.redrive.protocol import own_queue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.repair import ORIGIN_HEADERS, UNCHANGED, Repair, apply_repair
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.retries import give_up_job, retry_job
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.letter_history import read_outcomes
from airflow_provider_jetstream.plugins.monitor.letter_service import LetterAnswer
from airflow_provider_jetstream.plugins.monitor.letter_view import dag_of, person_of
from airflow_provider_jetstream.plugins.monitor.models.actions import (
    ConsumerPaused,
    ControlView,
    DeathCountView,
    DryRun,
    EditResult,
    JobAsked,
    OutcomesView,
    PauseRequest,
    RedriveList,
    RedriveView,
    SampleLetter,
    WaveView,
)
from airflow_provider_jetstream.plugins.monitor.models.queues import Account
from airflow_provider_jetstream.tasks.redrives import request_for_action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes, Wave
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.jetstream.redrive.protocol import RedriveTarget
    from airflow_provider_jetstream.plugins.monitor.background import Answers
    from airflow_provider_jetstream.plugins.monitor.letter_service import LetterService
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.models.actions import Act, EditRequest, SteerRequest
    from airflow_provider_jetstream.plugins.monitor.server_poller import Pollers, ServerPoller


def dags_of(redrive: Redrive) -> tuple[str | None, ...]:
    """Return the DAGs that a redrive names: the one that ran it, and the one whose letters it selects.

    ``None`` stands for one that isn't known: a program or a person ran it, or the record names what can't be a DAG.
    """
    named = (redrive.who.get("dag_id"), redrive.selection.get("dag_id"))
    known = tuple(dag_id for dag_id in named if isinstance(dag_id, str))
    odd = any(dag_id is not None and not isinstance(dag_id, str) for dag_id in named)
    return (*known, None) if odd or not known else known


def redrive_list(
    redrives: Iterable[Redrive],
    sees_all: Callable[[Iterable[str | None]], bool],
    hiding: Hiding,
    *,
    dag_id: str | None = None,
    run_id: str | None = None,
) -> RedriveList:
    """Return the redrives of a queue that a user may see.

    :param sees_all: whether the user may see what names some DAGs; it may block
    :param dag_id: only redrives that tasks of this DAG ran
    :param run_id: only redrives of this DAG run
    """
    wanted = [
        redrive
        for redrive in redrives
        if dag_id in (None, redrive.who.get("dag_id")) and run_id in (None, redrive.who.get("run_id"))
    ]
    shown = [redrive for redrive in wanted if sees_all(dags_of(redrive))]
    return RedriveList(
        redrives=[redrive_view(redrive, hiding) for redrive in shown], not_shown=len(wanted) - len(shown)
    )


def redrive_view(redrive: Redrive, hiding: Hiding) -> RedriveView:
    """Return a redrive for the page.

    Where the selection names no DAG, letters and texts may be of DAGs that the user may not see: such texts are left
    out.
    """
    of_unknown = hiding.of_unknown and redrive.selection.get("dag_id") is None
    hidden = hiding.all or of_unknown
    failures = redrive.report.get("failures")
    return RedriveView(
        id=redrive.id,
        queue=redrive.stream,
        state=redrive.state.value,
        reason="" if of_unknown else readable_text(redrive.reason),
        user=person_of(redrive.who),
        who=redrive.who,
        why=None if of_unknown else redrive.why,
        selection={} if of_unknown else redrive.selection,
        hidden=of_unknown,
        # A patch may hold values of bodies.
        plan={name: value for name, value in redrive.plan.items() if name != "patch" or not hidden},
        letters=redrive.letters,
        began_at=redrive.began_at,
        at=redrive.at,
        redriven=redrive.redriven,
        parked=redrive.parked,
        discarded=redrive.discarded,
        failed=redrive.failed,
        gone=redrive.gone,
        rate=redrive.rate,
        outcomes=_outcomes(redrive.outcomes),
        failures={str(sequence): str(why) for sequence, why in failures.items()}
        if isinstance(failures, dict) and not hidden
        else {},
        waves=[_wave(wave, hidden=hidden, of_unknown=of_unknown) for wave in redrive.waves],
        controls=[
            ControlView(
                action=control.action,
                who=control.who,
                why=None if of_unknown else control.why,
                at=control.at,
                obeyed=control.sequence <= redrive.controls_to,
            )
            for control in redrive.controls
        ],
        summary=summary_of(redrive),
    )


def summary_of(redrive: Redrive) -> str:
    """Return what a redrive did and what became of it, a sentence; what isn't known is said to be unknown."""
    outcomes = redrive.outcomes
    brought_again = sum(wave.brought_again for wave in redrive.waves)
    parked_again = sum(wave.parked_again for wave in redrive.waves)
    done = [
        _counted(redrive.redriven, "letter") + " redriven",
        *([f"{brought_again} of them once more after they had died again"] if brought_again else []),
        *([f"{redrive.parked} parked"] if redrive.parked else []),
        *([f"{redrive.discarded} discarded"] if redrive.discarded else []),
        *([f"{redrive.failed} failed"] if redrive.failed else []),
        *([f"{redrive.gone} were no dead letters any more"] if redrive.gone else []),
    ]
    known = [
        *([f"{outcomes.completed} completed after redrive"] if outcomes.completed else []),
        *([f"{outcomes.died_again} died again"] if outcomes.died_again else []),
        *([f"{parked_again} died again and were parked"] if parked_again else []),
        *([f"{outcomes.still_running} still running"] if outcomes.still_running else []),
    ]
    seen = outcomes.completed + outcomes.died_again + outcomes.still_running + brought_again + parked_again
    rest = redrive.redriven - seen
    if rest > 0:
        known.append(f"{rest} of unknown outcome")
    return f"{', '.join(done)}{': ' if known else ''}{', '.join(known)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _outcomes(outcomes: RedriveOutcomes) -> OutcomesView:
    return OutcomesView(
        completed=outcomes.completed,
        died_again=outcomes.died_again,
        still_running=outcomes.still_running,
        unknown=outcomes.unknown,
    )


def _wave(wave: Wave, *, hidden: bool, of_unknown: bool) -> WaveView:
    return WaveView(
        number=wave.number,
        size=wave.size,
        state=wave.state,
        began_at=wave.began_at,
        redriven=wave.redriven,
        parked=wave.parked,
        outcomes=_outcomes(wave.outcomes),
        died_of=[
            DeathCountView(
                fingerprint=count.fingerprint,
                error="" if hidden else readable_text(count.error),
                count=count.count,
                as_before=count.as_before,
            )
            for count in wave.died_of
        ],
        parked_again=wave.parked_again,
        brought_again=wave.brought_again,
        passed_by=wave.passed_by,
        reason="" if of_unknown else wave.reason,
    )


async def dry_run(
    poller: ServerPoller,
    queue: str,
    selection: Selection,
    action: Act,
    patch: JsonPatch | None = None,
    undo: str | None = None,
    *,
    hidden: bool = False,
) -> DryRun:
    """Count what an action would do with the letters that are selected now.

    :param undo: the id of the redrive whose discarded letters come back
    :param hidden: whether nothing about single letters is returned
    """
    request = request_for_action(action, selection, patch=patch, undo=undo)
    async with poller.connection() as connection:
        declared = await discover_queue(connection, queue)
        counts = (await preview(connection, declared, request)).as_json()
    return DryRun(
        protocol=counts["protocol"],
        guarantee=counts["guarantee"],
        redriven=counts["redriven"],
        parked=counts["parked"],
        discarded=counts["discarded"],
        failed=counts["failed"],
        failures={} if hidden else {str(sequence): reason for sequence, reason in counts["failures"].items()},
        causes={} if hidden else counts["causes"],
        changed=counts["changed"],
        samples=[] if hidden else [_sample(letter, patched=patch is not None) for letter in counts["sample"]],
        uncertain=counts["uncertain"],
        undeliverable=counts["undeliverable"],
        risks=counts["risks"],
        counted_at=datetime.now(UTC),
        awaits_ends=declared.events is not None,
        conf={
            "nats_conn_id": poller.conn_id,
            "queue": queue,
            "select": selection.model_dump(mode="json", exclude_defaults=True),
            "action": action,
            **({"patch": patch.text} if patch else {}),
            **({"undo": undo} if undo else {}),
        },
    )


def _sample(letter: dict[str, Any], *, patched: bool) -> SampleLetter:
    shown = {name: letter[name] for name in SampleLetter.model_fields}
    return SampleLetter(**shown | ({} if patched else {"difference": ""}))


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


Steer: TypeAlias = Literal["pause", "resume", "abort"]
Ask: TypeAlias = Literal["retry", "give-up"]

# Proxies give up at 30 or 60 seconds; a repeated request joins the count, which goes on.
_COUNT_SECONDS = 25.0
_MOST_QUEUES = 64
_REDRIVES_SECONDS = 0.5
# The ends of jobs are read again after some seconds, as long as some of a redrive's haven't ended.
_OUTCOMES_SECONDS = 2.0
_MOST_FINAL = 1_000
# In a list: the most letters of a redrive whose outcomes are read, and the most such redrives.
_FEW_JOBS, _REDRIVES_READ = 1_000, 20


class QueueActions:
    """Actions on queues, for people who may act."""

    def __init__(self, pollers: Pollers, answers: Answers, letters: LetterService) -> None:
        self._pollers = pollers
        self._answers = answers
        self._letters = letters
        self._outcomes: SingleFlightCache[RedriveOutcomes] = SingleFlightCache(_MOST_QUEUES, _OUTCOMES_SECONDS)
        self._final: dict[tuple[str, str, str, int], RedriveOutcomes] = {}
        self._redrives: SingleFlightCache[tuple[Redrive, ...]] = SingleFlightCache(_MOST_QUEUES, _REDRIVES_SECONDS)

    async def redrives(self, connection: str, queue: str) -> tuple[Redrive, ...]:
        """Return the redrives of a queue, whoever may see them; all viewers share one reading of the audit."""

        async def read() -> tuple[Redrive, ...]:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            if declared.audit is None:
                return ()
            async with poller.connection() as opened:
                found = await list_redrives(opened, declared)
                few = [redrive for redrive in found if redrive.redriven <= _FEW_JOBS][:_REDRIVES_READ]
                read = {redrive.id: await self._with_outcomes(opened, declared, redrive) for redrive in few}
                return tuple(read.get(redrive.id, redrive) for redrive in found)

        return await self._answers.run(self._redrives.get((connection, queue), read))

    async def redrive(self, connection: str, queue: str, redrive: str) -> Redrive:
        """Return a redrive, whoever may see it.

        :raises NotFoundError: there is none of this id
        """

        async def read() -> Redrive:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            async with poller.connection() as opened:
                return await self._with_outcomes(opened, declared, await read_redrive(opened, declared, redrive))

        return await self._answers.run(read())

    async def _with_outcomes(self, connection: Connection, queue: WorkQueue, redrive: Redrive) -> Redrive:
        """Return a redrive with what became of its letters by now; final outcomes are read once."""
        key = (queue.name, redrive.created, redrive.id, redrive.revision)
        if (outcomes := self._final.get(key)) is None:
            try:
                outcomes = await self._outcomes.get(key, lambda: read_outcomes(connection, queue, redrive))
            except JetStreamProviderError:
                # Its record is shown all the same; the others count as unknown.
                return redrive
            if redrive.state.is_over and not outcomes.still_running:
                self._final[key] = outcomes
                self._final = dict(islice(self._final.items(), max(0, len(self._final) - _MOST_FINAL), None))
        return redrive.model_copy(update={"outcomes": outcomes})

    async def steer(
        self, connection: str, queue: str, redrive: str, action: Steer, request: SteerRequest, user: str
    ) -> Redrive:
        """Pause, resume or abort a redrive; return it in its new state.

        :param user: the person's name
        :raises RedriveRequestError: it is over
        :raises NotFoundError: there is none of this id
        """

        async def run() -> Redrive:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            async with poller.connection() as opened:
                if action == "pause":
                    return await pause_redrive(opened, declared, redrive, who=user, why=request.why)
                if action == "abort":
                    return await abort_redrive(opened, declared, redrive, who=user, why=request.why)
                return await resume_redrive(
                    *(opened, declared, redrive), who=user, why=request.why, park_returned=request.park_returned
                )

        return await self._answers.run(run())

    async def ask(self, connection: str, queue: str, sequence: int, action: Ask, why: str | None, user: str) -> bytes:
        """Retry a job that waits, or give it up; return its :class:`JobAsked`.

        :param user: the person's name
        :raises JobNotWaitingError: it isn't proved that it waits
        """

        async def run() -> bytes:
            poller = await self._pollers.of_queue(connection, queue)
            act = retry_job if action == "retry" else give_up_job
            async with poller.connection() as opened:
                # Anew: who asks may have declared attempts just now.
                report = await act(opened, await discover_queue(opened, queue), sequence, why, user)
            return JobAsked(sequence=sequence, asked=report.asked, attempt=report.attempt).model_dump_json().encode()

        return await self._answers.run(run())

    async def control_consumer(
        self, connection: str, queue: str, consumer: str, request: PauseRequest | SteerRequest, user: str
    ) -> bytes:
        """Pause a consumer, or resume it; return its :class:`ConsumerPaused`.

        :param user: the person's name
        :raises NotFoundError: there is no such consumer
        :raises ServerTooOldError: the server has no pauses
        """

        async def run() -> bytes:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            if consumer not in {known.name for known in declared.consumers}:
                names = ", ".join(known.name for known in declared.consumers) or "none"
                raise NotFoundError(f"expected a consumer of {queue} ({names}), found {consumer!r}: name one of these")
            who = person(user)
            async with poller.connection() as opened:
                if isinstance(request, PauseRequest):
                    found = await pause_consumer(opened, declared, consumer, request.seconds, who=who, why=request.why)
                else:
                    found = await resume_consumer(opened, declared, consumer, who=who, why=request.why)
            answer = ConsumerPaused(consumer=consumer, paused_until=found.paused_until, recorded=found.recorded)
            return answer.model_dump_json().encode()

        return await self._answers.run(run())

    async def edit(
        self, connection: str, queue: str, sequence: int, request: EditRequest, user: str, hiding: Hiding
    ) -> LetterAnswer:
        """Return the :class:`EditResult` of an edit, and redrive the letter with it unless that is a dry run.

        :param user: the person's name
        :raises RedriveRequestError: the letter isn't the one that was edited
        """

        async def run() -> LetterAnswer:
            letter = await self._letters.proved(connection, queue, sequence)
            if hiding.hides(letter):
                raise RedriveRequestError(
                    f"expected a letter whose body you may see, found job {sequence}, of a task that isn't known"
                )
            scan = self._pollers.require_scan(connection, await self._pollers.requested_scan(connection, queue))
            result = await asyncio.to_thread(edited, letter, request, own_queue(scan))
            if request.dry_run:
                return LetterAnswer(dag_of(letter), result.model_dump_json().encode())
            declared = await self._pollers.declaration(connection, queue)
            async with self._pollers.of(connection).connection() as opened:
                done = await redrive_edited(opened, declared, letter, request, person(user), result)
            return LetterAnswer(dag_of(letter), done.model_dump_json().encode())

        return await self._answers.run(run())

    async def account(self, connection: str, queue: str, *, anew: bool) -> bytes:
        """Return the :class:`Account` of a queue.

        :param anew: whether to make one; else the last one is returned
        :raises DeadlineError: making it takes more than 25 seconds; it goes on, and the same request joins it
        """

        async def make() -> Account:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            async with poller.connection() as opened:
                if anew:
                    return _account_view(await account_for_jobs(opened, declared))
                info = await stream_info(opened, queue)
                return _account_view(await last_account(opened, declared, info["created"]))

        if not anew:
            return await self._answers.now(("account", connection, queue), make)

        async def wait() -> bytes:
            try:
                async with asyncio.timeout(_COUNT_SECONDS):
                    return await self._answers.shared_page(("new account", connection, queue), make)
            except TimeoutError:
                raise DeadlineError("the account is still being made; try again in a few seconds") from None

        return await self._answers.run(wait())

    async def dry_run(
        self,
        connection: str,
        queue: str,
        selection: Selection,
        action: Act,
        patch: JsonPatch | None = None,
        undo: str | None = None,
        *,
        hidden: bool = False,
    ) -> bytes:
        """Return the :class:`DryRun` of an action.

        :param undo: the id of the redrive whose discarded letters come back
        :param hidden: whether it only counts, since some of the letters may be of DAGs that the user may not see

        :raises DeadlineError: counting takes more than 25 seconds; it goes on, and the same request joins it
        :raises RedriveRequestError: the action isn't possible for this queue and selection
        """
        key = ("dry-run", connection, queue, selection, action, patch, undo, hidden)

        async def count() -> DryRun:
            poller = await self._pollers.of_queue(connection, queue)
            return await dry_run(poller, queue, selection, action, patch, undo, hidden=hidden)

        async def wait() -> bytes:
            try:
                async with asyncio.timeout(_COUNT_SECONDS):
                    return await self._answers.shared_page(key, count)
            except TimeoutError:
                raise DeadlineError("the letters are still being counted; try again in a few seconds") from None

        return await self._answers.run(wait())


def _account_view(account: JobAccount | None) -> Account:
    if account is None:
        return Account()
    return Account(
        at=account.at,
        age_seconds=max(0.0, (clock.now() - account.at).total_seconds()),
        jobs=account.jobs,
        stored=account.stored,
        ended=account.ended,
        unaccounted=account.unaccounted_count,
        sequences=ranges_text(account.unaccounted_jobs),
        unknown=account.unknown_count,
        unknown_share=account.unknown_share,
        why_unknown=list(account.why_unknown),
    )
