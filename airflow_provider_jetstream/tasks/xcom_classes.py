"""The classes of this package that pass an XCom: Airflow makes objects of classes that it knows only.

Each process of Airflow that runs tasks imports the plugin, and with it this list. Without the plugin, an administrator
adds the classes to ``[core] allowed_deserialization_classes``.
"""

from __future__ import annotations

from typing import Final

_ROOT: Final = "airflow_provider_jetstream.jetstream"
# Reports come back as JSON, the others as equal objects.
REPORTS: Final = (
    *(
        "attempts.AttemptReport",
        "cancellation.cancel.CancelReport",
        "dead_letters.account.JobAccount",
        "dead_letters.diagnose.Diagnosis",
    ),
    *("dead_letters.find.Findings", "dead_letters.find.Summary", "dead_letters.letter.DeadLetter"),
    *("dead_letters.death.Death", "inspection.drained.DrainReport", "inspection.health.QueueHealth"),
    *("provisioning.plan.Plan", "publishing.report.PublishReport", "redrive.preview.Preview"),
    *(
        "redrive.report.RedriveReport",
        "retries.RetryReport",
        "roles.user_policy.Permission",
        "roles.user_policy.Policy",
    ),
    *("waiting.job_reports.JobReport", "waiting.report.WaitReport"),
)
VALUES: Final = (
    *("audit.redrives.DeathCount", "audit.redrives.Redrive", "audit.redrives.RedriveControl"),
    *("audit.redrives.RedriveOutcomes", "audit.redrives.Wave", "dead_letters.selection.Selection"),
    *("origin.Origin", "origin.TaskTry", "publishing.job.Job", "queue.declaration.Archive", "queue.declaration.Audit"),
    "queue.declaration.Schedules",
    "queue.declaration.Attempts",
    "queue.declaration.Retention",
    *("queue.declaration.Consumer", "queue.declaration.DeadLetterQueue", "queue.declaration.Events"),
    *("queue.work_queue.WorkQueue", "redrive.json_patch.JsonPatch", "redrive.repair.Repair"),
    *("redrive.request.RedriveRequest", "redrive.request.StopWhen", "waiting.cursor.Cursor"),
    *("waiting.handle.JobsHandle", "waiting.policy.WaitPolicy"),
)
CLASSES: Final = tuple(f"{_ROOT}.{name}" for name in (*REPORTS, *VALUES))


def allow_classes() -> None:
    """Let this process make objects of these classes from XComs."""
    try:
        from airflow.sdk import serde
    except ImportError:  # Airflow 3.1
        from airflow.serialization import serde  # type: ignore[attr-defined, no-redef]
    # Airflow's allow_class takes the class itself, which every process that loads plugins would have to import.
    serde._extra_allowed.update(CLASSES)  # noqa: SLF001
