"""Variants of one operation, measured in turns: each variant once a round, against the floor of the same round."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.text_table import text_table

# The JVM compiles hot code, on the same cores, for about as many rounds.
_WARM_UP = 8

Cpu = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Variant:
    """One variant of an operation on ``messages`` messages; ``run`` raises where a count is wrong.

    ``floor`` is the name of the variant that it is compared with.
    """

    name: str
    run: Callable[[], object]
    messages: int
    floor: str


@dataclass(frozen=True)
class Measured:
    """The measurement of one variant in one round; ``cpu`` holds CPU seconds by kind of process."""

    variant: str
    floor: str
    messages: int
    seconds: float
    cpu: dict[str, float]


Round = dict[str, Measured]


def measure(variants: Sequence[Variant], rounds: int, cpu: Cpu) -> list[Round]:
    """Run all variants in turns, after warm-up rounds that don't count; ``cpu`` returns the CPU seconds used so far."""
    results: list[Round] = []
    for number in range(-_WARM_UP, rounds):
        round_results: Round = {}
        for variant in variants:
            before, started = cpu(), time.perf_counter()
            variant.run()
            seconds, after = time.perf_counter() - started, cpu()
            cpu_seconds = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
            round_results[variant.name] = Measured(variant.name, variant.floor, variant.messages, seconds, cpu_seconds)
        if number >= 0:
            results.append(round_results)
    return results


def with_earlier_rounds(rounds: list[Round], file: Path | None) -> list[Round]:
    """Append rounds to a file, one a line, and return them with those of earlier runs."""
    if file is None:
        return rounds
    with file.open("a") as lines:
        for round_results in rounds:
            lines.write(json.dumps([vars(measured) for measured in round_results.values()]) + "\n")
    stored_rounds = [[Measured(**fields) for fields in json.loads(line)] for line in file.read_text().splitlines()]
    return [{measured.variant: measured for measured in round_results} for round_results in stored_rounds]


def format_rounds(rounds: list[Round]) -> str:
    """Format a table of medians, and of the ratios to the floor within a round with their range."""
    kinds = list(next(iter(rounds[0].values())).cpu)
    rows: list[tuple[object, ...]] = []
    for name in rounds[0]:
        measurements = [round_results[name] for round_results in rounds]
        rates = [measured.messages / measured.seconds for measured in measurements]
        floors = [round_results[round_results[name].floor] for round_results in rounds]
        ratios = sorted(rate / (floor.messages / floor.seconds) for rate, floor in zip(rates, floors, strict=True))
        costs = [
            statistics.median(measured.cpu[kind] / measured.messages * 1e6 for measured in measurements)
            for kind in kinds
        ]
        rows.append(
            (
                name,
                f"{measurements[0].messages:,}",
                f"{statistics.median(measured.seconds for measured in measurements):.2f}",
                f"{statistics.median(rates):,.0f}",
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                *(f"{cost:.2f}" for cost in costs),
            )
        )
    head = ("variant", "messages", "s", "messages/s", "of the floor", *(f"µs {kind}" for kind in kinds))
    return f"{len(rounds)} rounds; µs of CPU per message\n{text_table(head, rows)}"
