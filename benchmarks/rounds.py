"""Ways of doing the same thing, measured in turns: each way once a round, against the floor of that very round."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.text_table import text_table

# The JVM compiles what it runs often, on the same cores, for about as many rounds.
_WARM_UP = 3

Cpu = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Way:
    """A way of doing something.

    :param name: as it is shown
    :param run: does it, and raises where a count isn't what it has to be
    :param messages: how many messages it is about
    :param floor: the way that it is compared with
    """

    name: str
    run: Callable[[], object]
    messages: int
    floor: str


@dataclass(frozen=True)
class Measured:
    """What one way took in one round.

    :param way: its name
    :param floor: the way that it is compared with
    :param messages: how many messages it was about
    :param seconds: of the clock
    :param cpu: seconds of CPU by kind of process
    """

    way: str
    floor: str
    messages: int
    seconds: float
    cpu: dict[str, float]


Round = dict[str, Measured]


def measure(ways: Sequence[Way], rounds: int, cpu: Cpu) -> list[Round]:
    """Run all ways in turns, after rounds that warm up and don't count.

    :param ways: the ways
    :param rounds: how many rounds count
    :param cpu: gives the CPU seconds that were used up to now
    :return: what was measured in each round
    """
    found: list[Round] = []
    for number in range(-_WARM_UP, rounds):
        one: Round = {}
        for way in ways:
            before, begun = cpu(), time.perf_counter()
            way.run()
            took, after = time.perf_counter() - begun, cpu()
            used = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
            one[way.name] = Measured(way.name, way.floor, way.messages, took, used)
        if number >= 0:
            found.append(one)
    return found


def kept(rounds: list[Round], file: Path | None) -> list[Round]:
    """Add rounds to those of earlier runs.

    :param rounds: of this run
    :param file: where rounds are kept, one a line
    :return: all of them
    """
    if file is None:
        return rounds
    with file.open("a") as lines:
        for one in rounds:
            lines.write(json.dumps([vars(measured) for measured in one.values()]) + "\n")
    every = [[Measured(**fields) for fields in json.loads(line)] for line in file.read_text().splitlines()]
    return [{measured.way: measured for measured in one} for one in every]


def shown(rounds: list[Round]) -> str:
    """Show medians, and ratios to the floor within a round with their range.

    :param rounds: what was measured
    :return: a table
    """
    kinds = list(next(iter(rounds[0].values())).cpu)
    rows: list[tuple[object, ...]] = []
    for name in rounds[0]:
        each = [one[name] for one in rounds]
        rates = [measured.messages / measured.seconds for measured in each]
        floors = [one[one[name].floor] for one in rounds]
        ratios = sorted(rate / (floor.messages / floor.seconds) for rate, floor in zip(rates, floors, strict=True))
        costs = [statistics.median(measured.cpu[kind] / measured.messages * 1e6 for measured in each) for kind in kinds]
        rows.append(
            (
                name,
                f"{each[0].messages:,}",
                f"{statistics.median(measured.seconds for measured in each):.2f}",
                f"{statistics.median(rates):,.0f}",
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                *(f"{cost:.2f}" for cost in costs),
            )
        )
    head = ("way", "messages", "s", "messages/s", "of the floor", *(f"µs {kind}" for kind in kinds))
    return f"{len(rounds)} rounds; µs of CPU per message\n{text_table(head, rows)}"
