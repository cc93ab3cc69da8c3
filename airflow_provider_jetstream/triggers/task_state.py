"""Whether a person ended a task.

Airflow calls a trigger's ``on_kill`` also when the trigger merely moves to another triggerer, and both a trigger's and
an operator's when the task is cleared and will soon be back. When a triggerer loses its triggers, all of a mapped
task's ask at once: they share a request, since the triggerer answers one after another and neglects its heartbeat
meanwhile, which would cost it the rest of its triggers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Mapping

_Task: TypeAlias = tuple[str, str, str]
_Asking: TypeAlias = "dict[_Task, asyncio.Task[Mapping[str, str]]]"

_ENDED = frozenset({"success", "failed", "skipped", "removed"})
_OTHERS_ASK = 0.1

_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Asking] = WeakKeyDictionary()


async def was_ended(task_instance: Any) -> bool:
    """Ask Airflow for the state of the task.

    :param task_instance: the task instance, as a trigger or a running task knows it; a trigger may belong to none
    :return: whether it is over for good; ``False`` for none
    :raises Exception: Airflow didn't tell
    """
    if task_instance is None:
        return False
    asking = _loops.setdefault(asyncio.get_running_loop(), {})
    task = (task_instance.dag_id, task_instance.run_id, task_instance.task_id)
    if task not in asking:
        asking[task] = asyncio.create_task(_ask(asking, task))
    # Shielded: one trigger that is cancelled mustn't take the answer from the others.
    states = await asyncio.shield(asking[task])
    index = task_instance.map_index
    name = task_instance.task_id if index is None or index < 0 else f"{task_instance.task_id}_{index}"
    # One that is gone with its run won't come back.
    return states.get(name, "removed") in _ENDED


async def _ask(asking: _Asking, task: _Task) -> Mapping[str, str]:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    await asyncio.sleep(_OTHERS_ASK)
    # Who comes from here on may know of a later state.
    del asking[task]
    dag_id, run_id, task_id = task
    states: dict[str, dict[str, Any]] = await asyncio.to_thread(
        RuntimeTaskInstance.get_task_states, dag_id=dag_id, task_ids=[task_id], run_ids=[run_id]
    )
    return {name: str(state) for name, state in states.get(run_id, {}).items()}
