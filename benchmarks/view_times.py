"""What was measured of the page's views, and its section in Markdown."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.report import Goal, Workload, machine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_P95_GOAL, _MEMORY_GOAL = 500.0, 100.0


@dataclass
class Measured:
    """The milliseconds of each view, and memory in MiB.

    :param name: what was measured
    """

    name: str
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    memory: float = 0.0
    all_memory: float = 0.0
    first_scan: float = 0.0

    def p95(self, view: str) -> float:
        """Return the 95th percentile of a view."""
        return _quantile(self.milliseconds[view], 0.95)

    @property
    def slowest(self) -> tuple[str, float]:
        """The view with the highest 95th percentile."""
        return max(((view, self.p95(view)) for view in self.milliseconds), key=lambda item: item[1])


class PageWorkload(Workload):
    """The section about the page: its tables hold times of views in place of rates."""

    def lines(self) -> list[str]:
        """Return the section in Markdown."""
        lines = super().lines()
        command = next(at for at, line in enumerate(lines) if line.startswith("Measured by"))
        end = lines.index("", command)
        lines[command:end] = [f"Measured by `make bench-{self.module.replace('_', '-')}`. {machine()}"]
        return lines


@dataclass(frozen=True)
class LatencyTable:
    """Views with their times."""

    measured: Sequence[Measured]
    ways: Sequence[Any] = ()

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        names = [measured.name for measured in self.measured]
        lines = [
            f"| view: p50 / p95 ms | {' | '.join(names)} |",
            f"| --- |{' --- |' * len(names)}",
        ]
        for view in self.measured[0].milliseconds:
            cells = [
                f"{_quantile(measured.milliseconds[view], 0.5):.0f} / {measured.p95(view):.0f}"
                for measured in self.measured
            ]
            lines.append(f"| {view} | {' | '.join(cells)} |")
        return lines


def section(measured: list[Measured], options: argparse.Namespace, bare: float, share: float) -> Workload:
    """Return the section."""
    goals, load, cores = [], os.getloadavg()[1], os.cpu_count() or 1
    limit = f"the machine was shared, load {load:.0f} on {cores} cores" if load > 2 * cores else ""
    for each in measured:
        view, slowest = each.slowest
        text = f"p95 in ms of the slowest view ({view}), {each.name}"
        goals.append(Goal(text, slowest, _P95_GOAL, at_most=True, limit=limit))
    for workers in options.workers:
        largest = max(each.memory for each in measured if each.name.startswith(f"workers={workers},"))
        text = f"MiB of the largest process above the server without the plugin, workers={workers}"
        goals.append(Goal(text, largest, _MEMORY_GOAL, at_most=True))
    scans = ", ".join(
        f"{each.first_scan:.0f} s with workers={workers}"
        for workers, each in zip(options.workers, measured[::2], strict=True)
    )
    text = (
        f"A real `airflow api-server` over a real nats-server with {options.queues} queues and {options.letters:,} dead"
        f" letters, {share:.0%} of them in one queue, each on a subject of its own. Each worker process counted all of"
        f" them right, {scans} after its start: scans leave half of a core to the server. Then each view was requested"
        f" {options.turns} times over HTTP with other parameters each time, first alone and then while"
        f" {options.viewers} viewers polled as the page does. The server without the plugin has {bare:.0f} MiB; what is"
        " added is the highest growth of a process during all of that."
    )
    return PageWorkload(
        f"page {options.letters:,}",
        f"The page with {options.letters:,} letters",
        "monitor",
        text,
        [LatencyTable(measured)],  # type: ignore[list-item]
        goals,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
