"""What tasks, triggers and the hook act with: each name's module is imported when the name is first used.

A DAG file imports operators, sensors and triggers, which check their arguments by what they import themselves. What
they need when they run is used as a name of this module, so no parse of a DAG file pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes, RedriveState, read_redrive
    from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel, cancel_jobs, cancel_stored
    from airflow_provider_jetstream.jetstream.client.connect import connect, shared_connection
    from airflow_provider_jetstream.jetstream.client.publish_ack import store
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, connection_settings
    from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
    from airflow_provider_jetstream.jetstream.dead_letters.account import account_for_jobs
    from airflow_provider_jetstream.jetstream.dead_letters.diagnose import diagnose_dead_letters
    from airflow_provider_jetstream.jetstream.dead_letters.find import (
        count_entries,
        find_dead_letters,
        summarise_dead_letters,
    )
    from airflow_provider_jetstream.jetstream.dead_letters.group import group_fields
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.documents import DocumentName
    from airflow_provider_jetstream.jetstream.inspection.drained import check_drained
    from airflow_provider_jetstream.jetstream.inspection.running_lint import running_warnings
    from airflow_provider_jetstream.jetstream.inspection.waiting_messages import wait_for_messages
    from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry, checked_key
    from airflow_provider_jetstream.jetstream.provisioning.apply import plan, provision
    from airflow_provider_jetstream.jetstream.publication import Publication, publish_with_handle
    from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs, refuse_schedule
    from airflow_provider_jetstream.jetstream.publishing.rate_limiter import check_rate
    from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
    from airflow_provider_jetstream.jetstream.queue.declaration import partition_subject, placeholder_problem
    from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
    from airflow_provider_jetstream.jetstream.queue.work_queue import (
        WorkQueue,
        chosen_consumers,
        events_stream,
        require_dead_letters,
    )
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.jetstream.redrive.operation import finish_run
    from airflow_provider_jetstream.jetstream.redrive.preview import preview
    from airflow_provider_jetstream.jetstream.redrive.redrive import (
        advance_gates,
        advance_redrive,
        redrive_dead_letters,
    )
    from airflow_provider_jetstream.jetstream.redrive.report import problem_of
    from airflow_provider_jetstream.jetstream.redrive.request import BY_POLICY, LEASE_TIMEOUT, Protocol, RedriveRequest
    from airflow_provider_jetstream.jetstream.redrive.waves import ANY_END
    from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.job_reports import (
        JobIds,
        JobReportSource,
        collect_job_reports,
        count_job_reports,
        plain_job_reports,
        read_job_reports,
    )
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.jetstream.waiting.wait import (
        cancel_rest,
        stored_ends_are_read,
        wait,
        wait_by_handle,
        while_ends_are_near,
    )
    from airflow_provider_jetstream.spark.application.messages import (
        CODE,
        ERROR,
        LEVEL,
        LOG,
        RESULT,
        TERMINAL,
        require_pyspark,
    )
    from airflow_provider_jetstream.spark.connection_options import POLICY_PROPERTIES, VARIABLES, connection_options
    from airflow_provider_jetstream.tasks.airflow_metrics import send_dead_letter_metrics, send_redrive_metrics
    from airflow_provider_jetstream.triggers.triggerer import WHY_KILLED, has_ended, shortest_delay
    from airflow_provider_jetstream.worker.bounded_run import BoundedRun
    from airflow_provider_jetstream.worker.worker import Worker

__all__ = [
    "ANY_END",
    "BY_POLICY",
    "CODE",
    "ERROR",
    "LEASE_TIMEOUT",
    "LEVEL",
    "LOG",
    "POLICY_PROPERTIES",
    "RESULT",
    "TERMINAL",
    "VARIABLES",
    "WHY_KILLED",
    "BoundedRun",
    "ConnectionSettings",
    "DocumentName",
    "JobIds",
    "JobReportSource",
    "JobsHandle",
    "JsonPatch",
    "Origin",
    "PreparedJobs",
    "Protocol",
    "Publication",
    "RedriveOutcomes",
    "RedriveRequest",
    "RedriveState",
    "Selection",
    "SizeLimit",
    "TaskTry",
    "WaitReport",
    "WorkQueue",
    "Worker",
    "account_for_jobs",
    "advance_gates",
    "advance_redrive",
    "cancel",
    "cancel_jobs",
    "cancel_rest",
    "cancel_stored",
    "check_drained",
    "check_rate",
    "checked_key",
    "chosen_consumers",
    "collect_job_reports",
    "connect",
    "connection_options",
    "connection_settings",
    "count_entries",
    "count_job_reports",
    "diagnose_dead_letters",
    "discover_queue",
    "events_stream",
    "find_dead_letters",
    "finish_run",
    "group_fields",
    "has_ended",
    "list_streams",
    "partition_subject",
    "placeholder_problem",
    "plain_job_reports",
    "plan",
    "preview",
    "problem_of",
    "provision",
    "publish_with_handle",
    "read_job_reports",
    "read_redrive",
    "redrive_dead_letters",
    "refuse_schedule",
    "require_dead_letters",
    "require_pyspark",
    "running_warnings",
    "send_dead_letter_metrics",
    "send_redrive_metrics",
    "sequence_ranges",
    "shared_connection",
    "shortest_delay",
    "store",
    "stored_ends_are_read",
    "summarise_dead_letters",
    "take_cursor",
    "wait",
    "wait_by_handle",
    "wait_for_messages",
    "while_ends_are_near",
]

__getattr__ = lazy_exports(__name__)
