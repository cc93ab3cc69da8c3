"""Waiting for jobs: what ten thousand waiting triggers cost and how late they fire, beside other ways to wait.

Fairness: every way gets a server of its own with the server's default ``sync_interval``, and a process of its own in
which each waiter is a trigger, made from its stored arguments as a triggerer makes it, with the Airflow connection in
an environment variable. Another process ends the jobs at a steady rate, in the same order for every way: it stores a
completion, or for taskiq a result in taskiq's own store. Ways take turns; figures are medians, but ``max`` is the worst
of all rounds. A round counts only if every waiter fired exactly once, for its own job; waiters that failed are shown
as such, since the peers have their limits, and fail the run if they are ours.

Memory is what the process grew by while its waiters started, less what a process with as many idle triggers grew by
that hold the same arguments. Latency is from the moment at which the other process had the server's confirmation that
an end is stored until the trigger's event, by a clock that all processes of the machine share; where the news comes
sooner than the confirmation it is below zero. From when the end was sent it is longer, by the time to store it. CPU is
the waiting process's, with the ticker of 5 ms that shows how late the event loop is.

The peers get more than people give them: polls are spread over the second and share one connection; who has a
connection for itself hears of a completion before it is stored. Neither looks for jobs that died. What Airflow takes
from the trigger's event until the task goes on is the same for all and not in the figures.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from benchmarks.waiting_round import IDLE, OURS, TASKIQ, WAYS, Measured, measure
from testbed.text_table import text_table

Scenario = tuple[str, int]

MANY, EQUAL, FEW = 10_000, 1_000, 100
# Below this, what a process holds anyway is most of what it grew by.
WEIGHED = 1_000
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
# One connection with its one inbox for answers; two subscriptions and two consumers for a queue with dead letters.
OUR_SUBSCRIPTIONS, OUR_CONSUMERS = 3, 2


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1_000.0, help="how many jobs end per second")
    parser.add_argument("--scenarios", nargs="+", type=_scenario, default=SCENARIOS, help="such as ours:10000")
    asked = parser.parse_args()
    scenarios: list[Scenario] = asked.scenarios
    if find_spec("taskiq_nats") is None:
        print("taskiq-nats isn't installed and is left out: it comes with uv run --group bench")
        scenarios = [scenario for scenario in scenarios if scenario[0] != TASKIQ]
    found: dict[Scenario, list[Measured]] = {scenario: [] for scenario in scenarios}
    for turn in range(1, asked.rounds + 1):
        print(f"round {turn} of {asked.rounds}", file=sys.stderr)
        for way, count in scenarios:
            measured = measure(way, count, asked.rate)
            if way == OURS:
                _require(measured, count)
            found[way, count].append(measured)
    waited = {scenario: rounds for scenario, rounds in found.items() if scenario[0] != IDLE}
    print(_costs(waited, found), end="\n\n")
    print(_times(waited), end="\n\n")
    for (way, count), rounds in waited.items():
        for cause, number in sum((each.failures for each in rounds), Counter[str]()).most_common(3):
            print(f"{way}, {count:,} waiters: {number:,} times {cause}")
    return 0


def _scenario(text: str) -> Scenario:
    way, _, count = text.partition(":")
    if way not in WAYS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(WAYS)}, found {way!r}")
    return way, int(count)


def _require(measured: Measured, count: int) -> None:
    seen = (measured.connections, measured.subscriptions, measured.consumers)
    if measured.failures or seen[0] != 1 or seen[1] > OUR_SUBSCRIPTIONS or seen[2] > OUR_CONSUMERS:
        raise SystemExit(
            f"ours, {count:,} waiters: expected one event each over 1 connection, {OUR_SUBSCRIPTIONS} subscriptions and"
            f" {OUR_CONSUMERS} consumers, found {seen} and failures {dict(measured.failures)}"
        )


def _costs(waited: dict[Scenario, list[Measured]], found: dict[Scenario, list[Measured]]) -> str:
    places = ("connections", "subscriptions", "consumers")
    head = ("way", "waiters", *places, "bytes each", "all wait after s", "CPU us each")
    rows = []
    for (way, count), rounds in waited.items():
        full = _full(rounds)
        rows.append(
            (
                way,
                f"{count:,}",
                *(f"{statistics.median(getattr(each, name) for each in rounds):,.0f}" for name in places),
                _bytes(full, found.get((IDLE, count), []), count),
                _median([each.start for each in full], "{:.2f}"),
                _median([each.cpu / count * 1e6 for each in full], "{:,.0f}"),
            )
        )
    return text_table(head, rows)


def _times(waited: dict[Scenario, list[Measured]]) -> str:
    head = ("way, times in ms", "waiters", "full rounds", "failed", "lag p50", "p99", "max")
    rows = []
    for (way, count), rounds in waited.items():
        full = _full(rounds)
        failed = statistics.median(sum(each.failures.values()) for each in rounds)
        rows.append(
            (
                way,
                f"{count:,}",
                f"{len(full)} of {len(rounds)}",
                f"{failed:,.0f}",
                *_quantiles([each.lags for each in full]),
                *_quantiles([each.latencies for each in full]),
                *_quantiles([each.from_sending for each in full])[:2],
            )
        )
    return text_table((*head, "latency p50", "p99", "max", "from sending p50", "p99"), rows)


def _full(rounds: Sequence[Measured]) -> list[Measured]:
    return [each for each in rounds if not each.failures]


def _bytes(full: Sequence[Measured], idle: Sequence[Measured], count: int) -> str:
    if count < WEIGHED or not idle:
        return "-"
    own = statistics.median(each.grown for each in idle)
    return _median([(each.grown - own) / count for each in full], "{:,.0f}")


def _quantiles(rounds: Sequence[Sequence[float]]) -> tuple[str, str, str]:
    def quantile(share: float) -> Callable[[Sequence[float]], float]:
        return lambda values: sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

    worst = f"{max(max(values) for values in rounds) * 1e3:,.1f}" if rounds else "-"
    return (
        _median([quantile(0.5)(values) for values in rounds], "{:,.1f}"),
        _median([quantile(0.99)(values) for values in rounds], "{:,.1f}"),
        worst,
    )


def _median(values: Sequence[float], shown: str) -> str:
    return shown.format(statistics.median(values)) if values else "-"


if __name__ == "__main__":
    sys.exit(main())
