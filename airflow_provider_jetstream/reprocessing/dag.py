"""The DAG that brings dead letters back as its run is told to, of any queue."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.reprocessing.actions import ACTIONS, REDRIVE
from airflow_provider_jetstream.reprocessing.operator import JetStreamRedriveByNameOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

_RETRIES = {"retries": 2, "retry_delay": timedelta(seconds=30)}


def reprocess_dag(
    dag_id: str = "jetstream_redrive",
    *,
    connections: Sequence[str] | None = None,
    tags: Sequence[str] = ("jetstream",),
    default_args: dict[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Make the DAG that the monitor's page triggers, and that people can trigger by hand.

    Its run's configuration says what to do: ``nats_conn_id``, ``queue``, ``select``, ``action``, ``rate``, ``why`` and
    ``dry_run``. Whoever may trigger it may redrive on all the connections that it allows.

    :param dag_id: its id; ``[jetstream] monitor_redrive_dag`` names it to the page
    :param connections: ids of the Airflow connections that it may use; all where absent
    :param tags: its tags
    :param default_args: of its task; two retries where it doesn't say
    :param dag_arguments: further arguments of the DAG
    :return: the DAG
    """
    allowed: dict[str, Any] = {"enum": list(connections)} if connections else {}
    default = next(iter(connections or ()), JetStreamHook.default_conn_name)
    arguments: dict[str, Any] = {
        "schedule": None,
        "catchup": False,
        # It does nothing by itself, and a paused one would leave the runs that the page asks for in the queue.
        "is_paused_upon_creation": False,
        "doc_md": __doc__,
    }
    with DAG(
        dag_id,
        tags=list(tags),
        default_args=_RETRIES | (default_args or {}),
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
                description="in_place takes all letters of the queue, without select and rate.",
            ),
            "rate": Param(None, type=["null", "number"], exclusiveMinimum=0, description="Letters a second at most."),
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
            rate="{{ params.rate }}",
            why="{{ params.why or '' }}",
            count_only="{{ params.dry_run }}",
        )
    return dag
