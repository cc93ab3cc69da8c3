"""The DAG that redrives dead letters of any queue, as the configuration of its run says."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Unpack

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.tasks.arguments import parse_text
from airflow_provider_jetstream.tasks.context import fail_on_terminal_errors
from airflow_provider_jetstream.tasks.redrives import ACTIONS, REDRIVE, request_for_action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.tasks.argument_types import NamedRedriveArguments, Queue
    from airflow_provider_jetstream.tasks.job_reports import TaskResult

# A wave, or a person at a gate, may take hours, for which the task holds no worker slot.
_TASK_ARGUMENTS = {"retries": 2, "retry_delay": timedelta(seconds=30), "deferrable": True}


def reprocess_dag(
    dag_id: str = "jetstream_redrive",
    *,
    connections: Sequence[str] | None = None,
    tags: Sequence[str] = ("jetstream",),
    default_args: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Make the DAG that the monitor's page triggers, and that people can trigger by hand.

    Its run's configuration says what to do: ``nats_conn_id``, ``queue``, ``select``, ``action``, ``rate``, ``waves``,
    ``stop_when``, ``patch``, ``why`` and ``dry_run``. Everybody who may trigger it may redrive on all connections that
    it allows.

    :param dag_id: the value of ``[jetstream] monitor_redrive_dag`` where the page shall trigger it
    :param connections: ids of the Airflow connections that it may use; all where absent
    :param tags: the DAG's tags in Airflow's UI
    :param default_args: of its task, over two retries and ``deferrable``, by which it awaits waves in the triggerer
    :param dag_arguments: further arguments of the DAG
    """
    allowed: dict[str, Any] = {"enum": list(connections)} if connections else {}
    default = next(iter(connections or ()), JetStreamHook.default_conn_name)
    arguments: dict[str, Any] = {
        "schedule": None,
        "catchup": False,
        # It has no schedule, and in a paused DAG the runs that the page triggers would stay queued.
        "is_paused_upon_creation": False,
        "doc_md": __doc__,
    }
    with DAG(
        dag_id,
        tags=list(tags),
        default_args=_TASK_ARGUMENTS | (default_args or {}),
        params={
            "nats_conn_id": Param(default, type="string", description="The Airflow connection.", **allowed),
            "queue": Param(type="string", minLength=1, description="The work queue's stream."),
            "select": Param(
                {}, type="object", description="Which letters: every given field has to match; all where empty."
            ),
            "action": Param(
                REDRIVE,
                type="string",
                enum=list(ACTIONS),
                description="in_place takes all letters of the queue, without select and rate; undo brings back what"
                " the redrive of that id has discarded.",
            ),
            "undo": Param(None, type=["null", "string"], description="The id of a redrive, for the action undo."),
            "rate": Param(None, type=["null", "number"], exclusiveMinimum=0, description="Letters a second at most."),
            "waves": Param(
                None,
                type=["null", "array"],
                description='How many letters each wave brings back, such as [10, 100, "rest"]; one wave where empty.',
            ),
            "stop_when": Param(
                None,
                type=["null", "number", "object"],
                description="The share of a wave's jobs that may die again before it stops at a gate; 0.2 where empty.",
            ),
            "patch": Param(
                None,
                type=["null", "array", "string"],
                description="A JSON Patch (RFC 6902) of the letters' bodies; as text, its numbers stay as written.",
            ),
            "why": Param(None, type=["null", "string"], maxLength=500, description="A reason, for the audit."),
            "dry_run": Param(default=False, type="boolean", description="Only count, in the task's log."),
        },
        **arguments | dag_arguments,
    ) as dag:
        JetStreamRedriveByNameOperator(
            task_id="redrive",
            nats_conn_id="{{ params.nats_conn_id }}",
            queue_name="{{ params.queue }}",
            select="{{ params.select | tojson }}",
            action="{{ params.action }}",
            undone="{{ params.undo or '' }}",
            rate="{{ params.rate }}",
            waves="{{ params.waves | tojson }}",
            stop_when="{{ params.stop_when | tojson }}",
            patch="{{ params.patch if params.patch is string else (params.patch or []) | tojson }}",
            why="{{ params.why or '' }}",
            count_only="{{ params.dry_run }}",
        )
    return dag


class JetStreamRedriveByNameOperator(JetStreamRedriveOperator):
    """Redrive dead letters of a queue whose declaration is read from its server.

    :param action: ``redrive``, ``park``, ``discard``, ``undo``, or ``in_place`` for all letters of the queue
    :param undone: the id of the redrive whose discarded letters come back
    :param count_only: count what would be done, and change nothing; a template may give it as text
    """

    template_fields: Sequence[str] = (
        *("queue_name", "select", "rate", "patch", "why", "nats_conn_id", "action", "undone", "count_only"),
        *JetStreamRedriveOperator.wave_fields,
    )

    def __init__(
        self,
        *,
        queue_name: str,
        action: str = REDRIVE,
        undone: str = "",
        count_only: bool | str = False,
        **kwargs: Unpack[NamedRedriveArguments],
    ) -> None:
        # execute() replaces the name by the declaration.
        super().__init__(work_queue=queue_name, **kwargs)
        self.queue_name = queue_name
        self.action = action
        self.undone = undone
        self.count_only = count_only

    def known_queue(self, work_queue: Queue) -> WorkQueue | None:
        """Return ``None``: the queue's name isn't the path of its file."""
        return None

    def execute(self, context: Context) -> TaskResult:
        """Read the queue's declaration from the server, and redrive.

        :raises AirflowFailException: there is no such queue, or the request isn't possible
        :raises RedriveError: some letters stayed where they were
        """
        with fail_on_terminal_errors():
            request = request_for_action(self.action, Selection(), undo=parse_text(self.undone))
            self.protocol, self.max_redrives = request.protocol.value, request.max_redrives
            self.discard, self.undo = request.discard, request.undo
            self.only_preview = str(self.count_only).strip().lower() == "true"
            self.work_queue = JetStreamHook(self.nats_conn_id).discover_queue(self.queue_name)
        return super().execute(context)
