"""Whether a task instance has ended for good.

Airflow calls a trigger's ``on_kill`` also when the trigger merely moves to another triggerer, and both a trigger's and
an operator's when the task is cleared and will soon run again. When a triggerer loses its triggers, those of all mapped
instances of a task request the state at once. They share one request: the triggerer handles requests one after another
and neglects its heartbeat meanwhile, which would cost it the rest of its triggers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Mapping

_Task: TypeAlias = tuple[str, str, str]
_Requests: TypeAlias = "dict[_Task, asyncio.Task[Mapping[str, str]]]"

_END_STATES = frozenset({"success", "failed", "skipped", "removed"})
_GATHERING_SECONDS = 0.1

_requests: WeakKeyDictionary[asyncio.AbstractEventLoop, _Requests] = WeakKeyDictionary()


async def has_ended(task_instance: Any) -> bool:
    """Read from Airflow whether a task instance has ended for good.

    :param task_instance: as a trigger or a running task knows it; ``None`` for a trigger of no task, which hasn't ended
    :raises Exception: Airflow didn't answer
    """
    if task_instance is None:
        return False
    requests = _requests.setdefault(asyncio.get_running_loop(), {})
    task = (task_instance.dag_id, task_instance.run_id, task_instance.task_id)
    if task not in requests:
        requests[task] = asyncio.create_task(_request_states(requests, task))
    # Shielded: a trigger that is cancelled must not cancel the request of the others.
    states = await asyncio.shield(requests[task])
    index = task_instance.map_index
    name = task_instance.task_id if index is None or index < 0 else f"{task_instance.task_id}_{index}"
    # An instance that is gone with its run won't come back.
    return states.get(name, "removed") in _END_STATES


async def _request_states(requests: _Requests, task: _Task) -> Mapping[str, str]:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    await asyncio.sleep(_GATHERING_SECONDS)
    # A trigger that comes from here on may be about a later state.
    del requests[task]
    dag_id, run_id, task_id = task
    states: dict[str, dict[str, Any]] = await asyncio.to_thread(
        RuntimeTaskInstance.get_task_states, dag_id=dag_id, task_ids=[task_id], run_ids=[run_id]
    )
    return {name: str(state) for name, state in states.get(run_id, {}).items()}
