"""What the monitor's routes take and give, as JSON; ``docs/monitor-api.md`` says which route gives what."""

from airflow_provider_jetstream.plugins.monitor.models.actions import (
    Act,
    DryRun,
    DryRunRequest,
    Me,
    TaskJobs,
    TaskQueue,
)
from airflow_provider_jetstream.plugins.monitor.models.base import Problem
from airflow_provider_jetstream.plugins.monitor.models.letters import (
    Attempt,
    AuditLine,
    Group,
    Groups,
    LetterDetail,
    LetterLine,
    LetterPage,
    OriginOfLetter,
    Payload,
    ScanState,
)
from airflow_provider_jetstream.plugins.monitor.models.queues import (
    ConnectionState,
    ConsumerNumbers,
    LetterCounts,
    Limit,
    Point,
    QueueDetail,
    QueueNumbers,
    Snapshot,
)

__all__ = [
    "Act",
    "Attempt",
    "AuditLine",
    "ConnectionState",
    "ConsumerNumbers",
    "DryRun",
    "DryRunRequest",
    "Group",
    "Groups",
    "LetterCounts",
    "LetterDetail",
    "LetterLine",
    "LetterPage",
    "Limit",
    "Me",
    "OriginOfLetter",
    "Payload",
    "Point",
    "Problem",
    "QueueDetail",
    "QueueNumbers",
    "ScanState",
    "Snapshot",
    "TaskJobs",
    "TaskQueue",
]
