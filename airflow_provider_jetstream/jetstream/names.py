"""The subjects and headers on which publishers, workers, waiters and redrivers agree."""

from __future__ import annotations

MAX_DELIVERIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
TERMINATED = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED"

ACK_METRIC = "$JS.EVENT.METRIC.CONSUMER.ACK"

# Stands for a consumer in the subjects of jobs that none has delivered.
NO_CONSUMER = "_"

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
