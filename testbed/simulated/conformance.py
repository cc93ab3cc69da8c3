"""Plays scripts on a nats-server and on the simulated one, and compares the answers."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.simulated.connection import SimulatedConnection
from testbed.simulated.loop import run_simulated
from testbed.simulated.scripts import Script, play, scripts
from testbed.simulated.server import SimulatedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream import Connection

VERSIONS: Final = ("2.15.1", "2.12.8", "2.10.27")
_AT_ONCE: Final = 24
_SHOWN: Final = 3
# Seconds that a message takes: which of two things comes first within that isn't the server's to say.
_DELAYS: Final = (0.0005, 0.005, 0.02)


@dataclass
class Comparison:
    """How a version's server and the simulated one have answered."""

    version: str
    played: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    again: int = 0
    differing: list[tuple[str, Any, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.played.items())
        return (
            f"{self.version}: {self.played.total()} scripts ({kinds}), {self.answers} answers,"
            f" {self.again} played once more, {len(self.differing)} differ"
        )

    def shown(self, most: int = _SHOWN) -> str:
        """Return the first differences as text."""
        return "\n".join(
            f"{name}\n  simulated {one}\n  real      {other}" for name, one, other in self.differing[:most]
        )


async def compare(version: str, each: int, kinds: tuple[str, ...] = ()) -> Comparison:
    """Play scripts of each kind on both.

    :param version: of the real server
    """
    comparison = Comparison(version)
    major, minor, patch = map(int, version.split("."))
    numbers = major, minor, patch
    with NatsServer(binary=nats_server_of(version)) as server:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
            chosen = [script for script in scripts(each, kinds) if script.is_for(connection.api_level)]
            simulated = await asyncio.to_thread(_simulated, numbers, chosen, _DELAYS[0])
            real: list[list[Any]] = []
            for start in range(0, len(chosen), _AT_ONCE):
                real += await asyncio.gather(*[play(connection, script) for script in chosen[start : start + _AT_ONCE]])
            results = list(zip(chosen, simulated, real, strict=True))
            for script, _, other in results:
                comparison.played[script.kind] += 1
                comparison.answers += len(other)
            unlike = [script for script, one, other in results if _difference(one, other)]
            comparison.again = len(unlike)
            again = await asyncio.gather(*[_again(connection, script) for script in unlike])
            for script, other in zip(unlike, again, strict=True):
                each_pace = [(await asyncio.to_thread(_simulated, numbers, [script], delay))[0] for delay in _DELAYS]
                differences = [_difference(one, other) for one in each_pace]
                if all(differences) and differences[0]:
                    comparison.differing.append((script.name, *differences[0]))
    return comparison


async def _again(connection: Connection, script: Script) -> list[Any]:
    for stream in ("", "-dead", "-archive", "-other"):
        await connection.api_request(f"STREAM.DELETE.{script.name}{stream}")
    return await play(connection, script)


def _difference(simulated: Sequence[Any], real: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the request whose answers differ first, and what differs in them."""
    for (request, one), (other_request, other) in zip(simulated, real, strict=False):
        if request != other_request:
            return request, other_request
        if one != other:
            parts = _unlike(one, other)
            return (request, parts[0]), parts[1]
    return None if len(simulated) == len(real) else (len(simulated), len(real))


def _unlike(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the parts of two answers that aren't the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        parts = {
            name: _unlike(one.get(name), other.get(name))
            for name in {**one, **other}
            if one.get(name) != other.get(name)
        }
        return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [_unlike(left, right) for left, right in zip(one, other, strict=True) if left != right]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return one, other


def _simulated(version: tuple[int, int, int], chosen: Sequence[Script], delay: float) -> list[list[Any]]:
    def played(script: Script) -> list[Any]:
        async def run() -> list[Any]:
            connection = SimulatedConnection(SimulatedServer(version))
            connection.delay = delay
            return await play(connection, script)

        return run_simulated(run, script.number)

    return [played(script) for script in chosen]


def main(arguments: Sequence[str]) -> int:
    """Compare: so many scripts of each kind, and then versions and kinds where not all are meant."""
    each, *names = arguments
    versions = tuple(name for name in names if name[0].isdigit()) or VERSIONS
    failed = 0
    for version in versions:
        comparison = asyncio.run(compare(version, int(each), tuple(name for name in names if not name[0].isdigit())))
        print(comparison, comparison.shown(100), sep="\n", flush=True)
        failed += len(comparison.differing)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
