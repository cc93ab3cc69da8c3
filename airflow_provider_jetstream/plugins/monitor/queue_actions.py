"""What people do on the page: they count what an action would do; they steer redrives and consumers.

Every method returns JSON of the model that it names.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.audit.consumer_control import pause_consumer, resume_consumer
from airflow_provider_jetstream.jetstream.audit.redrive_control import (
    abort_redrive,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.client.sequence_ranges import ranges_text
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.account import account_for_jobs, last_account
from airflow_provider_jetstream.jetstream.errors import DeadlineError, NotFoundError, RedriveRequestError
from airflow_provider_jetstream.plugins.monitor.dry_run import dry_run
from airflow_provider_jetstream.plugins.monitor.letter_edit import edited, person, redrive_edited
from airflow_provider_jetstream.plugins.monitor.letter_service import LetterAnswer
from airflow_provider_jetstream.plugins.monitor.letter_view import dag_of
from airflow_provider_jetstream.plugins.monitor.models.queues import Account
from airflow_provider_jetstream.plugins.monitor.models.redrives import ConsumerPaused, PauseRequest, RedriveList
from airflow_provider_jetstream.plugins.monitor.redrive_view import redrive_view

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.plugins.monitor.answers import Answers
    from airflow_provider_jetstream.plugins.monitor.letter_service import LetterService
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.models.actions import Act, DryRun
    from airflow_provider_jetstream.plugins.monitor.models.redrives import EditRequest, RedriveView, SteerRequest
    from airflow_provider_jetstream.plugins.monitor.pollers import Pollers

Steer: TypeAlias = Literal["pause", "resume", "abort"]

# Proxies give up at 30 or 60 seconds; a repeated request joins the count, which goes on.
_COUNT_SECONDS = 25.0


class QueueActions:
    """What people do with queues, for those who may."""

    def __init__(self, pollers: Pollers, answers: Answers, letters: LetterService) -> None:
        self._pollers = pollers
        self._answers = answers
        self._letters = letters

    async def redrives(
        self, connection: str, queue: str, hiding: Hiding, dag_id: str | None = None, run_id: str | None = None
    ) -> bytes:
        """Return the :class:`RedriveList` of a queue.

        :param dag_id: only those that tasks of this DAG ran
        :param run_id: only those of this DAG run
        """

        async def make() -> RedriveList:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            if declared.audit is None:
                return RedriveList(redrives=[])
            async with poller.connection() as opened:
                found = await list_redrives(opened, declared)
            return RedriveList(
                redrives=[
                    redrive_view(redrive, hidden=hiding.all or hiding.of_unknown)
                    for redrive in found
                    if dag_id in (None, redrive.who.get("dag_id")) and run_id in (None, redrive.who.get("run_id"))
                ]
            )

        return await self._answers.now(("redrives", connection, queue, hiding, dag_id, run_id), make)

    async def redrive(self, connection: str, queue: str, redrive: str, hiding: Hiding) -> bytes:
        """Return the :class:`RedriveView` of a redrive.

        :raises NotFoundError: there is none of this id
        """

        async def make() -> RedriveView:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            async with poller.connection() as opened:
                found = await read_redrive(opened, declared, redrive)
            return redrive_view(found, hidden=hiding.all or hiding.of_unknown)

        return await self._answers.now(("redrive", connection, queue, redrive, hiding), make)

    async def steer(
        self, connection: str, queue: str, redrive: str, action: Steer, request: SteerRequest, user: str, hiding: Hiding
    ) -> bytes:
        """Pause, resume or abort a redrive; return its :class:`RedriveView`.

        :param user: the person's name
        :raises RedriveRequestError: it is over
        :raises NotFoundError: there is none of this id
        """

        async def run() -> bytes:
            poller = await self._pollers.of_queue(connection, queue)
            declared = await self._pollers.declaration(connection, queue)
            async with poller.connection() as opened:
                if action == "pause":
                    found = await pause_redrive(opened, declared, redrive, who=user, why=request.why)
                elif action == "abort":
                    found = await abort_redrive(opened, declared, redrive, who=user, why=request.why)
                else:
                    found = await resume_redrive(
                        *(opened, declared, redrive),
                        who=user,
                        why=request.why,
                        park_returned=request.park_returned,
                    )
            return redrive_view(found, hidden=hiding.all or hiding.of_unknown).model_dump_json().encode()

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
            if request.dry_run:
                return LetterAnswer(dag_of(letter), edited(letter, request).model_dump_json().encode())
            declared = await self._pollers.declaration(connection, queue)
            async with self._pollers.of(connection).connection() as opened:
                done = await redrive_edited(opened, declared, letter, request, person(user))
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
        self, connection: str, queue: str, selection: Selection, action: Act, patch: JsonPatch | None = None
    ) -> bytes:
        """Return the :class:`DryRun` of an action.

        :raises DeadlineError: counting takes more than 25 seconds; it goes on, and the same request joins it
        :raises RedriveRequestError: the action isn't possible for this queue and selection
        """
        key = ("dry-run", connection, queue, selection, action, patch)

        async def count() -> DryRun:
            return await dry_run(self._pollers.of(connection), queue, selection, action, patch)

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
        age_seconds=max(0.0, (datetime.now(UTC) - account.at).total_seconds()),
        jobs=account.jobs,
        stored=account.stored,
        ended=account.ended,
        unaccounted=account.unaccounted_count,
        sequences=ranges_text(account.unaccounted_jobs),
        unknown=account.unknown_count,
        unknown_share=account.unknown_share,
        why_unknown=list(account.why_unknown),
    )
