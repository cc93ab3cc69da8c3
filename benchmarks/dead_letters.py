"""Looking at dead letters: scans of queues of very different sizes (W4), and two hundred waiting sensors (W4b)."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue, require_dead_letters
from benchmarks.dead_queue import open_connection, prepared_store, server_with
from benchmarks.loop_lag import Holds
from benchmarks.report import Goal, Sample, Table, Way, Workload, server_cpu
from testbed.queues import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from testbed.nats_server import NatsServer

_ABOUT_SCANS = (
    "Scans dead letters: the first one, and one with ten new letters, at queues of very different sizes. Every size "
    "gets a queue with events, archive and audit: jobs of 64 bytes, dead by one delivery, their advisories captured, "
    "and a few jobs that are done. Each round is a process with a server of its own, on a copy of the prepared store. "
    "A scan counts only if it found every letter. Requests are the messages that the server has received, without the "
    "copies of bodies that a scan stores; these are counted beside them. The first scan of a follower copies each "
    "body into the dead letter queue, and from then on scans read what has changed. A hold is how long the event "
    "loop's thread worked on one callback, by its own CPU time, without the full passes of Python's garbage "
    "collector: these take as long as all objects of the process ask for. Five rounds of 1,000 letters, three of "
    "100,000, one of 1,000,000. Bytes a letter are the growth of the process by a follower that knows all letters."
)
_ABOUT_SENSORS = (
    "Two hundred triggers of dead-letter sensors in one triggerer's process, on one queue with many dead letters. The "
    "process runs the triggers that Airflow stores, as a triggerer does. Half of them wait for a letter of a subject "
    "of their own, half for one more letter of any. The letters die by another process, whose requests are counted "
    "too, and the time of an event is measured from the request by which the server publishes the death. The lag of "
    "the loop is how late a timer of 5 ms is, so that it includes what other processes of the machine do."
)

_QUEUE = "scanned"
_BODY = b"x" * 64
_NEW = 10
# By size, how many rounds; and the size from which the growth of the process is more than noise.
_ROUNDS = {1_000: 5, 100_000: 3, 1_000_000: 1}
_MANY = 50_000
_FIRST, _COPYING, _NEXT, _IDLE = (
    "first scan",
    "first scan of a follower",
    "scan with ten new letters",
    "scan, nothing new",
)


@dataclass
class _Meter:
    """Measures the parts of a run on one connection."""

    server: NatsServer
    holds: Holds

    def begin(self) -> None:
        gc.collect()
        self._memory = psutil.Process().memory_info().rss
        self.holds.longest = 0.0
        self._received, self._cpu = self.server.monitor("varz")["in_msgs"], server_cpu(self.server)
        self._started, self._own = time.perf_counter(), time.process_time()

    def end(self, count: int, copies: int = 0, *, with_memory: bool = False) -> Sample:
        seconds, own = time.perf_counter() - self._started, time.process_time() - self._own
        extra: dict[str, float] = {
            "milliseconds": seconds * 1e3,
            "requests": self.server.monitor("varz")["in_msgs"] - self._received - copies,
            "copies": copies,
            "longest hold ms": self.holds.longest * 1e3,
        }
        if with_memory:
            gc.collect()
            growth = psutil.Process().memory_info().rss - self._memory
            extra["bytes a letter"] = growth / count if count >= _MANY else 0.0
        return Sample(count, seconds, own, server_cpu(self.server) - self._cpu, extra)


async def _entries_of(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Return the last sequence of a queue's dead letter queue."""
    return int((await stream_info(connection, require_dead_letters(queue).name))["state"]["last_seq"])


async def _die(connection: NatsPyConnection, queue: WorkQueue, *subjects: str) -> float:
    """Let new jobs of these subjects die; return when the request was sent by which the server publishes that."""
    jetstream = connection.client.jetstream(timeout=60)
    for subject in subjects:
        await jetstream.publish(subject, _BODY)
    worker = await jetstream.pull_subscribe_bind("worker", stream=queue.name)
    for message in await worker.fetch(len(subjects), timeout=60):
        await message.nak()
    await worker.unsubscribe()
    # As by the next pull of a worker: only then does the server publish that the deliveries are used up.
    sent_at = time.time()
    await probe_consumer(connection, queue.name, "worker")
    return sent_at


async def _be_done(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Let jobs be done, which the ledger of a queue with an archive accounts for."""
    jetstream = connection.client.jetstream(timeout=60)
    for _ in range(count):
        await jetstream.publish(f"{_QUEUE}.jobs", _BODY)
    worker = await jetstream.pull_subscribe_bind("worker", stream=queue.name)
    for message in await worker.fetch(count, timeout=60):
        await message.ack_sync()
    await worker.unsubscribe()


def _verify(found: int, expected: int) -> None:
    """Exit where a scan didn't find what is there."""
    if found != expected:
        raise SystemExit(f"expected {expected} letters, found {found}")


async def _first_scan(server: NatsServer, queue: WorkQueue, letters: int, holds: Holds) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        meter = _Meter(server, holds)
        meter.begin()
        scan = await Scan.begin(connection, queue)
        _verify(sum([len(page.letters) async for page in scan.pages(Selection())]), letters)
        return {_FIRST: meter.end(letters)}


async def _follow(server: NatsServer, queue: WorkQueue, letters: int, holds: Holds) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        await _be_done(connection, queue, _NEW)
        meter, before = _Meter(server, holds), await _entries_of(connection, queue)
        meter.begin()
        tracked = await TrackedLetters.prove(connection, queue)
        copies = await _entries_of(connection, queue) - before
        samples = {_COPYING: meter.end(letters, copies, with_memory=True)}
        _verify(len(tracked.table), letters)
        _verify(copies, letters)
        meter.begin()
        _verify(await tracked.refresh(connection) and len(tracked.table), letters)
        samples[_IDLE] = meter.end(1)
        await _be_done(connection, queue, _NEW)
        await _die(connection, queue, *[f"{_QUEUE}.jobs"] * _NEW)
        meter.begin()
        _verify(await tracked.refresh(connection) and len(tracked.table), letters + _NEW)
        samples[_NEXT] = meter.end(_NEW, _NEW)
        summary = await tracked.summary(Selection(), ())
        _verify(summary.dead, letters + _NEW)
        _verify(sum(last - first + 1 for first, last in summary.ranges), letters + _NEW)
        return samples


def _scan_here(store: str, letters: int, part: str, declaration: str) -> dict[str, Any]:
    """Measure in this process."""
    from pathlib import Path

    holds = Holds()
    holds.install()
    # As this package's triggers do in a triggerer.
    gc.freeze()
    measure = {"first": _first_scan, "follow": _follow}[part]
    with server_with(Path(store)) as server:
        samples = asyncio.run(measure(server, WorkQueue(**json.loads(declaration)), letters, holds))
    return {name: asdict(sample) for name, sample in samples.items()}


def _scan_apart(store: Path, queue: WorkQueue, letters: int, part: str) -> Iterator[tuple[str, Sample]]:
    declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", "benchmarks.dead_letters"]
    command += ["--measure", str(store), str(letters), part, declaration]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for name, sample in json.loads(ended.stdout.splitlines()[-1]).items():
        yield name, Sample(**sample)


def measure_scans(sizes: Mapping[int, int]) -> Workload:
    """Measure scans of queues.

    :param sizes: how many letters, and how many rounds
    """
    scans: dict[str, list[Sample]] = {}
    for letters, rounds in sizes.items():
        print(f"a queue of {letters:,} dead letters", file=sys.stderr, flush=True)
        with prepared_store(_QUEUE, letters, _BODY, events=f"{_QUEUE}-events") as (store, queue):
            for turn in range(1, rounds + 1):
                for part in ("first", "follow"):
                    print(f"round {turn} of {rounds}: {part}", file=sys.stderr, flush=True)
                    for name, sample in _scan_apart(store, queue, letters, part):
                        scans.setdefault(f"{name}, {letters:,}", []).append(sample)
    table = Table("scans", "letters", [Way(name, each) for name, each in scans.items()])
    return Workload(
        "W4",
        "Looking at dead letters",
        "dead_letters scan",
        _ABOUT_SCANS,
        [table],
        _goals(table, sizes),
    )


def _goals(table: Table, sizes: Mapping[int, int]) -> list[Goal]:
    goals: list[Goal] = []
    for letters in sizes:
        first, copying, following = (table.way(f"{name}, {letters:,}") for name in (_FIRST, _COPYING, _NEXT))
        spent = (
            f"{first.client_microseconds:.0f} µs of the client's one thread and {first.server_microseconds:.0f} µs of"
            " the server, one after the other: two messages a letter are parsed, the advisory is validated, and job,"
            " entries, completion, audit and handlers are judged one by one"
        )
        goals += [
            Goal(f"letters a second of a first scan of {letters:,}", first.rate, 10_000, limit=spent),
            Goal("requests a letter of it", first.extra("requests") / letters, 1, at_most=True),
            Goal(f"milliseconds of the next scan of {letters:,}", following.extra("milliseconds"), 50, at_most=True),
            Goal("requests of it", following.extra("requests"), 20, at_most=True),
            Goal("longest hold of the loop by a first scan, ms", copying.extra("longest hold ms"), 20, at_most=True),
        ]
    return goals


_TRIGGERS = 200
_OF_ONE = 20
_HOUR = 3_600.0
_REST_SECONDS = 10.0
_TICK_SECONDS = 0.005
_LAGS = ("loop lag p50 ms", "loop lag p99 ms", "loop lag max ms")
_FIRST_FOR_ALL, _REST, _ONE, _ALL = (
    "the first scan for all",
    "at rest for 10 s",
    "a letter for one",
    "a letter for all others",
)
_SLOWEST = "slowest ms"


class _Triggerer:
    """The process that runs the triggers."""

    def __init__(self, server: NatsServer, home: str, arguments: list[dict[str, Any]]) -> None:
        connection = {"conn_type": "nats", "host": "127.0.0.1", "port": server.port}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dead_letters", "--triggers"],
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
        _verify(self.read()["started"], len(arguments))

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
        "select": Selection(subject=f"{_QUEUE}.one.{number}").model_dump(mode="json", exclude_unset=True)
        if of_one
        else {},
    }


async def _wait(server: NatsServer, queue: WorkQueue, letters: int, home: str) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        triggerer = _Triggerer(server, home, [_arguments(queue, number, letters) for number in range(_TRIGGERS)])
        try:
            samples: dict[str, Sample] = {}

            async def are_copied() -> bool:
                return await _entries_of(connection, queue) >= 2 * letters

            await eventually(are_copied, within=600)
            samples[_FIRST_FOR_ALL] = triggerer.end(letters)
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
                died = await _die(connection, queue, f"{_QUEUE}.one.{number}")
                event = triggerer.read()
                _verify(event["dead"], 1)
                _verify(event["trigger"], number)
                delays.append(event["at"] - died)
            samples[_ONE] = triggerer.end(_OF_ONE, **{_SLOWEST: max(delays) * 1e3})
            triggerer.begin()
            died = await _die(connection, queue, f"{_QUEUE}.jobs")
            fired = [triggerer.read() for _ in range(_TRIGGERS // 2)]
            _verify(len({event["trigger"] for event in fired}), _TRIGGERS // 2)
            _verify({event["dead"] for event in fired}.pop(), letters + _OF_ONE + 1)
            slowest = (max(event["at"] for event in fired) - died) * 1e3
            # So that the lag has as many samples as its percentile asks for.
            await asyncio.sleep(1.0)
            samples[_ALL] = triggerer.end(len(fired), **{_SLOWEST: slowest})
            return samples
        finally:
            triggerer.stop()


def measure_sensors(*, short: bool) -> Workload:
    """Measure the triggers."""
    letters, rounds = (1_000, 1) if short else (100_000, 5)
    samples: dict[str, list[Sample]] = {}
    subjects = [f"{_QUEUE}.jobs", f"{_QUEUE}.one.*"]
    with prepared_store(_QUEUE, letters, _BODY, events=f"{_QUEUE}-events", subjects=subjects) as (store, queue):
        for turn in range(1, rounds + 1):
            print(f"round {turn} of {rounds}: {letters:,} letters", file=sys.stderr, flush=True)
            with server_with(store) as server, tempfile.TemporaryDirectory() as home:
                for name, sample in asyncio.run(_wait(server, queue, letters, home)).items():
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
        "dead_letters sensors",
        _ABOUT_SENSORS,
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


def main() -> int:
    """Measure and print the sections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", nargs="?", choices=["scan", "sensors"], help="one of them; both where absent")
    parser.add_argument("--short", action="store_true", help="a small queue, one round")
    parser.add_argument("--letters", type=int, nargs="+", default=list(_ROUNDS), help="of the scanned queues")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--triggers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.triggers:
        asyncio.run(run_triggers())
        return 0
    if options.measure:
        store, letters, part, declaration = options.measure
        print(json.dumps(_scan_here(store, int(letters), part, declaration)))
        return 0
    if options.workload != "sensors":
        sizes = [1_000] if options.short else options.letters
        scans = measure_scans({letters: 1 if options.short else _ROUNDS.get(letters, 1) for letters in sizes})
        print("\n".join(scans.lines()))
    if options.workload != "scan":
        print("\n".join(measure_sensors(short=options.short).lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
