"""The subjects and headers on which publishers, workers, waiters and redrivers agree."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"

ACK_METRIC = "$JS.EVENT.METRIC.CONSUMER.ACK"

# Stands for a consumer in the subjects of jobs that none has delivered.
NO_CONSUMER = "_"

DEAD_LETTER_MARK = "dead_letter_queue"
# On a consumer: among how many it divides the jobs of its kind.
PARTITIONS = "partitions"

MSG_ID = "Nats-Msg-Id"
JOB_ID = "Job-Id"
JOB_ADVISORY = "Job-Advisory"
JOB_DEADLINE = "Job-Deadline"
JOB_EXPIRES = "Job-Expires"
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


def dead_letter_subjects(queue: object) -> tuple[str, ...]:
    """Name what a dead letter queue has to capture.

    :param queue: the work queue's name
    :return: the server's two advisories, the copies that workers and scans make, and what was parked
    """
    return (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*", copy_filter(queue), parked_filter(queue))


def copy_filter(queue: object) -> str:
    """Name the subjects on which copies of dead letters are stored.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"dead.{queue}.>"


def copy_subject(queue: str, consumer: str | None, sequence: int) -> str:
    """Name the subject of one dead letter's copy.

    :param queue: the work queue's name
    :param consumer: the consumer that delivered the job, if any did
    :param sequence: the job's stream sequence
    :return: a subject that :func:`copy_filter` matches
    """
    return f"dead.{queue}.{consumer or NO_CONSUMER}.{sequence}"


def parked_filter(queue: object) -> str:
    """Name the subjects on which parked letters are stored.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"parked.{queue}.>"


def parked_subject(queue: str, consumer: str | None, sequence: int) -> str:
    """Name the subject of one parked letter.

    :param queue: the work queue's name
    :param consumer: the consumer that delivered the job, if any did
    :param sequence: the job's stream sequence
    :return: a subject that :func:`parked_filter` matches
    """
    return f"parked.{queue}.{consumer or NO_CONSUMER}.{sequence}"


def archive_filter(queue: object) -> str:
    """Name the subjects on which the server stores a copy of each job.

    :param queue: the work queue's name
    :return: a filter; also where ``republish`` sends, since the server puts the job's subject in place of ``>``
    """
    return f"archive.{queue}.>"


def audit_filter(queue: object) -> str:
    """Name the subjects on which redrives are recorded.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"audit.{queue}.>"


def letter_audit_subject(queue: str, sequence: int) -> str:
    """Name the subject on which is recorded what became of one dead letter.

    :param queue: the work queue's name
    :param sequence: the job's stream sequence
    :return: a subject that :func:`audit_filter` matches
    """
    return f"audit.{queue}.letters.{sequence}"


def run_audit_subject(queue: str, run: str) -> str:
    """Name the subject on which one redrive records how far it is.

    :param queue: the work queue's name
    :param run: the redrive's key, one token
    :return: a subject that :func:`audit_filter` matches
    """
    return f"audit.{queue}.runs.{run}"


def marker_filter(queue: object) -> str:
    """Name the subjects of the markers that an atomic redrive leaves in the work queue itself.

    :param queue: the work queue's name
    :return: a filter; no consumer may match it
    """
    return f"requeued.{queue}.*"


def marker_subject(queue: str, sequence: int) -> str:
    """Name the subject of the marker that says that one dead letter was redriven.

    :param queue: the work queue's name
    :param sequence: the job's stream sequence
    :return: a subject that :func:`marker_filter` matches
    """
    return f"requeued.{queue}.{sequence}"


def schedule_filter(queue: object) -> str:
    """Name the subjects of the schedules from which the server makes a work queue's jobs.

    :param queue: the work queue's name
    :return: a filter; no consumer may match it
    """
    return f"scheduled.{queue}.>"


def id_token(job_id: str) -> str:
    """Write an id as one token of a subject, whatever it consists of.

    :param job_id: a job's id
    :return: the SHA-256 of its UTF-8 bytes in lower-case hexadecimal
    """
    return sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()


def schedule_once_subject(queue: str, job_id: str, message_id: str) -> str:
    """Name the subject of the schedule of one job.

    :param queue: the work queue's name
    :param job_id: the job's id, by which it can be cancelled
    :param message_id: what tells it apart from other publishers' jobs of that id
    :return: a subject that :func:`schedule_filter` matches
    """
    return f"scheduled.{queue}.once.{id_token(job_id)}.{id_token(message_id)}"


def schedule_repeated_subject(queue: str, job_id: str) -> str:
    """Name the subject of the schedule of a job that is made again and again.

    :param queue: the work queue's name
    :param job_id: the job's id, of which the queue has one
    :return: a subject that :func:`schedule_filter` matches
    """
    return f"scheduled.{queue}.every.{id_token(job_id)}"


def job_schedule_filters(queue: str, job_id: str) -> tuple[str, ...]:
    """Name the subjects of all schedules of jobs with an id.

    :param queue: the work queue's name
    :param job_id: the jobs' id
    :return: filters
    """
    return (f"scheduled.{queue}.once.{id_token(job_id)}.*", schedule_repeated_subject(queue, job_id))


class Reserved(NamedTuple):
    """Subjects of a work queue that aren't for jobs.

    :param subjects: a filter; no consumer may match it
    :param what: what they are for
    :param flag: the field of the declaration that asks for them
    """

    subjects: str
    what: str
    flag: str


def reserved_subjects(queue: object) -> tuple[Reserved, ...]:
    """Name the subjects that a work queue may have besides those of its jobs.

    :param queue: the work queue's name
    :return: each with what it is for
    """
    return (
        Reserved(marker_filter(queue), "the markers of atomic redrives", "atomic_redrive"),
        Reserved(schedule_filter(queue), "schedules", "schedules"),
    )


def death_filter(queue: str) -> str:
    """Name the subjects of the server's advisories about a queue's jobs, deaths among them.

    :param queue: the work queue's name
    :return: one filter, since a read by sequence takes only one
    """
    return f"$JS.EVENT.ADVISORY.CONSUMER.*.{queue}.*"


def completion_filter(queue: object) -> str:
    """Name the subjects on which the ends of a queue's jobs are stored.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"completed.{queue}.>"


def publish_log_filter(queue: object) -> str:
    """Name the subjects on which tasks record what they published to a queue.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"published.{queue}.*"


def publish_log_subject(queue: str, key: str) -> str:
    """Name the subject on which one task records what it published.

    :param queue: the work queue's name
    :param key: the task's key, one token
    :return: a subject that :func:`receipt_filter` matches
    """
    return f"published.{queue}.{key}"


def completion_subject(queue: str, consumer: str, sequence: int) -> str:
    """Name the subject on which one job's end is stored.

    :param queue: the work queue's name
    :param consumer: the consumer that delivered the job
    :param sequence: the job's stream sequence
    :return: a subject that :func:`completion_filter` matches
    """
    return f"completed.{queue}.{consumer}.{sequence}"


def end_id(queue: str, sequence: int, stored_at: datetime) -> str:
    """Give the ``Nats-Msg-Id`` under which one job's end is stored, once.

    :param queue: the work queue's name
    :param sequence: the job's stream sequence
    :param stored_at: when it was stored, which tells it from a job of that sequence in a recreated stream
    :return: the id; the same for every delivery, and however the job ended
    """
    return f"done:{queue}:{sequence}:{stored_at.timestamp()}"


def cancellation_filter(queue: object) -> str:
    """Name the subjects on which cancellations of a queue's jobs are stored.

    :param queue: the work queue's name
    :return: a filter
    """
    return f"cancelled.{queue}.>"


def cancellation_subject(queue: str, job_id: str) -> str:
    """Name the subject on which the cancellation of jobs of one id is stored.

    :param queue: the work queue's name
    :param job_id: the jobs' id
    :return: a subject that :func:`cancellation_filter` matches
    """
    return f"cancelled.{queue}.{id_token(job_id)}"


def late_ack_subject(stream: str, consumer: str, sequence: int) -> str:
    """Name the subject on which a message that was delivered before can still be acknowledged.

    Protocol: the acknowledgement subjects of NATS ADR-15; the server reads only stream, consumer and stream sequence
    of it for a message it no longer expects an answer for.

    :param stream: the stream
    :param consumer: the consumer that delivered the message
    :param sequence: its stream sequence
    :return: the subject
    """
    return f"$JS.ACK.{stream}.{consumer}.1.{sequence}.1.0.0"
