"""The core: JetStream work queues and their dead letters, without Airflow and without Spark.

The names below are public; everything else in this package may change between releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.attempts import AttemptReport, read_attempts
    from airflow_provider_jetstream.jetstream.audit.redrives import (
        DeathCount,
        Redrive,
        RedriveControl,
        RedriveOutcomes,
        RedriveState,
        Wave,
        abort_redrive,
        list_redrives,
        pause_redrive,
        read_redrive,
        resume_redrive,
    )
    from airflow_provider_jetstream.jetstream.cancellation.cancel import CancelReport, cancel
    from airflow_provider_jetstream.jetstream.client.connect import connect, shared_connection
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, connection_settings
    from airflow_provider_jetstream.jetstream.client.streams import get_message
    from airflow_provider_jetstream.jetstream.dead_letters.account import JobAccount, account_for_jobs
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
    from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis, diagnose_dead_letters
    from airflow_provider_jetstream.jetstream.dead_letters.find import Findings, find_dead_letters
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.dead_letters.status import Status
    from airflow_provider_jetstream.jetstream.errors import (
        ApiError,
        ArgumentError,
        AuthenticationError,
        ConnectionSettingsError,
        DeadLetterGoneError,
        DeadlineError,
        DriftError,
        EventLoopError,
        JetStreamDisabledError,
        JetStreamProviderError,
        JobError,
        JobNotSerializableError,
        JobNotWaitingError,
        JobReportsGoneError,
        JobsCancelledError,
        JobsDeadError,
        JobsIncompleteError,
        JobsStalledError,
        JobsUnaccountedError,
        JobTooLargeError,
        LeaseHeldError,
        LeaseLostError,
        NotFoundError,
        PermissionDeniedError,
        ProvisioningError,
        QueueDeclarationError,
        QueueFullError,
        QueueGoneError,
        RedriveError,
        RedriveRequestError,
        SelectionError,
        ServerTooOldError,
        SubscriptionRefusedError,
        TerminalError,
        TLSError,
        TransientError,
        UnreachableError,
        UnsuitableQueueError,
        WireError,
        WrongStreamError,
    )
    from airflow_provider_jetstream.jetstream.inspection.drained import DrainReport, check_drained
    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth, inspect_queue
    from airflow_provider_jetstream.jetstream.inspection.running_lint import running_warnings
    from airflow_provider_jetstream.jetstream.mover import move_due_jobs
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.provisioning.apply import apply, plan, provision
    from airflow_provider_jetstream.jetstream.provisioning.plan import Plan
    from airflow_provider_jetstream.jetstream.publication import Publication, publish, publish_with_handle
    from airflow_provider_jetstream.jetstream.publishing.job import Job
    from airflow_provider_jetstream.jetstream.publishing.report import (
        PublishError,
        PublishIncompleteError,
        PublishRefusedError,
        PublishReport,
    )
    from airflow_provider_jetstream.jetstream.queue.declaration import (
        Archive,
        Attempts,
        Audit,
        Consumer,
        DeadLetterQueue,
        Events,
        Retention,
        Schedules,
    )
    from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
    from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
    from airflow_provider_jetstream.jetstream.redrive.preview import Preview, preview
    from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
    from airflow_provider_jetstream.jetstream.redrive.repair import Repair
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest, StopWhen
    from airflow_provider_jetstream.jetstream.retries import RetryReport, give_up_job, retry_job
    from airflow_provider_jetstream.jetstream.roles.permissions import combined_policy, permissions
    from airflow_provider_jetstream.jetstream.roles.user_policy import Permission, Policy
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor, take_cursor
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.job_reports import JobReport, read_job_reports
    from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
    from airflow_provider_jetstream.jetstream.waiting.wait import wait, wait_by_handle

__all__ = [
    "ApiError",
    "Archive",
    "ArgumentError",
    "AttemptReport",
    "Attempts",
    "Audit",
    "AuthenticationError",
    "CancelReport",
    "Connection",
    "ConnectionSettings",
    "ConnectionSettingsError",
    "Consumer",
    "Cursor",
    "DeadLetter",
    "DeadLetterGoneError",
    "DeadLetterQueue",
    "DeadlineError",
    "Death",
    "DeathCount",
    "Diagnosis",
    "DrainReport",
    "DriftError",
    "EventLoopError",
    "Events",
    "Findings",
    "JetStreamDisabledError",
    "JetStreamProviderError",
    "Job",
    "JobAccount",
    "JobError",
    "JobNotSerializableError",
    "JobNotWaitingError",
    "JobReport",
    "JobReportsGoneError",
    "JobTooLargeError",
    "JobsCancelledError",
    "JobsDeadError",
    "JobsHandle",
    "JobsIncompleteError",
    "JobsStalledError",
    "JobsUnaccountedError",
    "JsonPatch",
    "LeaseHeldError",
    "LeaseLostError",
    "NotFoundError",
    "Origin",
    "Permission",
    "PermissionDeniedError",
    "Plan",
    "Policy",
    "Preview",
    "Protocol",
    "ProvisioningError",
    "Publication",
    "PublishError",
    "PublishIncompleteError",
    "PublishRefusedError",
    "PublishReport",
    "QueueDeclarationError",
    "QueueFullError",
    "QueueGoneError",
    "QueueHealth",
    "QueueWarning",
    "Reason",
    "Redrive",
    "RedriveControl",
    "RedriveError",
    "RedriveOutcomes",
    "RedriveReport",
    "RedriveRequest",
    "RedriveRequestError",
    "RedriveState",
    "Repair",
    "Retention",
    "RetryReport",
    "Schedules",
    "Selection",
    "SelectionError",
    "ServerTooOldError",
    "Status",
    "StopWhen",
    "SubscriptionRefusedError",
    "TLSError",
    "TerminalError",
    "TransientError",
    "UnreachableError",
    "UnsuitableQueueError",
    "WaitPolicy",
    "WaitReport",
    "Wave",
    "WireError",
    "WorkQueue",
    "WrongStreamError",
    "abort_redrive",
    "account_for_jobs",
    "apply",
    "cancel",
    "check_drained",
    "combined_policy",
    "connect",
    "connection_settings",
    "diagnose_dead_letters",
    "discover_queue",
    "find_dead_letters",
    "get_message",
    "give_up_job",
    "inspect_queue",
    "list_redrives",
    "move_due_jobs",
    "pause_redrive",
    "permissions",
    "plan",
    "preview",
    "provision",
    "publish",
    "publish_with_handle",
    "read_attempts",
    "read_job_reports",
    "read_redrive",
    "redrive_dead_letters",
    "resume_redrive",
    "retry_job",
    "running_warnings",
    "shared_connection",
    "take_cursor",
    "wait",
    "wait_by_handle",
]

__getattr__ = lazy_exports(__name__)
