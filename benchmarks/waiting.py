"""Waiting for jobs: the cost of ten thousand waiting triggers and their latency, beside other methods of waiting.

Fairness: every method gets a server of its own with the default ``sync_interval``, and a process of its own in which
each waiter is a trigger, made from its stored arguments as a triggerer makes it, with the Airflow connection in an
environment variable. Another process ends the jobs at a steady rate, in the same order for every method: it stores a
completion, or for taskiq a result in taskiq's own store. Methods take turns; figures are medians, but ``max`` is the
maximum of all rounds. A round counts only if every waiter fired exactly once, for its own job; waiters that failed are
shown as failed, since the peers have their limits, and fail the run if they are this package's.

Memory is the growth of the process while its waiters started, less the growth of a process with as many idle triggers
with the same arguments. Latency is from the moment at which the other process had the server's confirmation that an end
is stored until the trigger's event, by a clock that all processes of the machine share; it is below zero where the
event precedes the confirmation. From the sending of the end it is longer, by the time to store it. CPU is the waiting
process's, with the ticker of 5 ms that measures the lag of the event loop.

The peers get better conditions than in practice: polls are spread over the second and share one connection; a waiter
with its own connection receives a completion before it is stored. Neither looks for dead jobs. Airflow's time from the
trigger's event until the task resumes is the same for all and not in the figures.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from benchmarks.waiting_round import IDLE, METHODS, OURS, TASKIQ, Measured, measure
from testbed.text_table import text_table

Scenario = tuple[str, int]

MANY, EQUAL, FEW = 10_000, 1_000, 100
# With fewer waiters, most of the growth is the process's own.
MEMORY_MIN_WAITERS = 1_000
SCENARIOS: list[Scenario] = [
    (IDLE, MANY),
    (OURS, MANY),
    (IDLE, EQUAL),
    (OURS, EQUAL),
    ("connection-each", EQUAL),
    ("poll-each", EQUAL),
    (OURS, FEW),
    (TASKIQ, FEW),
    (TASKIQ, EQUAL),
]
# One connection with one inbox for answers; three subscriptions and consumers for a queue with dead letters and audit.
OUR_SUBSCRIPTIONS, OUR_CONSUMERS = 5, 3


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1_000.0, help="how many jobs end per second")
    parser.add_argument("--scenarios", nargs="+", type=_scenario, default=SCENARIOS, help="such as ours:10000")
    options = parser.parse_args()
    scenarios: list[Scenario] = options.scenarios
    if find_spec("taskiq_nats") is None:
        print("taskiq-nats isn't installed and is left out: it comes with uv run --group bench")
        scenarios = [scenario for scenario in scenarios if scenario[0] != TASKIQ]
    results: dict[Scenario, list[Measured]] = {scenario: [] for scenario in scenarios}
    for turn in range(1, options.rounds + 1):
        print(f"round {turn} of {options.rounds}", file=sys.stderr)
        for method, count in scenarios:
            measured = measure(method, count, options.rate)
            if method == OURS:
                _require_counts(measured, count)
            results[method, count].append(measured)
    waiting_results = {scenario: rounds for scenario, rounds in results.items() if scenario[0] != IDLE}
    print(_costs(waiting_results, results), end="\n\n")
    print(_times(waiting_results), end="\n\n")
    for (method, count), rounds in waiting_results.items():
        for cause, number in sum((measured.failures for measured in rounds), Counter[str]()).most_common(3):
            print(f"{method}, {count:,} waiters: {number:,} times {cause}")
    return 0


def _scenario(text: str) -> Scenario:
    method, _, count = text.partition(":")
    if method not in METHODS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(METHODS)}, found {method!r}")
    return method, int(count)


def _require_counts(measured: Measured, count: int) -> None:
    counts = (measured.connections, measured.subscriptions, measured.consumers)
    if measured.failures or counts[0] != 1 or counts[1] > OUR_SUBSCRIPTIONS or counts[2] > OUR_CONSUMERS:
        raise SystemExit(
            f"ours, {count:,} waiters: expected one event each over 1 connection, {OUR_SUBSCRIPTIONS} subscriptions and"
            f" {OUR_CONSUMERS} consumers, found {counts} and failures {dict(measured.failures)}"
        )


def _costs(waiting_results: dict[Scenario, list[Measured]], results: dict[Scenario, list[Measured]]) -> str:
    count_names = ("connections", "subscriptions", "consumers")
    head = ("method", "waiters", *count_names, "bytes each", "all wait after s", "CPU us each")
    rows = []
    for (method, count), rounds in waiting_results.items():
        full = _full(rounds)
        rows.append(
            (
                method,
                f"{count:,}",
                *(f"{statistics.median(getattr(measured, name) for measured in rounds):,.0f}" for name in count_names),
                _bytes(full, results.get((IDLE, count), []), count),
                _median([measured.start for measured in full], "{:.2f}"),
                _median([measured.cpu / count * 1e6 for measured in full], "{:,.0f}"),
            )
        )
    return text_table(head, rows)


def _times(waiting_results: dict[Scenario, list[Measured]]) -> str:
    head = ("method, times in ms", "waiters", "full rounds", "failed", "lag p50", "p99", "max")
    rows = []
    for (method, count), rounds in waiting_results.items():
        full = _full(rounds)
        failed = statistics.median(sum(measured.failures.values()) for measured in rounds)
        rows.append(
            (
                method,
                f"{count:,}",
                f"{len(full)} of {len(rounds)}",
                f"{failed:,.0f}",
                *_quantiles([measured.lags for measured in full]),
                *_quantiles([measured.latencies for measured in full]),
                *_quantiles([measured.from_sending for measured in full])[:2],
            )
        )
    return text_table((*head, "latency p50", "p99", "max", "from sending p50", "p99"), rows)


def _full(rounds: Sequence[Measured]) -> list[Measured]:
    return [measured for measured in rounds if not measured.failures]


def _bytes(full: Sequence[Measured], idle: Sequence[Measured], count: int) -> str:
    if count < MEMORY_MIN_WAITERS or not idle:
        return "-"
    idle_bytes = statistics.median(measured.memory_growth for measured in idle)
    return _median([(measured.memory_growth - idle_bytes) / count for measured in full], "{:,.0f}")


def _quantiles(rounds: Sequence[Sequence[float]]) -> tuple[str, str, str]:
    def quantile(share: float) -> Callable[[Sequence[float]], float]:
        return lambda values: sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

    worst = f"{max(max(values) for values in rounds) * 1e3:,.1f}" if rounds else "-"
    return (
        _median([quantile(0.5)(values) for values in rounds], "{:,.1f}"),
        _median([quantile(0.99)(values) for values in rounds], "{:,.1f}"),
        worst,
    )


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "-"


if __name__ == "__main__":
    sys.exit(main())
