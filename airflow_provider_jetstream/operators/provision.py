"""The operator that provisions a work queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from airflow.sdk import BaseOperator

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import DEFAULT_CONN_ID, check_flags, check_text
from airflow_provider_jetstream.tasks.context import NamedMissingValues, fail_on_terminal_errors
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan
    from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import ProvisionOptions, Queue, TaskArguments


class JetStreamProvisionOperator(NamedMissingValues, BaseOperator):
    """Create or update a work queue's streams and consumers; do nothing where they are as declared.

    Streams made by hand are adopted. A change that the server can't make is refused before anything is changed.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param dry_run: plan what would be done, and change nothing
    :param drain: whether a change of filters, such as from one consumer to its partitions, waits until the jobs that
        would get another consumer are done, and parks those that are dead. An undeclared consumer that is in the way
        is removed then. A try that was interrupted is continued by the next one
    :param park_dead: whether dead letters that a new consumer would run again, since theirs is gone, are parked first;
        otherwise the consumer isn't created
    :param nats_conn_id: the Airflow connection
    :return: one line per stream and consumer, saying what was done; after a dry run the number of changes and of
        steps that are blocked, and all steps with what they change and why they are blocked
    """

    operator_extra_links = (QueueLink(),)
    template_fields: Sequence[str] = ("work_queue", "nats_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"work_queue": "json"}
    ui_color = "#d9ecf5"

    if TYPE_CHECKING:

        @classmethod
        def partial(
            cls, *, task_id: str, work_queue: Queue = ..., **options: Unpack[ProvisionOptions]
        ) -> OperatorPartial:
            """Begin a mapped task."""
            ...

    def __init__(
        self,
        *,
        work_queue: Queue,
        dry_run: bool = False,
        drain: bool = False,
        park_dead: bool = False,
        nats_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Unpack[TaskArguments],
    ) -> None:
        super().__init__(**kwargs)
        declared_queue(work_queue, self)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(dry_run=dry_run, drain=drain, park_dead=park_dead)
        self.work_queue: Any = work_queue
        # Not named dry_run: every operator has a method of that name.
        self.only_plan = dry_run
        self.drain = drain
        self.park_dead = park_dead
        self.nats_conn_id = nats_conn_id

    def execute(self, context: Context) -> list[str] | dict[str, Any]:
        """Provision the queue, or plan it for a dry run.

        :raises AirflowFailException: the declaration can't be used, or the server can't make the change
        """
        with fail_on_terminal_errors():
            queue = load_queue(self.work_queue, self)
            self._log_warnings(queue, queue.warnings())
            hook = hook_for(self.nats_conn_id)
            if self.only_plan:
                return self._log_plan(hook.plan(queue, drain=self.drain, park_dead=self.park_dead))
            plan = hook.provision(queue, drain=self.drain, park_dead=self.park_dead)
        for line in (*plan.steps, *plan.parked):
            self.log.info("%s", line)
        try:
            self._log_warnings(queue, hook.blocking(runtime.running_warnings, queue))
        except JetStreamProviderError as error:
            self.log.warning("Work queue %s is provisioned, but it couldn't be looked at: %s", queue.name, error)
        return [f"{step.action} {step.kind} {step.name}" for step in plan.steps]

    def _log_plan(self, plan: Plan) -> dict[str, Any]:
        for step in plan.steps:
            log = self.log.warning if step.blocked else self.log.info
            log("%s", step)
        blocked = sum(bool(step.blocked) for step in plan.steps)
        self.log.info(
            "Nothing was changed. %d steps would change something, %d are blocked", len(plan.changes), blocked
        )
        steps = [
            {
                "action": step.action,
                "kind": step.kind,
                "name": step.name,
                "differences": [str(difference) for difference in step.differences],
                "drain": str(step.drain) if step.drain else None,
                "parking": str(step.parking) if step.parking else None,
                "notes": list(step.notes),
                "blocked": list(step.blocked),
            }
            for step in plan.steps
        ]
        return {"changes": len(plan.changes), "blocked": blocked, "steps": steps}

    def _log_warnings(self, queue: WorkQueue, warnings: Sequence[QueueWarning]) -> None:
        for warning in warnings:
            self.log.warning("Work queue %s: %s [%s, see %s]", queue.name, warning, warning.name, warning.rule)
