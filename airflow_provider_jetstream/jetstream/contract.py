"""The wire contract: the subjects and headers that publishers, workers, waiters and redrives have in common."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION: Final = 3
MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"
ACK_METRIC = "$JS.EVENT.METRIC.CONSUMER.ACK"
# The history of all queues of a server.
SAMPLE_STREAM, SAMPLE_SUBJECT = "airflow_monitor", "airflow_monitor.samples"
# The token for the consumer in subjects of what redrivers store: no worker may publish there.
NO_CONSUMER = "_"

DEAD_LETTER_MARK = "dead_letter_queue"
# In the metadata of a consumer: the number of partitions.
PARTITIONS = "partitions"
# In the metadata of a consumer whose filters change: the filters that it gave up, until others may get them.
DRAINED = "drained"

MSG_ID = "Nats-Msg-Id"
# The server stores a message with it, without a body, where the last one of a subject has expired (ADR-43).
MARKER_REASON = "Nats-Marker-Reason"
# The message id of the job that a schedule makes; the server drops Nats-Msg-Id from the job that is due.
SCHEDULED_MSG_ID = "Scheduled-Msg-Id"
JOB_ID = "Job-Id"
JOB_ADVISORY = "Job-Advisory"
JOB_DEADLINE = "Job-Deadline"
JOB_EXPIRES = "Job-Expires"
# The release of the program that published a job, as its author names it; a diagnosis counts letters by it.
JOB_RELEASE = "Job-Release"
# The key of which at most one job waits, runs or is a dead letter at a time.
JOB_UNIQUE = "Job-Unique"
EXECUTE_AT = "X-Execute-At"
# The key of the publishing task, by which its stored record names DAG, run, task and map index.
AIRFLOW_TASK = "Airflow-Task"
# The four headers that named the publishing task before; jobs without a stored record have them still.
DAG_ID = "Airflow-Dag-Id"
RUN_ID = "Airflow-Run-Id"
TASK_ID = "Airflow-Task-Id"
MAP_INDEX = "Airflow-Map-Index"

# W3C Trace Context.
TRACE_PARENT = "traceparent"
TRACE_STATE = "tracestate"

REDRIVE_COUNT = "Redrive-Count"
REDRIVE_STREAM = "Redrive-Stream"
REDRIVE_SEQUENCE = "Redrive-Sequence"
REDRIVE_CONSUMER = "Redrive-Consumer"


# The id of an end: its time is in nanoseconds, or in seconds as workers of version 1 write them. An end that is stored
# under another id, since somebody had used that one, has more behind it. Anything else says nothing.
_END_ID = re.compile(r"done:.+:([0-9]+):([1-9][0-9]{17,18}|[1-9][0-9]{8,9}\.[0-9]{1,9})")


def dead_letter_subjects(queue: object) -> tuple[str, ...]:
    """Return the subjects that a dead letter queue captures.

    These are the server's two advisories, the copies that workers and scans store, and parked letters.
    """
    return (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*", copy_filter(queue), parked_filter(queue))


def copy_filter(queue: object) -> str:
    """Return the filter of the subjects on which copies of dead letters are stored."""
    return f"dead.{queue}.>"


def copy_subject(queue: str, consumer: str | None, sequence: int) -> str:
    """Return the subject of a dead letter's copy by a worker of a consumer; ``None`` for the copy of a scan.

    A scan has proved the death; a worker may have been stopped before it terminated the job.
    """
    return f"dead.{queue}.{consumer or NO_CONSUMER}.{sequence}"


def job_copy_filter(queue: str, sequence: int) -> str:
    """Return the filter of the subjects on which copies of a dead letter are stored, whichever consumer had it."""
    return f"dead.{queue}.*.{sequence}"


def redrive_consumer(queue: object) -> str:
    """Return the name of the consumer on the dead letter queue through which redrives acknowledge entries."""
    return f"redrive-{queue}"


def parked_filter(queue: object) -> str:
    """Return the filter of the subjects on which parked letters are stored."""
    return f"parked.{queue}.>"


def parked_subject(queue: str, consumer: str | None, sequence: int) -> str:
    """Return the subject of a parked letter; ``consumer`` delivered the job, if any did."""
    return f"parked.{queue}.{consumer or NO_CONSUMER}.{sequence}"


def archive_filter(queue: object) -> str:
    """Return the filter of the subjects on which the server stores a copy of each job.

    It is also the destination of ``republish``, where the server replaces ``>`` by the job's subject.
    """
    return f"archive.{queue}.>"


def archived_subject(queue: object, subject: str) -> str:
    """Return the subject on which the server stores a copy of a job."""
    return f"archive.{queue}.{subject}"


def companion_filter(queue: object) -> str:
    """Return a filter that overlaps with the subjects of every stream which belongs to a work queue."""
    return f"*.{queue}.>"


def entry_copies_filter(queue: object) -> str:
    """Return the filter of the subjects on which the server stores a copy of each entry of a dead letter queue.

    It is also the destination of ``republish``, where the server replaces ``>`` by the entry's subject.
    """
    return f"entries.{queue}.>"


def handled_filter(queue: object) -> str:
    """Return the filter of the subjects on which handlers of the dead letter queue report jobs as handled."""
    return f"handled.{queue}.*"


def handled_subject(queue: str, sequence: int) -> str:
    """Return the subject on which a handler of the dead letter queue reports a job as handled."""
    return f"handled.{queue}.{sequence}"


def entry_terminations(dead_letter_queue: object) -> str:
    """Return the filter of the server's advisories about entries that a consumer terminated."""
    return f"{TERMINATED}.{dead_letter_queue}.*"


def audit_filter(queue: object) -> str:
    """Return the filter of the subjects on which redrives are recorded."""
    return f"audit.{queue}.>"


def letter_audit_subject(queue: str, sequence: int) -> str:
    """Return the subject on which the audit records what was done to a dead letter."""
    return f"audit.{queue}.letters.{sequence}"


def lease_subject(queue: str) -> str:
    """Return the subject of a queue's lease: the right to change its dead letters, held by one operation at a time."""
    return f"audit.{queue}.lease"


def lease_renewal_subject(queue: str) -> str:
    """Return the subject on which the holder of a queue's lease renews it."""
    return f"audit.{queue}.lease-renewal"


def run_audit_subject(queue: str, run: str) -> str:
    """Return the subject on which a redrive records its progress; ``run`` is its key, one token."""
    return f"audit.{queue}.runs.{run}"


def account_subject(queue: str) -> str:
    """Return the subject on which accounts of a queue's jobs are stored."""
    return f"audit.{queue}.account"


def intent_filter(queue: object) -> str:
    """Return the filter of the subjects on which redrives record what they are about to store."""
    return f"audit.{queue}.intents.*"


def intent_subject(queue: str, operation: str) -> str:
    """Return the subject on which an operation records what it is about to store; ``operation`` is one token."""
    return f"audit.{queue}.intents.{operation}"


def ordered_key_subject(queue: str, order_key: str, key: str) -> str:
    """Return the subject on which the audit records which letter of a key was redriven last, where order is kept.

    :param order_key: where letters state their key
    """
    return f"audit.{queue}.ordered.{id_token(f'{order_key}={key}')}"


def handed_over_subject(queue: str, consumer: str) -> str:
    """Return the filter of a consumer that has no jobs left and is about to be removed.

    No stream captures it.
    """
    return f"handed_over.{queue}.{consumer}"


# The consumer of a stream of schedules by which movers take jobs that are due.
MOVER = "mover"


def schedule_filter(queue: object) -> str:
    """Return the filter of the schedules from which the server makes jobs; the queue's schedules stream has them."""
    return f"scheduled.{queue}.>"


def due_subject(queue: object, subject: str) -> str:
    """Return the subject on which the server stores a job that is due, beside its schedule.

    A mover stores it in the work queue, on the job's own subject.

    :param subject: the job's own subject, or a filter of such
    """
    return f"due.{queue}.{subject}"


def is_schedules_stream(config: Mapping[str, Any]) -> bool:
    """Return whether a stream holds schedules and jobs that are due, and nothing else: it is no work queue.

    :param config: its configuration on the server
    """
    subjects: list[str] = config.get("subjects") or []
    return bool(config.get("allow_msg_schedules")) and all(
        subject.startswith(("scheduled.", "due.")) for subject in subjects
    )


def schedules_stream(configs: Iterable[Mapping[str, Any]], queue: str) -> Mapping[str, Any] | None:
    """Return the configuration of the stream that stores the schedules of a queue, if there is one.

    :param configs: configurations of streams on the server
    """
    captured = schedule_filter(queue)
    # A queue of before may have its schedules in itself, where nobody moves them.
    return next(
        (config for config in configs if captured in (config.get("subjects") or ()) and config["name"] != queue), None
    )


def due_message_id(created: str, sequence: int) -> str:
    """Return the message id of a job that is due, where its schedule states none.

    :param created: when the stream of schedules was created
    :param sequence: of the message that is due, in that stream
    """
    return f"due:{sha256(created.encode()).hexdigest()[:16]}:{sequence}"


def id_token(job_id: str) -> str:
    """Encode an id as one token of a subject, whatever characters it has.

    :return: the SHA-256 of its UTF-8 bytes in lower-case hexadecimal
    """
    return sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()


def schedule_once_subject(queue: str, job_id: str, message_id: str) -> str:
    """Return the subject of the schedule of one job.

    :param job_id: the job's id, by which the schedule can be cancelled
    :param message_id: distinguishes it from other publishers' jobs with that id
    """
    return f"scheduled.{queue}.once.{id_token(job_id)}.{id_token(message_id)}"


def schedule_repeated_subject(queue: str, job_id: str) -> str:
    """Return the subject of a repeated schedule; a schedules stream has one for each job id."""
    return f"scheduled.{queue}.every.{id_token(job_id)}"


def job_schedule_filters(queue: str, job_id: str) -> tuple[str, ...]:
    """Return the filters of all schedules of jobs with an id."""
    return (f"scheduled.{queue}.once.{id_token(job_id)}.*", schedule_repeated_subject(queue, job_id))


def completion_filter(queue: object) -> str:
    """Return the filter of the subjects on which the ends of jobs are stored."""
    return f"completed.{queue}.>"


def consumer_completion_filter(queue: object, consumer: str) -> str:
    """Return the filter of the subjects on which the ends of one consumer's jobs are stored."""
    return f"completed.{queue}.{consumer}.*"


def attempt_filter(queue: object) -> str:
    """Return the filter of the subjects on which workers store what they know of attempts at jobs."""
    return f"attempts.{queue}.>"


def consumer_attempt_filter(queue: object, consumer: str) -> str:
    """Return the filter of the subjects of attempts at one consumer's jobs."""
    return f"attempts.{queue}.{consumer}.>"


def job_attempt_filter(queue: str, sequence: int) -> str:
    """Return the filter of the subjects of attempts at one job, whichever consumer delivered it."""
    return f"attempts.{queue}.*.{sequence}.*"


def attempt_subject(queue: str, consumer: str, sequence: int, delivery: int) -> str:
    """Return the subject of one attempt: what is stored last there replaces what was before."""
    return f"attempts.{queue}.{consumer}.{sequence}.{delivery}"


def manifest_filter(queue: object) -> str:
    """Return the filter of the subjects on which tasks record what they published."""
    return f"published.{queue}.*"


def manifest_subject(queue: str, key: str) -> str:
    """Return the subject of the head of a manifest; ``key`` is the manifest's key, one token."""
    return f"published.{queue}.{key}"


def document_subject(queue: str, key: str, kind: str) -> str:
    """Return the subject of the parts of a document.

    :param key: one token that distinguishes it from the others of its kind
    :param kind: what it holds, one word
    """
    return f"published.{queue}.{key}-{kind}"


def job_completion_filter(queue: str, sequence: int) -> str:
    """Return the filter of the subjects on which the end of a job is stored, whichever consumer delivered it."""
    return f"completed.{queue}.*.{sequence}"


def completion_subject(queue: str, consumer: str, sequence: int) -> str:
    """Return the subject on which the end of a job is stored; ``consumer`` delivered the job."""
    return f"completed.{queue}.{consumer}.{sequence}"


def end_id(queue: str, sequence: int, stored_nanoseconds: int) -> str:
    """Return the ``Nats-Msg-Id`` under which the end of a job is stored once, whatever the delivery and the outcome.

    Others can use it up: what the server drops for it counts as stored only where an end of the job is stored.

    :param stored_nanoseconds: when the job was stored, which distinguishes it from one of a recreated stream
    """
    return f"done:{queue}:{sequence}:{stored_nanoseconds}"


def ended_job_time(message_id: str, sequence: int) -> int | None:
    """Return when the job of an end was stored, in nanoseconds since 1970, by the end's ``Nats-Msg-Id``.

    :param sequence: the job's stream sequence
    :return: ``None`` where it is no :func:`end_id` of such a job
    """
    for text in (message_id, message_id.rpartition(":")[0]):
        if (found := _END_ID.fullmatch(text)) and found[1] == str(sequence):
            break
    else:
        return None
    whole, _, decimals = found[2].partition(".")
    return int(whole + decimals.ljust(9, "0")) if decimals else int(whole)


def cancellation_filter(queue: object) -> str:
    """Return the filter of the subjects on which cancellations are stored."""
    return f"cancelled.{queue}.>"


def cancellation_subject(queue: str, job_id: str) -> str:
    """Return the subject on which the cancellation of all jobs with an id is stored."""
    return f"cancelled.{queue}.{id_token(job_id)}"


def job_cancellation_subject(queue: str, sequence: int) -> str:
    """Return the subject on which the cancellation of one stored job is stored, whatever its id."""
    return f"cancelled.{queue}.{sequence}"


def late_ack_subject(stream: str, consumer: str, sequence: int) -> str:
    """Return the subject on which a message that was delivered before can still be acknowledged.

    Protocol: the acknowledgement subjects of NATS ADR-15; for a message whose acknowledgement it no longer expects, the
    server reads only stream, consumer and stream sequence of the subject.
    """
    return f"$JS.ACK.{stream}.{consumer}.1.{sequence}.1.0.0"
