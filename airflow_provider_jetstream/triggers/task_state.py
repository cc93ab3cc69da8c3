"""Whether a person ended a task.

Airflow calls a trigger's ``on_kill`` also when the trigger merely moves to another triggerer, and both a trigger's and
an operator's when the task is cleared and will soon be back.
"""

from __future__ import annotations

import asyncio
from typing import Any

_ENDED = frozenset({"success", "failed", "skipped", "removed"})


async def was_ended(task_instance: Any) -> bool:
    """Ask Airflow for the state of the task.

    :param task_instance: the task instance, as a trigger or a running task knows it; a trigger may belong to none
    :return: whether it is over for good; ``False`` for none
    :raises Exception: Airflow didn't tell
    """
    if task_instance is None:
        return False
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states: dict[str, dict[str, Any]] = await asyncio.to_thread(
        RuntimeTaskInstance.get_task_states,
        dag_id=task_instance.dag_id,
        task_ids=[task_instance.task_id],
        run_ids=[task_instance.run_id],
        map_index=task_instance.map_index,
    )
    index = task_instance.map_index
    name = task_instance.task_id if index is None or index < 0 else f"{task_instance.task_id}_{index}"
    # One that is gone with its run won't come back.
    state = states.get(task_instance.run_id, {}).get(name, "removed")
    return str(state) in _ENDED
