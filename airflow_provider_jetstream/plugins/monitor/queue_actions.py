"""What people do on the page: they count what an action would do; they steer redrives and consumers.

Every method returns JSON of the model that it names.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.audit.consumer_control import pause_consumer, resume_consumer
from airflow_provider_jetstream.jetstream.audit.redrives import (
    abort_redrive,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.client.sequence_ranges import ranges_text
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.account import account_for_jobs, last_account
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    NotFoundError,
    RedriveRequestError,
)
from airflow_provider_jetstream.jetstream.redrive.target import own_queue
from airflow_provider_jetstream.plugins.monitor import clock
from airflow_provider_jetstream.plugins.monitor.background import SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.dry_run import dry_run
from airflow_provider_jetstream.plugins.monitor.job_ends import read_outcomes
from airflow_provider_jetstream.plugins.monitor.letter_edit import edited, person, redrive_edited
from airflow_provider_jetstream.plugins.monitor.letter_service import LetterAnswer
from airflow_provider_jetstream.plugins.monitor.letter_view import dag_of
from airflow_provider_jetstream.plugins.monitor.models.queues import Account
from airflow_provider_jetstream.plugins.monitor.models.redrives import ConsumerPaused, PauseRequest

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive, RedriveOutcomes
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.plugins.monitor.answers import Answers
    from airflow_provider_jetstream.plugins.monitor.letter_service import LetterService
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.models.actions import Act, DryRun
    from airflow_provider_jetstream.plugins.monitor.models.redrives import EditRequest, SteerRequest
    from airflow_provider_jetstream.plugins.monitor.pollers import Pollers

Steer: TypeAlias = Literal["pause", "resume", "abort"]

# Proxies give up at 30 or 60 seconds; a repeated request joins the count, which goes on.
_COUNT_SECONDS = 25.0
_MOST_QUEUES = 64
_REDRIVES_SECONDS = 0.5
# The ends of jobs are read again after some seconds, as long as some of a redrive's haven't ended.
_OUTCOMES_SECONDS = 2.0
_MOST_FINAL = 1_000
# In a list, of redrives of at most so many letters, and of so many redrives.
_FEW_JOBS, _REDRIVES_READ = 1_000, 20


class QueueActions:
    """What people do with queues, for those who may."""

    def __init__(self, pollers: Pollers, answers: Answers, letters: LetterService) -> None:
        self._pollers = pollers
        self._answers = answers
        self._letters = letters
        self._outcomes: SingleFlightCache[RedriveOutcomes] = SingleFlightCache(_MOST_QUEUES, _OUTCOMES_SECONDS)
        self._final: dict[tuple[str, str, str, int], RedriveOutcomes] = {}
        self._redrives: SingleFlightCache[tuple[Redrive, ...]] = SingleFlightCache(_MOST_QUEUES, _REDRIVES_SECONDS)

    async def redrives(self, connection: str, queue: str) -> tuple[Redrive, ...]:
        """Return the redrives of a queue, whoever may see them; all viewers share one look at the audit."""

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
        *,
        hidden: bool = False,
    ) -> bytes:
        """Return the :class:`DryRun` of an action.

        :param hidden: whether it only counts, since some of the letters may be of DAGs that the user may not see

        :raises DeadlineError: counting takes more than 25 seconds; it goes on, and the same request joins it
        :raises RedriveRequestError: the action isn't possible for this queue and selection
        """
        key = ("dry-run", connection, queue, selection, action, patch, hidden)

        async def count() -> DryRun:
            poller = await self._pollers.of_queue(connection, queue)
            return await dry_run(poller, queue, selection, action, patch, hidden=hidden)

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
