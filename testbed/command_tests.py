"""Which test runs each command of the pages' console blocks.

A command is found by how it begins, the longest beginning first. A test of ``tests/server/test_howto_*.py`` fails if it
leaves out one of its commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from testbed.console import commands

if TYPE_CHECKING:
    from testbed.console import Command

# Installations, and targets of the Makefile.
_NOT_RUN: Final = ""
_TUTORIAL: Final = "tests/ui/test_ui_tutorial.py::test_the_tutorial"
_README: Final = (
    "tests/server/test_readme.py::test_the_commands_in_their_order_create_the_queue_and_do_the_jobs_of_the_dag"
)
_RUNBOOK: Final = "tests/ui/test_ui_runbook.py::test_the_night_of_the_runbook"
_DEV: Final = "tests/server/test_dev_command.py"
_READERS: Final = "tests/server/test_howto_commands.py"
_REQUESTS: Final = "tests/server/test_howto_commands.py"
_SETTINGS: Final = "tests/server/test_howto_commands.py"
_MOVER: Final = "tests/server/test_mover.py::test_the_command_moves_jobs_and_ends_cleanly"
_SPARK: Final = "tests/environment/test_spark_submissions.py"

# By page, then by how a command begins.
TESTS: Final[dict[str, dict[str, str]]] = {
    "CONTRIBUTING.md": {"make": _NOT_RUN, "pip install": _NOT_RUN},
    "README.md": {
        "pip install": _NOT_RUN,
        "jetstream-queue dev": (
            f"{_DEV}::test_the_command_starts_a_page_with_busy_queues_and_leaves_nothing_after_ctrl_c"
        ),
    },
    "docs/first-steps.md": {"make": _NOT_RUN, "jetstream-queue queue apply": _README, "NATS_URL=": _README},
    "docs/redrive.md": {
        "": "tests/server/test_retention.py::test_the_commands_of_the_page_apply_the_policy_of_its_declaration"
    },
    "docs/attempts.md": {"": f"{_READERS}::test_a_job_that_waits_is_retried_and_another_given_up"},
    "docs/backup.md": {"": f"{_REQUESTS}::test_a_queue_is_backed_up_and_restored_stream_by_stream"},
    "docs/command-line.md": {
        "pip install": _NOT_RUN,
        "jetstream-queue queues": f"{_READERS}::test_the_first_look_finds_queues_and_says_what_to_do",
        "jetstream-queue letters diagnose": f"{_READERS}::test_the_first_look_finds_queues_and_says_what_to_do",
        "jetstream-queue letters list": f"{_READERS}::test_letters_older_than_an_hour_are_listed_one_a_line",
        "jetstream-queue redrive": f"{_READERS}::test_letters_are_counted_redriven_a_few_first_in_waves_and_patched",
        "jetstream-queue schedules run": _MOVER,
        "eval": f"{_READERS}::test_the_shell_completes_what_is_typed",
        "jetstream-queue exporter": f"{_READERS}::test_the_exporter_serves_metrics_until_it_is_interrupted",
        "jetstream-queue dev": (
            f"{_DEV}::test_the_command_starts_a_page_with_busy_queues_and_leaves_nothing_after_ctrl_c"
        ),
    },
    "docs/connection.md": {"": f"{_SETTINGS}::test_the_hook_reads_the_connection_with_several_servers"},
    "docs/dead-letters.md": {
        "jetstream-queue account": f"{_READERS}::test_an_account_names_the_jobs_that_are_gone_without_evidence",
        "nats request handled": f"{_REQUESTS}::test_a_report_accounts_for_a_job_that_is_gone_and_ends_a_letter",
    },
    "docs/dead-letter-record.md": {"": f"{_REQUESTS}::test_a_record_by_hand_makes_the_letter_what_it_says"},
    "docs/examples.md": {"": f"{_READERS}::test_an_example_runs_without_docker"},
    "docs/kubernetes.md": {"": f"{_SETTINGS}::test_kubectl_makes_the_objects_that_the_pod_mounts"},
    "docs/managed-airflow.md": {"": f"{_SETTINGS}::test_the_hook_reads_a_secret_that_is_no_file"},
    "docs/operations.md": {"": f"{_READERS}::test_a_queue_is_prepared_before_the_first_job"},
    "docs/permissions.md": {"": f"{_SETTINGS}::test_a_server_takes_the_printed_policy_and_keeps_it"},
    "docs/queue.md": {"jetstream-queue schedules run": _MOVER},
    "docs/runbook.md": {"jetstream-queue": _RUNBOOK},
    "docs/spark-airflow.md": {
        "pip install": "tests/environment/test_spark_provider.py::test_operators_of_both_work_in_one_dag",
        "": f"{_SPARK}::test_the_block_about_jobs_of_your_own_runs_where_executors_lack_the_package",
    },
    "docs/spark.md": {"": f"{_SPARK}::test_the_block_about_a_cluster_runs_where_executors_lack_the_package"},
    "docs/tutorial.md": {"pip install": _NOT_RUN, "": _TUTORIAL},
    "docs/worker-contract.md": {
        "nats request": f"{_REQUESTS}::test_a_cancellation_is_looked_up_by_the_digest_of_the_id",
        "nats-server": f"{_REQUESTS}::test_conform_prints_which_lines_a_worker_keeps",
        "jetstream-worker conform": f"{_REQUESTS}::test_conform_prints_which_lines_a_worker_keeps",
    },
    "docs/worker.md": {
        "pip install": _NOT_RUN,
        "NATS_URL=": f"{_READERS}::test_the_handler_of_the_page_does_gives_up_and_delays_jobs",
        "jetstream-worker run": f"{_READERS}::test_a_worker_with_a_fallback_does_the_jobs_of_both_queues",
    },
}


def beginning_of(command: Command) -> str | None:
    """Return the beginning by which a command is found, ``None`` if no line is about it."""
    beginnings = [each for each in TESTS.get(command.page, {}) if command.text.startswith(each)]
    return max(beginnings, key=len, default=None)


def commands_of(test: str) -> list[Command]:
    """Return the commands that a test runs, in the order of the pages."""
    return [
        command
        for command in commands()
        if (beginning := beginning_of(command)) is not None and TESTS[command.page][beginning] == test
    ]
