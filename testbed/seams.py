"""The places inside the package at which tests change a limit or a time, or cut a step off.

Each is named once, here: a room that is rebuilt changes this module, and no test. With ``monkeypatch.setattr`` of one
of them, and :func:`current`, a test needs no other name of the inside.
"""

import pkgutil
from typing import Any, Final

_AUDIT: Final = "airflow_provider_jetstream.jetstream.audit"
AUDIT_LOG_WRITE: Final = f"{_AUDIT}.log.AuditLog.write"
LEASE_LEASE_SECONDS: Final = f"{_AUDIT}.lease.LEASE_SECONDS"
LEASE_RECORD_UNREADABLE_SECONDS: Final = f"{_AUDIT}.lease.UNREADABLE_SECONDS"
LEASE_SECONDS_OF: Final = f"{_AUDIT}.lease.lease_seconds"
LEASE_TIME_LIMITS: Final = f"{_AUDIT}.lease.TIME_LIMITS"
REDRIVE_RECORD_DATETIME: Final = f"{_AUDIT}.redrives.datetime"

_CLIENT: Final = "airflow_provider_jetstream.jetstream.client"
CONSUMER_PAUSE_PROLONG: Final = f"{_CLIENT}.stream_api.ConsumerPause.prolong"
STREAMS_RETRY_PAUSE: Final = f"{_CLIENT}.streams._RETRY_PAUSE"
NATS_SOCKET_RECEIVE: Final = f"{_CLIENT}.blocking.socket.NatsSocket.receive"
OUTAGE_REFUSED_FOR_GOOD: Final = f"{_CLIENT}.outage.REFUSED_FOR_GOOD"
STREAM_TAIL_PULL: Final = f"{_CLIENT}.stream_tail._PULL"
STREAM_API_MAX_DELETED: Final = f"{_CLIENT}.stream_api._MAX_DELETED"

_DEAD_LETTERS: Final = "airflow_provider_jetstream.jetstream.dead_letters"
ACCOUNT_PAUSES: Final = f"{_DEAD_LETTERS}.account._PAUSES"
ACCOUNT_STORED_SEQUENCES: Final = f"{_DEAD_LETTERS}.account.stored_sequences"
FACTS_LIST_STREAMS: Final = f"{_DEAD_LETTERS}.facts.list_streams"
RECONCILIATION_STORED_SEQUENCES: Final = f"{_DEAD_LETTERS}.reconciliation.stored_sequences"
SCAN_PAGE: Final = f"{_DEAD_LETTERS}.scan.PAGE"
SCAN_FRESH_SECONDS: Final = f"{_DEAD_LETTERS}.scan.FRESH_SECONDS"

DOCUMENTS_STORE: Final = "airflow_provider_jetstream.jetstream.documents.store"

_INSPECTION: Final = "airflow_provider_jetstream.jetstream.inspection"
DRAINED_SUMMARISE_DEAD_LETTERS: Final = f"{_INSPECTION}.drained.summarise_dead_letters"
DRAINED_PAUSE: Final = f"{_INSPECTION}.drained.PAUSE"

MOVER_KEEP: Final = "airflow_provider_jetstream.jetstream.mover._Mover._keep"
MOVER_STORE_EACH: Final = "airflow_provider_jetstream.jetstream.mover.store_each"
DUE_JOBS_MOVED_WITHIN: Final = "airflow_provider_jetstream.jetstream.publishing.schedules._MOVED_WITHIN"

_PROVISIONING: Final = "airflow_provider_jetstream.jetstream.provisioning"
APPLY_PLAN: Final = f"{_PROVISIONING}.apply.plan"
CONSUMER_STEPS_LIST_CONSUMERS: Final = f"{_PROVISIONING}.consumer_steps.list_consumers"
DRAIN_STALLED_SECONDS: Final = f"{_PROVISIONING}.drain._STALLED_SECONDS"
DRAIN_ADDED_SECONDS: Final = f"{_PROVISIONING}.drain._ADDED_SECONDS"

_PUBLISHING: Final = "airflow_provider_jetstream.jetstream.publishing"
MANIFEST: Final = f"{_PUBLISHING}.manifest"
MANIFEST_MAX_RUNS: Final = f"{_PUBLISHING}.manifest._MAX_RUNS"
MANIFEST_REMOVAL_INTERVAL: Final = f"{_PUBLISHING}.manifest._REMOVAL_INTERVAL"
MANIFEST_REMOVAL_MARGIN: Final = f"{_PUBLISHING}.manifest_record._MARGIN"
MANIFEST_REMOVE_UNNEEDED_MANIFESTS: Final = f"{_PUBLISHING}.manifest.remove_unneeded_manifests"

_QUEUE: Final = "airflow_provider_jetstream.jetstream.queue"
COUNT_LONGEST_PAUSE: Final = f"{_QUEUE}.paused_count.LONGEST_PAUSE"

_REDRIVE: Final = "airflow_provider_jetstream.jetstream.redrive"
LETTER_RECORDS_WRITE_REQUEUED: Final = f"{_REDRIVE}.letter_records.LetterRecords.write_requeued"
REDRIVE_STEP_PAGE: Final = f"{_REDRIVE}.redrive.PAGE"
REDRIVE_STEP_WAIT_UNTIL: Final = f"{_REDRIVE}.redrive.RedriveStep._wait_until"
REDRIVE_TARGET_CHECK_SUBJECT: Final = f"{_REDRIVE}.protocol.RedriveTarget.check_subject"
RUN_PROGRESS_PROGRESS_SECONDS: Final = f"{_REDRIVE}.operation.PROGRESS_SECONDS"
STEPS_LEAST_OVERLAPPED: Final = f"{_REDRIVE}.steps.LEAST_OVERLAPPED"
STEPS_STORE_JOBS: Final = f"{_REDRIVE}.steps.store_jobs"
STORED_LETTERS_REMOVE_ORIGINALS: Final = f"{_REDRIVE}.steps.remove_originals"
IN_PLACE: Final = f"{_REDRIVE}.in_place"
IN_PLACE_MARGIN: Final = f"{_REDRIVE}.in_place._MARGIN"
STEPS_STORE_PARKED: Final = f"{_REDRIVE}.steps.store_parked"
REQUEUEING_REMOVE_ENTRIES: Final = f"{_REDRIVE}.in_place.remove_entries"
SUPERVISION_DATETIME: Final = f"{_REDRIVE}.waves.datetime"

_WAITING: Final = "airflow_provider_jetstream.jetstream.waiting"
AWAITED_JOBS_MANY: Final = f"{_WAITING}.waiter.MANY"
FOLLOWER_RECENT: Final = f"{_WAITING}.follower._RECENT"
LETTER_WATCH_TIME: Final = f"{_DEAD_LETTERS}.letter_watch.time"
NEAR_ENDS_INTERVAL: Final = f"{_WAITING}.wait._INTERVAL"
NEAR_ENDS_LONGEST: Final = f"{_WAITING}.wait.LONGEST"
NEAR_ENDS_SHORTEST: Final = f"{_WAITING}.wait.SHORTEST"
WAIT_ATTEMPTS_SECONDS: Final = f"{_WAITING}.wait.ATTEMPTS_SECONDS"
COMPARISON_INTERVAL: Final = f"{_WAITING}.comparison.INTERVAL"
REPORT_MANY: Final = f"{_WAITING}.report.MANY"
LETTER_ARRIVALS_PAUSE_SECONDS: Final = f"{_DEAD_LETTERS}.letter_watch._PAUSE_SECONDS"
LETTER_ARRIVALS_DATETIME: Final = f"{_DEAD_LETTERS}.letter_watch.datetime"
END_FOLLOWER: Final = f"{_WAITING}.follower.EndFollower"

_HOOKS: Final = "airflow_provider_jetstream.hooks"
JETSTREAM_JET_STREAM_HOOK: Final = f"{_HOOKS}.jetstream.JetStreamHook"

_OPERATORS: Final = "airflow_provider_jetstream.operators"
JOB_WAITING_GET_CURRENT_CONTEXT: Final = f"{_OPERATORS}.job_waiting.get_current_context"
JOB_REPORTS_PROGRESS_SECONDS: Final = "airflow_provider_jetstream.tasks.job_reports.PROGRESS_SECONDS"
JOB_WAITING_HAS_ENDED: Final = "airflow_provider_jetstream.tasks.runtime.has_ended"

_MONITOR: Final = "airflow_provider_jetstream.plugins.monitor"
CLOCK_MOVED: Final = f"{_MONITOR}.clock.MOVED"
LETTER_SEARCH_SECONDS: Final = f"{_MONITOR}.letter_service._SEARCH_SECONDS"
POLLERS_FIRST_SCAN_SECONDS: Final = f"{_MONITOR}.server_poller._FIRST_SCAN_SECONDS"
POLLERS_SCAN_SECONDS: Final = f"{_MONITOR}.server_poller._SCAN_SECONDS"
RUNNING_SERVICE_SERVICE: Final = f"{_MONITOR}.running_service.service"
SCANNER_PAGES: Final = f"{_MONITOR}.scanner._throttled_pages"
SERVER_POLLER_FIRST_POLL_SECONDS: Final = f"{_MONITOR}.server_poller.FIRST_POLL_SECONDS"
SERVER_POLLER_IDLE_SECONDS: Final = f"{_MONITOR}.server_poller.IDLE_SECONDS"

_SENSORS: Final = "airflow_provider_jetstream.sensors"
DEAD_LETTER_FEW_ENTRIES: Final = f"{_SENSORS}.dead_letter._FEW_ENTRIES"

_BULK_REDRIVE: Final = "airflow_provider_jetstream.spark.bulk_redrive"
STEP_REDRIVE_TASK: Final = f"{_BULK_REDRIVE}.step.RedriveTask"

_SOURCE: Final = "airflow_provider_jetstream.spark.source"
PARTITION_READER_JOINED: Final = f"{_SOURCE}.partition_reader._joined"
PARTITION_READER_PAUSE: Final = f"{_SOURCE}.partition_reader._PAUSE"
PARTITION_READER_READ_SUBJECTS: Final = f"{_SOURCE}.partition_reader._read_subjects"
PUBLISHER_PAUSE: Final = f"{_SOURCE}.publisher._PAUSE"
QUERY_NAMES_OF_STREAMS: Final = f"{_SOURCE}.query.names_of_streams"
STREAM_READER_STREAMING: Final = f"{_SOURCE}.stream_reader.streaming"
STREAM_READER_LAST_WITHIN: Final = f"{_SOURCE}.stream_reader.last_within"
PARTITION_READER_NATS_SOCKET: Final = f"{_SOURCE}.partition_reader.NatsSocket"
BULK_PARSER_NEXT_FRAME: Final = f"{_SOURCE}.bulk_parser.next_frame"
BULK_PARSER_WORTHWHILE: Final = f"{_SOURCE}.bulk_parser._WORTHWHILE"

_TASKS: Final = "airflow_provider_jetstream.tasks"
SPARK_APPLICATION_RUN_FOR: Final = f"{_TASKS}.spark.SparkApplication.run_for"

_TRIGGERS: Final = "airflow_provider_jetstream.triggers"
COMPLETION_HAS_ENDED: Final = f"{_TRIGGERS}.completion.has_ended"
COMPLETION_MINIMUM_SECONDS: Final = f"{_TRIGGERS}.completion._MINIMUM_SECONDS"
COMPLETION_RETRY_SECONDS: Final = f"{_TRIGGERS}.completion._RETRY_SECONDS"
COMPLETION_WAIT: Final = "airflow_provider_jetstream.tasks.runtime.wait"
DEAD_LETTER_FIRST_PAUSE: Final = f"{_TRIGGERS}.dead_letter._FIRST_PAUSE"
EARLY_FIRE_GUARD_EXIT_NOTICE_SECONDS: Final = f"{_TRIGGERS}.triggerer.exit_notice_seconds"
EARLY_FIRE_GUARD_LONGEST_MARGIN: Final = f"{_TRIGGERS}.triggerer.LONGEST_MARGIN"
EARLY_FIRE_GUARD_SHORTEST_MARGIN: Final = f"{_TRIGGERS}.triggerer.SHORTEST_MARGIN"
REPORTED_LETTERS_REPORTED: Final = f"{_TRIGGERS}.dead_letter._reported"
REPORTED_LETTERS_STORED_AFTER: Final = f"{_TRIGGERS}.dead_letter.STORED_AFTER"
TAKEN_MESSAGES_HOLD: Final = f"{_TRIGGERS}.message_producer.HOLD"
MESSAGE_DOORBELL_WAIT_FOR_MESSAGES: Final = "airflow_provider_jetstream.tasks.runtime.wait_for_messages"
MESSAGE_DOORBELL_PROBLEMS: Final = f"{_TRIGGERS}.message._Problems"
MESSAGE_DOORBELL_JITTER: Final = f"{_TRIGGERS}.message._JITTER"
MESSAGE_DOORBELL_PAUSES: Final = f"{_TRIGGERS}.message._PAUSES"

_WORKER: Final = "airflow_provider_jetstream.worker"
ACKNOWLEDGEMENT_CONFIRM_TIMEOUT: Final = f"{_WORKER}.acknowledgement._CONFIRM_TIMEOUT"
FETCHING_ANSWER_TIMEOUT: Final = f"{_WORKER}.fetching._ANSWER_TIMEOUT"
BOUNDED_RUN_LONGEST_SILENCE: Final = f"{_WORKER}.bounded_run._LONGEST_SILENCE"
WORKER_ATTEMPTS_STORE: Final = f"{_WORKER}.attempts.store"
DEAD_LETTERING_COPY_TIMEOUT: Final = f"{_WORKER}.dead_lettering._COPY_TIMEOUT"
DEAD_LETTERING_DATETIME: Final = f"{_WORKER}.dead_lettering.datetime"
FETCHING_PULL_EXPIRES: Final = f"{_WORKER}.fetching.PULL_EXPIRES"


def current(place: str) -> Any:
    """Return what is at a place now, for a test that calls it in its own replacement."""
    return pkgutil.resolve_name(place)
