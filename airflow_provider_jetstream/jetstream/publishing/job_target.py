"""The subjects to which the jobs of one call are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.publishing.outgoing_checks import check_captured, checked_subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


class JobTargets:
    """The subjects of jobs, each checked once for as long as jobs have the same.

    :param default: the subject of jobs that name none
    :param captured: the subjects of the queue's stream, where they are known
    """

    def __init__(self, default: str | None, queue: WorkQueue | None, captured: Sequence[str]) -> None:
        self._default = default
        self._queue = queue
        self._captured = captured
        self._checked: tuple[str, str] | None = None

    def of(self, index: int, subject: str | None, partition_key: str | None) -> str:
        """Return the subject of a job, with its partition.

        :raises JobError: it has none, an invalid one, or one that the queue doesn't capture
        """
        subject, checked = subject or self._default, self._checked
        if checked and partition_key is None and subject == checked[0]:
            return checked[1]
        target = checked_subject(index, partition_key, subject, self._queue)
        if self._queue and self._captured:
            check_captured(index, target, self._queue.name, self._captured)
        if subject is not None and partition_key is None:
            self._checked = subject, target
        return target
