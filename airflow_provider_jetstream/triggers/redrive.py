"""The triggers of a redrive in waves: for a wave's jobs, and for a person who lets it go on."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_mapping, check_text, check_times
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from airflow_provider_jetstream.triggers.polling import PollingTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.tasks.argument_types import PollingTriggerArguments

# How often a trigger reads what people ask of a redrive.
STEERING_SECONDS = 2.0


class RedriveWaveTrigger(JobCompletionTrigger):
    """Fires when the jobs of a wave have ended, or as soon as a person pauses or aborts the redrive.

    :param redrive: the redrive's id
    :param work_queue: the declaration of the queue whose letters it redrives, as a dict
    :param waiting: see :class:`~airflow_provider_jetstream.triggers.completion.JobCompletionTrigger`
    """

    def __init__(self, *, redrive: str, work_queue: Mapping[str, Any], **waiting: Any) -> None:
        super().__init__(**waiting)
        check_text(redrive=redrive)
        check_mapping(work_queue=work_queue)
        self.redrive = redrive
        self.work_queue = dict(work_queue)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        path, arguments = super().serialize()
        return path, {**arguments, "redrive": self.redrive, "work_queue": self.work_queue}

    async def _wait(self) -> None:
        tasks = [asyncio.create_task(super()._wait()), asyncio.create_task(self._wait_for_person())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_person(self) -> None:
        """Return once the redrive doesn't run any more; the jobs are awaited whether or not that can be read."""
        queue = runtime.WorkQueue.load(self.work_queue)
        while True:
            await asyncio.sleep(STEERING_SECONDS)
            try:
                async with hook_for(self.nats_conn_id).shared() as connection:
                    found = await runtime.read_redrive(connection, queue, self.redrive)
            except JetStreamProviderError as error:
                self.log.warning(
                    "What people ask of the redrive %s couldn't be read: %s %s", self.redrive, error.code, error
                )
                continue
            if found.state != runtime.RedriveState.RUNNING:
                self.log.info("The redrive %s is %s: %s", self.redrive, found.state.value, found.reason)
                return


class RedriveStateTrigger(PollingTrigger):
    """Fires when a redrive isn't in a state any more, or at a deadline.

    :param redrive: the redrive's id
    :param state: the state in which it waits for a person
    :param deadline: seconds since the epoch after which it fires in any case
    :param resumed: how many letters earlier tries of the task had handled, for the event
    :param polling: see :class:`PollingTrigger`
    """

    def __init__(
        self, *, redrive: str, state: str, deadline: float, resumed: int = 0, **polling: Unpack[PollingTriggerArguments]
    ) -> None:
        super().__init__(**polling)
        check_text(redrive=redrive, state=state)
        check_times(deadline=deadline)
        self.redrive = redrive
        self.state = state
        self.deadline = deadline
        self.resumed = resumed

    def criteria(self) -> dict[str, Any]:
        """Return the arguments that make up the condition."""
        return {"redrive": self.redrive, "state": self.state, "deadline": self.deadline, "resumed": self.resumed}

    async def poll(self, hook: JetStreamHook) -> Mapping[str, Any] | None:
        """Read the redrive once; return its state where it has changed, or time is up."""
        async with hook.shared() as connection:
            found = await runtime.read_redrive(connection, runtime.WorkQueue.load(self.work_queue), self.redrive)
        overdue = found.state == self.state
        if overdue and time.time() < self.deadline:
            return None
        return {
            "redrive": self.redrive,
            "state": found.state.value,
            "overdue": overdue,
            "reason": found.reason,
            "resumed": self.resumed,
        }
