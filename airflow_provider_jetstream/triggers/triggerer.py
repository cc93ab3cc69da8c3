"""What triggers need to know of Airflow: when one may fire, whether its task has ended, and how to keep pauses short.

Airflow's scheduler fails a task instance whose trigger fires before the scheduler has seen the end of the worker
process that deferred it. The process that supervises the worker may notice that end only ``[workers]
min_heartbeat_interval`` later, and the scheduler needs its own time after that: up to one round of its loop. A trigger
can't see how long that takes, but a triggerer that was slow to start the trigger, or whose machine has more to do than
it can, belongs to an Airflow that is slow to see exits.

Airflow calls a trigger's ``on_kill`` also when the trigger merely moves to another triggerer, and both a trigger's and
an operator's when the task is cleared and will soon run again. When a triggerer loses its triggers, those of all mapped
instances of a task request the state at once. They share one request: the triggerer handles requests one after another
and neglects its heartbeat meanwhile, which would cost it the rest of its triggers.

A full pass of Python's garbage collector looks at all objects of the process, and stops all of its threads meanwhile:
with the objects of Airflow and of ten thousand triggers for a tenth of a second and more, in which every trigger is
late. What lives as long as a wait is therefore left out of passes (:func:`gc.freeze`, as Airflow does in the processes
that it forks) until the last wait has ended. Reference counting frees such objects as before; only what is part of a
circle stays until then.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from airflow_provider_jetstream.airflow_compat import conf

if TYPE_CHECKING:
    from collections.abc import Mapping

# Why jobs are cancelled with their task.
WHY_KILLED: Final = "the task that waits for it was ended"

SHORTEST_MARGIN = 3.0
LONGEST_MARGIN = 10.0
SETTLED_AFTER = 60.0
# Seconds of a round of the scheduler's loop for each process that is ready to run on a core: rounds took 5 to 6 s where
# sixteen tasks started at once on two cores.
_LOOP_SECONDS = 3.0


def exit_notice_seconds() -> float:
    """Return how long Airflow may take to notice that the process which deferred a task has ended."""
    return float(conf.getfloat("workers", "min_heartbeat_interval", fallback=5.0))


def shortest_delay(elapsed: float = 0.0) -> float:
    """Return how many seconds after a deferral its task may be resumed at the earliest.

    :param elapsed: seconds that Airflow took to start the trigger
    """
    margin = min(max(elapsed, _LOOP_SECONDS * _load(), SHORTEST_MARGIN), LONGEST_MARGIN)
    return exit_notice_seconds() + margin


def _load() -> float:
    """Return how many processes were ready to run on each core of this machine in the last minute."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


class EarlyFireGuard:
    """Delays the event of one trigger run for as long as firing might fail the task.

    :param deferred_at: seconds since the epoch at which the task deferred itself
    """

    __slots__ = ("_until",)

    def __init__(self, deferred_at: float) -> None:
        elapsed = time.time() - deferred_at
        # A trigger that another triggerer takes over belongs to a task whose end was seen long ago.
        self._until = time.monotonic() + (shortest_delay(elapsed) if elapsed < SETTLED_AFTER else 0.0)

    async def wait(self) -> None:
        """Return as soon as firing is safe."""
        if (remaining := self._until - time.monotonic()) > 0:
            await asyncio.sleep(remaining)


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


# The objects of so many waits are looked at by a full pass, some milliseconds long.
_WAITS = 512


class ShortCollections:
    """Leaves what is allocated so far out of full passes, in a ``with`` around each wait."""

    # One for all waits: none of them needs anything of its own.
    def __init__(self) -> None:
        self._waits = 0
        self._freeze_at = 1

    def waits(self) -> int:
        """Return how many waits this process has."""
        return self._waits

    def __enter__(self) -> None:
        """Begin a wait that has its modules and its connection."""
        self._waits += 1
        if self._waits < self._freeze_at:
            return
        gc.freeze()
        # At a new highest number only, so that what is never looked at is bounded where waits come and go.
        self._freeze_at = self._waits + _WAITS

    def __exit__(self, *_: object) -> None:
        """End a wait."""
        self._waits -= 1
        if self._waits == 0:
            self._freeze_at = 1
            gc.unfreeze()


SHORT_COLLECTIONS: Final = ShortCollections()
