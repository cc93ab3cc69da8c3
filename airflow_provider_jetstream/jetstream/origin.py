"""The origin of a job: the Airflow task that published it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from airflow_provider_jetstream.jetstream.contract import DAG_ID, MAP_INDEX, RUN_ID, TASK_ID


@dataclass(frozen=True, slots=True)
class Origin:
    """The Airflow task that publishes.

    :param map_index: its index in a mapped task, ``-1`` otherwise
    :param round: how often all its jobs have ended before; a task that is cleared then publishes new jobs
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: int = 0

    def headers(self) -> dict[str, str]:
        """Return the four ``Airflow-*`` headers that name the origin."""
        return {
            DAG_ID: self.dag_id,
            RUN_ID: self.run_id,
            TASK_ID: self.task_id,
            MAP_INDEX: str(self.map_index),
        }

    def message_id(self, key: str | int) -> str:
        """Return a ``Nats-Msg-Id`` that stays the same when Airflow retries the task.

        :param key: the job's own id, or its index
        """
        parts = (self.dag_id, self.run_id, self.task_id, self.map_index)
        rounds = [f"round-{self.round}"] if self.round else []
        return "/".join([*(quote(str(part), safe=":+") for part in parts), *rounds, job_key_part(key)])


def job_key_part(key: str | int) -> str:
    """Return the last part of a message id, for a job's own id or its index."""
    # Quoting removes # from ids, so the index of one job never equals the same number as the id of another.
    return f"#{key}" if isinstance(key, int) else quote(key, safe=":+")
