"""The origin of a job: the Airflow task that published it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from airflow_provider_jetstream.jetstream.contract import DAG_ID, MAP_INDEX, RUN_ID, TASK_ID


@dataclass(frozen=True, slots=True)
class Origin:
    """The Airflow task that publishes.

    :param dag_id: its DAG
    :param run_id: its DAG run
    :param task_id: its task
    :param map_index: its index in a mapped task, ``-1`` otherwise
    :param round: how often all of its jobs have ended before: a task that is cleared then publishes new ones
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: int = 0

    def headers(self) -> dict[str, str]:
        """Give the headers that name the origin.

        :return: the four ``Airflow-*`` headers
        """
        return {
            DAG_ID: self.dag_id,
            RUN_ID: self.run_id,
            TASK_ID: self.task_id,
            MAP_INDEX: str(self.map_index),
        }

    def message_id(self, key: str | int) -> str:
        """Build an id that stays the same when Airflow tries the task again.

        :param key: the job's own id, or its index
        :return: the value of ``Nats-Msg-Id``
        """
        parts = (self.dag_id, self.run_id, self.task_id, self.map_index)
        again = [f"round-{self.round}"] if self.round else []
        return "/".join([*(quote(str(part), safe=":+") for part in parts), *again, _last_part(key)])


def _last_part(key: str | int) -> str:
    # The mark, which quoting takes from ids, keeps the index of one job apart from the same number as another's id.
    return f"#{key}" if isinstance(key, int) else quote(key, safe=":+")
