"""The subjects and headers on which publishers, workers, waiters and redrivers agree."""

from __future__ import annotations

MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"

DEAD_LETTER_MARK = "dead_letter_queue"

MSG_ID = "Nats-Msg-Id"
JOB_ID = "Job-Id"
JOB_ADVISORY = "Job-Advisory"
DAG_ID = "Airflow-Dag-Id"
RUN_ID = "Airflow-Run-Id"
TASK_ID = "Airflow-Task-Id"
MAP_INDEX = "Airflow-Map-Index"

REDRIVE_COUNT = "Redrive-Count"
REDRIVE_STREAM = "Redrive-Stream"
REDRIVE_SEQUENCE = "Redrive-Sequence"
REDRIVE_CONSUMER = "Redrive-Consumer"


def dead_letter_subjects(queue: object) -> tuple[str, ...]:
    """Name what a dead letter queue has to capture.

    :param queue: the work queue's name
    :return: the server's two advisories and the copies that workers make
    """
    return (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*", f"dead.{queue}.>")


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


def completion_subject(queue: str, consumer: str, sequence: int) -> str:
    """Name the subject on which one job's end is stored.

    :param queue: the work queue's name
    :param consumer: the consumer that delivered the job
    :param sequence: the job's stream sequence
    :return: a subject that :func:`completion_filter` matches
    """
    return f"completed.{queue}.{consumer}.{sequence}"


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
