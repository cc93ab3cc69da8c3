"""Two hundred triggers of dead-letter sensors in one triggerer's process, on one queue with many dead letters.

The process runs the triggers that Airflow stores, as a triggerer does. Half of them wait for a letter of a subject of
their own, half for one more letter of any. The letters die by another process, whose requests are counted too, and the
time of an event is measured from the request by which the server publishes the death. The lag of the loop is how late a
timer of 5 ms is, so that it includes what other processes of the machine do.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from benchmarks.dead_letter_scan import BODY, NAME, die, entries_of, verify
from benchmarks.dead_queue import open_connection, prepared_store, server_with
from benchmarks.report import Goal, Sample, Table, Way, Workload, run_workload, server_cpu
from testbed.queues import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_server import NatsServer

_TRIGGERS = 200
_OF_ONE = 20
_HOUR = 3_600.0
_REST_SECONDS = 10.0
_TICK_SECONDS = 0.005
_LAGS = ("loop lag p50 ms", "loop lag p99 ms", "loop lag max ms")
_FIRST, _REST, _ONE, _ALL = "the first scan for all", "at rest for 10 s", "a letter for one", "a letter for all others"
_SLOWEST = "slowest ms"


class _Triggerer:
    """The process that runs the triggers."""

    def __init__(self, server: NatsServer, home: str, arguments: list[dict[str, Any]]) -> None:
        connection = {"conn_type": "nats", "host": "127.0.0.1", "port": server.port}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dead_letter_waits", "--triggers"],
            env={**os.environ, "AIRFLOW_HOME": home, "AIRFLOW_CONN_NATS_DEFAULT": json.dumps(connection)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._server = server
        self._before = self.read()
        self._received, self._cpu = server.monitor("varz")["in_msgs"], server_cpu(server)
        self._started = time.perf_counter()
        self._write(arguments)
        verify(self.read()["started"], len(arguments))

    def _write(self, value: object) -> None:
        if self._process.stdin:
            self._process.stdin.write(f"{json.dumps(value)}\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Return what the process prints next; that of Airflow's logging is left out."""
        while not (line := self._process.stdout.readline() if self._process.stdout else "").startswith("{"):
            if not line:
                raise SystemExit("expected events of the triggers, found that their process has ended")
        values: dict[str, Any] = json.loads(line)
        return values

    def _measured(self) -> dict[str, Any]:
        self._write("lags")
        return self.read()

    def begin(self) -> None:
        """Begin a part of the run."""
        self._before = self._measured()
        self._received, self._cpu = self._server.monitor("varz")["in_msgs"], server_cpu(self._server)
        self._started = time.perf_counter()

    def end(self, count: int, **extra: float) -> Sample:
        """End a part of the run."""
        seconds, requests = time.perf_counter() - self._started, self._server.monitor("varz")["in_msgs"]
        after = self._measured()
        lags = dict(zip(_LAGS, after["lags"], strict=True))
        figures = {"requests a second": (requests - self._received) / seconds, **lags, "MiB": after["memory"]}
        used = server_cpu(self._server) - self._cpu
        return Sample(count, seconds, after["cpu"] - self._before["cpu"], used, {**figures, **extra})

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _arguments(queue: WorkQueue, number: int, letters: int) -> dict[str, Any]:
    of_one = number < _TRIGGERS // 2
    return {
        "nats_conn_id": "nats_default",
        "work_queue": queue.model_dump(mode="json", exclude_unset=True),
        "poll_interval": 60.0,
        "deferred_at": time.time() - _HOUR,
        "min_count": 1 if of_one else letters + _OF_ONE + 1,
        "select": Selection(subject=f"{NAME}.one.{number}").model_dump(mode="json", exclude_unset=True)
        if of_one
        else {},
    }


async def _measure(server: NatsServer, queue: WorkQueue, letters: int, home: str) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        triggerer = _Triggerer(server, home, [_arguments(queue, number, letters) for number in range(_TRIGGERS)])
        try:
            samples: dict[str, Sample] = {}

            async def are_copied() -> bool:
                return await entries_of(connection, queue) >= 2 * letters

            await eventually(are_copied, within=600)
            samples[_FIRST] = triggerer.end(letters)
            quiet = 0
            while (received := server.monitor("varz")["in_msgs"]) > quiet + 10:
                quiet = received
                await asyncio.sleep(1.0)
            triggerer.begin()
            await asyncio.sleep(_REST_SECONDS)
            samples[_REST] = triggerer.end(1)
            delays = list[float]()
            triggerer.begin()
            for number in range(_OF_ONE):
                died = await die(connection, queue, f"{NAME}.one.{number}")
                event = triggerer.read()
                verify(event["dead"], 1)
                verify(event["trigger"], number)
                delays.append(event["at"] - died)
            samples[_ONE] = triggerer.end(_OF_ONE, **{_SLOWEST: max(delays) * 1e3})
            triggerer.begin()
            died = await die(connection, queue, f"{NAME}.jobs")
            fired = [triggerer.read() for _ in range(_TRIGGERS // 2)]
            verify(len({event["trigger"] for event in fired}), _TRIGGERS // 2)
            verify({event["dead"] for event in fired}.pop(), letters + _OF_ONE + 1)
            slowest = (max(event["at"] for event in fired) - died) * 1e3
            # So that the lag has as many samples as its percentile asks for.
            await asyncio.sleep(1.0)
            samples[_ALL] = triggerer.end(len(fired), **{_SLOWEST: slowest})
            return samples
        finally:
            triggerer.stop()


def measure_waits(short: bool) -> Workload:  # noqa: FBT001
    """Measure the triggers."""
    letters, rounds = (1_000, 1) if short else (100_000, 5)
    samples: dict[str, list[Sample]] = {}
    subjects = [f"{NAME}.jobs", f"{NAME}.one.*"]
    with prepared_store(NAME, letters, BODY, events=f"{NAME}-events", subjects=subjects) as (store, queue):
        for turn in range(1, rounds + 1):
            print(f"round {turn} of {rounds}: {letters:,} letters", file=sys.stderr, flush=True)
            with server_with(store) as server, tempfile.TemporaryDirectory() as home:
                for name, sample in asyncio.run(_measure(server, queue, letters, home)).items():
                    samples.setdefault(name, []).append(sample)
    table = Table(
        f"{_TRIGGERS} triggers, {letters:,} letters", "of these", [Way(name, each) for name, each in samples.items()]
    )
    rest, lag = table.way(_REST), _LAGS[1]
    slowest = max(table.way(name).extra(_SLOWEST) for name in (_ONE, _ALL))
    noisy = "the loop shares two cores with the server, and Python's collector goes through all objects of the process"
    return Workload(
        "W4b",
        "Two hundred sensors that wait for dead letters",
        "dead_letter_waits",
        " ".join((__doc__ or "").split()),
        [table],
        [
            Goal("requests a second at rest", rest.extra("requests a second"), 5.0, at_most=True),
            Goal("ms from a letter to the event of a trigger that waits for it", slowest, 1_000.0, at_most=True),
            *(
                Goal(f"ms of loop lag p99, {name}", table.way(name).extra(lag), 20.0, at_most=True, limit=noisy)
                for name in samples
            ),
        ],
    )


async def run_triggers() -> None:
    """Run the triggers that standard input names, and print their events."""
    # A triggerer has imported them long before most of its triggers run.
    import airflow_provider_jetstream.jetstream.client.nats_py
    import airflow_provider_jetstream.jetstream.dead_letters.letter_watch  # noqa: F401
    from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger

    loop, lags = asyncio.get_running_loop(), [0.0]
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"cpu": time.process_time()}), flush=True)

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_TICK_SECONDS)
            lags.append(time.perf_counter() - began - _TICK_SECONDS)

    async def watch(number: int, arguments: Mapping[str, Any]) -> None:
        async for event in DeadLetterTrigger(**arguments).run():
            found = event.payload["found"]
            print(json.dumps({"trigger": number, "dead": found["dead"], "at": time.time()}), flush=True)

    tasks = [asyncio.create_task(tick())]
    for number, arguments in enumerate(json.loads(await reader.readline())):
        tasks.append(asyncio.create_task(watch(number, arguments)))
        # As the triggerer does after each trigger.
        await asyncio.sleep(0)
    print(json.dumps({"started": len(tasks) - 1}), flush=True)
    while await reader.readline():
        ordered = sorted(lags)
        shown = [ordered[int(len(ordered) * share)] * 1e3 for share in (0.5, 0.99)] + [ordered[-1] * 1e3]
        lags[:] = [0.0]
        memory = psutil.Process().memory_info().rss / 2**20
        print(json.dumps({"lags": shown, "cpu": time.process_time(), "memory": memory}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--triggers"]:
        asyncio.run(run_triggers())
    else:
        sys.exit(run_workload(measure_waits, __doc__))
