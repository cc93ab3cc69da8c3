"""The operator that does the messages of a consumer, and ``@task.jetstream_consume``, whose function is the handler.

The decorator saves the name of a function that nothing else uses, its task id and the operator's import; the operators
of this package that take no function have no decorator.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, Unpack, overload

from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import get_unique_task_id, task_decorator_factory

from airflow_provider_jetstream.airflow_compat import AirflowFailException, conf
from airflow_provider_jetstream.assets.stream_asset import StreamUse, TaskAssets
from airflow_provider_jetstream.hooks.connected_hook import named_connection, require_no_event_loop
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import (
    DEFAULT_CONN_ID,
    check_flags,
    check_text,
    is_templated,
    parse_count,
    parse_span,
)
from airflow_provider_jetstream.tasks.context import (
    NamedMissingValues,
    deferral_limit,
    fail_on_terminal_errors,
    json_result,
    origin_of,
)
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue
from airflow_provider_jetstream.worker.handler import inspect_batch_handler, inspect_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from airflow.sdk import Context
    from airflow.sdk.bases.decorator import Task
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import (
        ConsumeOptions,
        Count,
        Duration,
        Queue,
        TaskArguments,
        Text,
    )
    from airflow_provider_jetstream.worker.bounded_run import BoundedRun
    from airflow_provider_jetstream.worker.worker import Worker

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Where the trigger's request fails: seconds until the next one.
_RETRY_SECONDS = 5.0
# Less isn't worth another deferral.
_SHORTEST_WAIT = 2.0


class JetStreamConsumeOperator(NamedMissingValues, TaskAssets, BaseOperator):
    """Pull a consumer's messages until it has no more, and do each as the worker does a job.

    A message is acknowledged after the handler has done it, and where the queue stores events, its completion is stored
    before that. A message whose handler fails is delivered again after the consumer's backoff;
    :class:`~airflow_provider_jetstream.worker.RetryLaterError` sets another delay, and
    :class:`~airflow_provider_jetstream.worker.GiveUpError` makes a dead letter of it at once, with the reason. The
    task itself succeeds however many messages failed: they stay in the queue, or are dead letters. What a task that was
    killed hadn't acknowledged is delivered again after the consumer's ack wait.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param consumer: the name of one of the queue's consumers
    :param handler: takes a :class:`~airflow_provider_jetstream.worker.Delivery`, or a pydantic model if its first
        parameter is annotated with one; with ``batch`` a list of deliveries. It may be async
    :param batch: call the handler with up to so many messages; it returns a list with one outcome for each, in their
        order: its result, or the error with which it fails; ``None`` for all of them where none has a result. What it
        raises is the outcome of every message
    :param max_messages: pull so many messages at most; all that wait where absent
    :param wait_timeout: how long to wait for the first message: a duration or seconds
    :param deferrable: wait for the first message in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: how many deliveries there were, how many of them had which outcome (``completed``, ``retried``, ``dead``,
        ``given_up`` and the worker's others), and the first 500 ids and ranges of sequences of each
    :raises WorkerSetupError: the handler takes something else
    """

    operator_extra_links = (QueueLink(),)
    template_fields: Sequence[str] = ("work_queue", "consumer", "batch", "max_messages", "wait_timeout", "nats_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json"}
    event_fields = ("consumer", "deliveries", "counts")
    # A handler may hold what can't be copied.
    shallow_copy_attrs: Sequence[str] = ("handler", "python_callable")
    ui_color = "#d9f5e0"

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls,
            *,
            task_id: str,
            work_queue: Queue = ...,
            consumer: Text = ...,
            handler: Callable[..., Any] = ...,
            **options: Unpack[ConsumeOptions],
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    def __init__(
        self,
        *,
        work_queue: Queue,
        consumer: Text,
        handler: Callable[..., Any],
        batch: Count | None = None,
        max_messages: Count | None = None,
        wait_timeout: Duration = 0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Unpack[TaskArguments],
    ) -> None:
        super().__init__(**kwargs)
        check_text(consumer=consumer, nats_conn_id=nats_conn_id)
        check_flags(deferrable=deferrable)
        queue = declared_queue(work_queue, self)
        self.work_queue: Any = work_queue
        self.consumer: Any = consumer
        if queue is not None and not is_templated(consumer):
            queue.consumer(str(consumer))
        self.handler = handler
        self.batch = batch
        self.max_messages = max_messages
        self.wait_timeout = wait_timeout
        self.deferrable = deferrable
        self.nats_conn_id = nats_conn_id
        self._is_limited = max_messages is not None
        self._takes_batches = batch is not None
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        (inspect_batch_handler if self._takes_batches else inspect_handler)(handler)
        for value, parse in ((batch, self._parsed_batch), (max_messages, self._limit), (wait_timeout, self._wait)):
            if not is_templated(value):
                parse()

    def execute(self, context: Context) -> dict[str, Any]:
        """Do the messages, after a wait for the first one.

        :raises AirflowFailException: the consumer doesn't exist, or may not be used
        """
        return self._run(context, time.time() + self._wait().total_seconds())

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Do the messages for which the trigger has waited.

        :raises AirflowFailException: waiting was impossible, or the consumer doesn't exist any more
        """
        if event is None or event["status"] == "error":
            raise AirflowFailException(event["message"] if event else "the trigger ended without an event")
        return self._run(context, event["found"]["deadline"])

    def stream_use(self, queue: WorkQueue, work: Mapping[str, Any]) -> StreamUse:
        """Return the stream that had the messages."""
        return StreamUse(read=[queue.name])

    def on_kill(self) -> None:
        """Start no more messages, and hand back those that aren't done within the worker's grace time."""
        if self._worker is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._worker.stop)

    def rendered_handler(self) -> Callable[..., Any]:
        """Return the handler of this run."""
        return self.handler

    def _run(self, context: Context, deadline: float) -> dict[str, Any]:
        hook = hook_for(self.nats_conn_id)
        with fail_on_terminal_errors():
            queue = load_queue(self.work_queue, self)
            queue.consumer(self.consumer)
            left = max(0.0, deadline - time.time())
            if self.deferrable and left >= _SHORTEST_WAIT:
                if hook.blocking(runtime.wait_for_messages, queue.name, self.consumer) is None:
                    self._defer(queue, deadline)
                left = 0.0
            done = self._consume(context, hook, queue, left)
            left = deadline - time.time()
            if self.deferrable and not done["deliveries"] and left >= _SHORTEST_WAIT:
                # Another worker was faster.
                self._defer(queue, deadline)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in done["counts"].items())
        self.log.info("%d deliveries of %s/%s: %s", done["deliveries"], queue.name, self.consumer, counts or "none")
        self.note_work({"consumer": self.consumer, **done})
        return json_result({"stream": queue.name, "consumer": self.consumer, **done})

    def _consume(self, context: Context, hook: JetStreamHook, queue: WorkQueue, wait: float) -> dict[str, Any]:
        require_no_event_loop()
        origin, bounds = origin_of(context), runtime.BoundedRun(self._limit(), wait)
        name, settings = f"{origin.dag_id}/{origin.run_id}/{origin.task_id}", hook.settings()
        worker = runtime.Worker(
            queue,
            self.consumer,
            self.rendered_handler(),
            settings,
            name=name,
            batch=self._parsed_batch(),
            deadline=None,
        )
        with named_connection(self.nats_conn_id, settings.servers):
            asyncio.run(self._run_worker(worker, bounds))
        return bounds.as_json()

    async def _run_worker(self, worker: Worker, bounds: BoundedRun) -> None:
        self._loop, self._worker = asyncio.get_running_loop(), worker
        try:
            await worker.run(bounds)
        finally:
            self._worker = self._loop = None

    def _defer(self, queue: WorkQueue, deadline: float) -> None:
        # Only a task that defers needs the trigger.
        from airflow_provider_jetstream.triggers.waiting_messages import WaitingMessagesTrigger

        left = timedelta(seconds=max(0.0, deadline - time.time()))
        limit = deferral_limit(self, left + timedelta(seconds=60), "wait_timeout").left.total_seconds()
        # Airflow's own time limit resumes a task too, and fails it if that comes too early.
        seconds = max(limit, runtime.shortest_delay())
        trigger = WaitingMessagesTrigger(
            consumer=self.consumer,
            deadline=deadline,
            nats_conn_id=self.nats_conn_id,
            work_queue=queue.model_dump(mode="json", exclude_unset=True),
            poll_interval=_RETRY_SECONDS,
            deferred_at=time.time(),
        )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=seconds))

    def _parsed_batch(self) -> int | None:
        return parse_count("batch", self.batch, 1) if self._takes_batches else None

    def _limit(self) -> int | None:
        return parse_count("max_messages", self.max_messages, 1) if self._is_limited else None

    def _wait(self) -> timedelta:
        return parse_span("wait_timeout", self.wait_timeout)


class _DecoratedConsumeOperator(JetStreamConsumeOperator):
    custom_operator_name = "@task.jetstream_consume"
    template_fields: Sequence[str] = (*JetStreamConsumeOperator.template_fields, "op_kwargs")
    template_fields_renderers: ClassVar[dict[str, str]] = {"op_kwargs": "py"}

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        task_id: str,
        op_args: Sequence[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if op_args:
            raise ArgumentError(
                f"expected arguments by name in the call of {task_id}, found {len(op_args)} by position: its first"
                " parameter takes each message"
            )
        self.op_kwargs = dict(op_kwargs or {})
        unique_id = get_unique_task_id(task_id, kwargs.get("dag"), kwargs.get("task_group"))
        handler = partial(python_callable, **self.op_kwargs) if self.op_kwargs else python_callable
        super().__init__(task_id=unique_id, handler=handler, **kwargs)
        self.python_callable = python_callable

    def rendered_handler(self) -> Callable[..., Any]:
        """Return the function with the arguments of its call in the DAG."""
        return partial(self.python_callable, **self.op_kwargs) if self.op_kwargs else self.python_callable


@overload
def jetstream_consume_task(
    python_callable: None = None,
    *,
    work_queue: Queue,
    consumer: Text,
    task_id: str = ...,
    **options: Unpack[ConsumeOptions],
) -> Callable[[Callable[Concatenate[Any, _Parameters], _Result]], Task[_Parameters, _Result]]: ...


@overload
def jetstream_consume_task(
    python_callable: Callable[Concatenate[Any, _Parameters], _Result],
    *,
    work_queue: Queue,
    consumer: Text,
    task_id: str = ...,
    **options: Unpack[ConsumeOptions],
) -> Task[_Parameters, _Result]: ...


def jetstream_consume_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a consuming task of a handler, as ``@task.jetstream_consume`` does, whose arguments no type checker knows.

    :param python_callable: the decorated function
    :param kwargs: the arguments of
        :class:`~airflow_provider_jetstream.operators.consume.JetStreamConsumeOperator`
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=False,
        decorated_operator_class=_DecoratedConsumeOperator,
        **kwargs,
    )
