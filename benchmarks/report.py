"""What the workloads measured, as sections in Markdown.

A workload measures several ways of doing one thing, each in rounds of its own server, and compares their medians with
its goals. A goal that is missed is written as missed, beside what limits the figure.
"""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import psutil

from testbed.nats_server import NatsServer

ROUNDS = 5
_SIGNIFICANT = 3


@dataclass(frozen=True)
class Sample:
    """One measurement of one way, whose counts were verified.

    :param count: of the jobs, letters or waiters
    :param seconds: for all of them
    :param client_cpu: seconds of the processes that did it
    :param server_cpu: seconds of the server meanwhile
    :param extra: other figures of the way, such as milliseconds of latency, by name
    """

    count: int
    seconds: float
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """How many a second."""
        return self.count / self.seconds


@dataclass(frozen=True)
class Way:
    """One way of doing a workload, and its rounds."""

    name: str
    samples: Sequence[Sample]

    @property
    def rate(self) -> float:
        """The median rate."""
        return statistics.median(sample.rate for sample in self.samples)

    @property
    def client_microseconds(self) -> float:
        """The median CPU of the client for one of the count, in microseconds."""
        return statistics.median(sample.client_cpu / sample.count * 1e6 for sample in self.samples)

    @property
    def server_microseconds(self) -> float:
        """The median CPU of the server for one of the count, in microseconds."""
        return statistics.median(sample.server_cpu / sample.count * 1e6 for sample in self.samples)

    def extra(self, name: str) -> float:
        """Return the median of another figure."""
        return statistics.median(sample.extra[name] for sample in self.samples)

    def extra_cell(self, name: str) -> str:
        """Return another figure as a table's cell: the median, and the least and the most where they differ."""
        if name not in self.samples[0].extra:
            return ""
        least, *_, most = sorted([sample.extra[name] for sample in self.samples] * 2)
        median = _figure(self.extra(name))
        return median if _figure(least) == _figure(most) else f"{median} ({_figure(least)} to {_figure(most)})"


@dataclass(frozen=True)
class Goal:
    """A goal and the figure that was measured.

    :param text: what is to be reached, such as ``of the C floor``
    :param at_most: whether the figure is to be no larger than the goal, in place of no smaller
    :param limit: what keeps the figure where it is, as a profile shows
    """

    text: str
    value: float
    goal: float
    at_most: bool = False
    limit: str = ""

    @property
    def is_hit(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.goal if self.at_most else self.value >= self.goal


@dataclass(frozen=True)
class Table:
    """Ways with the same count, beside the floor of the same run.

    :param title: what was measured
    :param unit: what is counted, in the plural
    :param floor: the name of the way with which the others are compared, if there is one
    """

    title: str
    unit: str
    ways: Sequence[Way]
    floor: str = ""

    def way(self, name: str) -> Way:
        """Return a way by its name."""
        return next(way for way in self.ways if way.name == name)

    def share(self, name: str, of: str = "") -> float:
        """Return the rate of a way as a part of another's, which is the floor's by default."""
        return self.way(name).rate / self.way(of or self.floor).rate

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        extras = list(dict.fromkeys(name for way in self.ways for name in way.samples[0].extra))
        floor = self.way(self.floor).rate if self.floor else 0.0
        cpu = {
            "client µs": [way.client_microseconds for way in self.ways],
            "server µs": [way.server_microseconds for way in self.ways],
        }
        measured = {name: figures for name, figures in cpu.items() if any(figures)}
        head = [self.title, f"{self.unit}/s", "min", "max", *(["of the floor"] if floor else []), *measured, *extras]
        lines = [_row(head), _row(["---"] * len(head))]
        for place, way in enumerate(self.ways):
            rates = [sample.rate for sample in way.samples]
            cells = [way.name, *map(_figure, (way.rate, min(rates), max(rates)))]
            cells += [f"{way.rate / floor:.2f}"] if floor else []
            cells += [_figure(figures[place]) for figures in measured.values()]
            cells += [way.extra_cell(name) for name in extras]
            lines.append(_row(cells))
        return lines


@dataclass(frozen=True)
class Workload:
    """The results of a workload.

    :param key: by which ``docs/benchmarks.md`` calls it, such as ``W1``
    :param title: of its section
    :param module: the module of this package that measures it
    :param text: what was done, and how it was verified
    :param samples: what the medians are taken of
    """

    key: str
    title: str
    module: str
    text: str
    tables: Sequence[Table]
    goals: Sequence[Goal]
    samples: str = "rounds"

    def lines(self) -> list[str]:
        """Return the section in Markdown."""
        counts = sorted(len(way.samples) for table in self.tables for way in table.ways) or [0]
        rounds = f"{counts[0]} to {counts[-1]}" if counts[0] != counts[-1] else f"{counts[0]}"
        lines = [f"## {self.key}: {self.title}", "", *_wrapped(self.text), ""]
        lines += _wrapped(
            f"Measured by `python -m benchmarks.{self.module}`; medians of {rounds} {self.samples}. {machine()}"
        )
        for table in self.tables:
            lines += ["", *table.lines()]
        if self.goals:
            lines += ["", "| goal | expected | measured | |", "| --- | --- | --- | --- |"]
        for goal in self.goals:
            verdict = "reached" if goal.is_hit else f"**missed**{goal.limit and f': {goal.limit}'}"
            expected = f"{'≤' if goal.at_most else '≥'} {_figure(goal.goal)}"
            lines.append(_row([goal.text, expected, _figure(goal.value), verdict]))
        return lines


def measure_in_turns(
    ways: Mapping[str, Callable[[NatsServer], Sample]], rounds: int = ROUNDS, *, jetstream_config: str = ""
) -> list[Way]:
    """Measure ways in turns, each time on a fresh server with the default ``sync_interval``."""
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for turn in range(1, rounds + 1):
        for name, way in ways.items():
            print(f"round {turn} of {rounds}: {name}", file=sys.stderr, flush=True)
            with NatsServer(jetstream_config=jetstream_config) as server:
                samples[name].append(way(server))
    return [Way(name, measured) for name, measured in samples.items()]


def server_cpu(server: NatsServer) -> float:
    """Return the CPU seconds that a server has used so far."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def run_workload(measure: Callable[[bool], Workload], description: str | None) -> int:
    """Run a workload as the command line says, and print its section.

    :param measure: returns the results; its argument is whether the short form was asked for
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="few and small rounds")
    options = parser.parse_args()
    workload = measure(options.short)
    print("\n".join(workload.lines()))
    return 0


def machine() -> str:
    """Describe the machine and the day."""
    with NatsServer(jetstream=False) as server:
        version = server.version
    memory = round(psutil.virtual_memory().total / 2**30)
    load = os.getloadavg()[1]
    return (
        f"{os.cpu_count()} cores, {memory} GiB, Python {platform.python_version()}, nats-server {version},"
        f" {datetime.now(UTC):%Y-%m-%d}, load {load:.1f}."
    )


def _figure(value: float) -> str:
    if abs(value) >= 10**_SIGNIFICANT:
        return f"{value:,.0f}"
    return f"{value:.{_SIGNIFICANT}g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _wrapped(text: str, width: int = 120) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


class PageWorkload(Workload):
    """The section about the page: its tables hold times of views in place of rates."""

    def lines(self) -> list[str]:
        """Return the section in Markdown."""
        lines = super().lines()
        command = next(at for at, line in enumerate(lines) if line.startswith("Measured by"))
        end = lines.index("", command)
        lines[command:end] = [f"Measured by `make bench-{self.module.replace('_', '-')}`. {machine()}"]
        return lines
