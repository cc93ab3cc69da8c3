"""The base classes of sensors: what Airflow's users expect of each, and polling in the task itself or in a trigger."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from airflow.sdk import BaseSensorOperator

from airflow_provider_jetstream.airflow_compat import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    conf,
)
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import DEFAULT_CONN_ID, check_flags, check_text
from airflow_provider_jetstream.tasks.context import NamedMissingValues, deferral_limit, fail_on_terminal_errors
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow.sdk import Context, PokeReturnValue

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import PollingTriggerArguments, Queue, SensorArguments
    from airflow_provider_jetstream.triggers.polling import PollingTrigger


class LimitedSensor(NamedMissingValues, BaseSensorOperator):
    """A sensor that ends as Airflow's do, deferred or not: by ``timeout``, ``soft_fail`` and ``never_fail``."""

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after the trigger, or after a time limit.

        :raises DeadlineError: the ``execution_timeout`` is over, after which Airflow tries a task again
        """
        try:
            with self.skipping():
                return super().resume_execution(next_method, next_kwargs, context)
        except AirflowSensorTimeout:
            limit = self.execution_timeout
            if limit is None or limit.total_seconds() >= self.timeout:
                raise
            raise DeadlineError(
                f"{DeadlineError.code} expected the sensor to succeed within its execution_timeout of {limit}, found"
                " that it hasn't: raise execution_timeout, or see why the queue doesn't get there"
            ) from None

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip the task for any error with ``never_fail``, and with ``soft_fail`` only once its time is over.

        A sensor with ``soft_fail`` fails where its queue can't be polled at all: Airflow would skip it.
        """
        try:
            yield
        except AirflowSkipException as skip:
            if isinstance(skip.__cause__, AirflowFailException) and not self.never_fail:
                raise skip.__cause__ from None
            raise
        except AirflowRescheduleException:
            raise
        except Exception as error:
            if self.never_fail:
                raise AirflowSkipException("Skipping due to never_fail is set to True.") from error
            raise

    def goes_on_after(self, error: Exception) -> bool:
        """Log an error of the look before deferring, and return whether the sensor defers all the same."""
        if not self.silent_fail or isinstance(error, AirflowFailException | AirflowSkipException):
            return False
        self.log.error("Sensor poke failed: \n %s", traceback.format_exc())
        return True


class PollingSensor(LimitedSensor):
    """Polls a queue until a condition holds.

    :param work_queue: the queue
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    operator_extra_links = (QueueLink(),)

    def __init__(
        self,
        *,
        work_queue: Queue,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Unpack[SensorArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(deferrable=deferrable)
        self._known_queue = declared_queue(work_queue, self)
        self.work_queue: Any = work_queue
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id

    def loaded_queue(self) -> WorkQueue:
        """Load the queue.

        :raises QueueDeclarationError: there is no such file, or its declaration can't be used
        """
        return load_queue(self.work_queue, self)

    @abstractmethod
    def polling_trigger(self, polling: PollingTriggerArguments) -> PollingTrigger:
        """Return the trigger that goes on polling.

        :param polling: the arguments of :class:`~airflow_provider_jetstream.triggers.polling.PollingTrigger`
        """

    @abstractmethod
    def log_result(self, result: Mapping[str, Any]) -> None:
        """Log the result of a trigger."""

    def execute(self, context: Context) -> Any:
        """Wait until the condition holds.

        :return: the result of the last poll
        """
        with self.skipping():
            if not self.deferrable:
                return super().execute(context)
            try:
                first = self.first_poke(context)
            except Exception as error:
                if not self.goes_on_after(error):
                    raise
                first = None
            if first is None or not first.is_done:
                self._defer()
            return first.xcom_value

    def first_poke(self, context: Context) -> PokeReturnValue | None:
        """Poll once before deferring; ``None`` where the trigger had better do it."""
        first: Any = self.poke(context)
        return first  # type: ignore[no-any-return]

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger.

        :raises AirflowFailException: polling was impossible
        """
        if event is None or event["status"] == "error":
            raise AirflowFailException(event["message"] if event else "the trigger ended without an event")
        result: dict[str, Any] = event["found"]
        self.log_result(result)
        return result

    def _defer(self) -> NoReturn:
        with fail_on_terminal_errors():
            trigger = self.polling_trigger(
                {
                    "nats_conn_id": self.nats_conn_id,
                    "work_queue": self.loaded_queue().model_dump(mode="json", exclude_unset=True),
                    "poll_interval": self.poke_interval,
                    "deferred_at": time.time(),
                }
            )
        limit = deferral_limit(self, timedelta(seconds=self.timeout), "timeout").left.total_seconds()
        # Airflow's own time limit resumes a task too, and fails it if that comes too early.
        seconds = max(limit, runtime.shortest_delay())
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=seconds))
