"""The process that waits, as a triggerer does, and measures itself.

It prints one line once all triggers wait, starts to measure after a line on standard input, and prints another line at
the end.
"""

import asyncio
import gc
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import psutil
from airflow.triggers.base import BaseTrigger

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.waiting.follower import EndFollower
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from benchmarks.loop_lag import LoopLags
from benchmarks.waiting_methods import PeerTrigger

TICK_SECONDS = 0.005
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0


class WaitingProcess:
    """Many triggers, each waiting for one job.

    :param path: the class of the triggers, as Airflow stores it
    :param arguments: those of the first trigger, as Airflow stores them
    :param count: how many; their jobs have the sequences from 1 on
    """

    def __init__(self, path: str, arguments: dict[str, Any], count: int) -> None:
        self._path = path
        self._arguments = arguments
        self._count = count
        self._tasks: list[asyncio.Task[None]] = []
        self._follower: EndFollower | None = None
        self.fired: list[tuple[int, float]] = []
        self.errors: Counter[str] = Counter()

    async def start(self, limit: float) -> dict[str, float]:
        """Start the triggers, and return once all wait or ``limit`` seconds have passed."""
        # A triggerer has imported Airflow's connections when its second trigger starts.
        async with JetStreamHook(self._arguments["nats_conn_id"]).shared():
            pass
        gc.collect()
        before, started = _memory(), time.perf_counter()
        handle = self._arguments["handle"]
        trigger: type[BaseTrigger] = resolve_name(self._path)
        for sequence in range(1, self._count + 1):
            spans = [[sequence, sequence]]
            summary = {**self._arguments["summary"], "sequences": spans}
            stored = json.dumps({**self._arguments, "handle": handle | {"sequences": spans}, "summary": summary})
            task = asyncio.create_task(self._watch(trigger(**json.loads(stored)), sequence))
            task.add_done_callback(self._on_done)
            self._tasks.append(task)
            # As the triggerer does after each trigger.
            await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._all_waiting()
        seconds = time.perf_counter() - started
        await asyncio.sleep(SETTLE_SECONDS)
        gc.collect()
        return {"bytes": _memory() - before, "start": seconds}

    async def finish(self, limit: float) -> dict[str, float | list[float]]:
        """Measure until all have fired or ``limit`` seconds have passed."""
        lags = LoopLags(TICK_SECONDS)
        lags.start()
        cpu = time.process_time()
        await asyncio.wait(self._tasks, timeout=limit)
        cpu = time.process_time() - cpu
        lags.stop()
        own, collection = lags.longest_without_collector, lags.longest_collection
        return {"cpu": cpu, "lags": lags.all, "own_lag": own, "collection": collection}

    async def _all_waiting(self) -> None:
        while True:
            if self._count_waiting() >= self._count or all(task.done() for task in self._tasks):
                return
            await asyncio.sleep(POLL_SECONDS)

    def _count_waiting(self) -> int:
        if not issubclass(resolve_name(self._path), JobCompletionTrigger):
            return PeerTrigger.waiting_count
        if self._follower is None:
            self._follower = next((item for item in gc.get_objects() if type(item) is EndFollower), None)
        return self._follower.waiter_count if self._follower else 0

    async def _watch(self, trigger: BaseTrigger, sequence: int) -> None:
        async for event in trigger.run():
            at = time.perf_counter()
            spans = event.payload["report"]["completed_sequences"]
            if [tuple(span) for span in spans] == [(sequence, sequence)]:
                self.fired.append((sequence, at))
            else:
                self.errors[event.payload["status"]] += 1

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.errors[_cause(error)] += 1


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


async def main() -> None:
    """Wait as the command line says: a trigger's class, its arguments as JSON, how many, and a time limit."""
    path, arguments, count, limit = sys.argv[1:]
    waiting = WaitingProcess(path, json.loads(arguments), int(count))
    print(json.dumps(await waiting.start(float(limit))), flush=True)
    if (await asyncio.to_thread(sys.stdin.readline)).strip() == "stop":
        return
    measured = await waiting.finish(float(limit))
    print(json.dumps({**measured, "fired": waiting.fired, "errors": waiting.errors}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
