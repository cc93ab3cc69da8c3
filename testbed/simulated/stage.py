"""What actors and faults use of the world that they are in."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream import RedriveRequest, WorkQueue, redrive_dead_letters
from testbed.simulated.connection import SimulatedConnection
from testbed.simulated.plan import Account, Plan
from testbed.simulated.streams import header

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterable

    from testbed.simulated.loop import Draws
    from testbed.simulated.server import SimulatedServer

QUEUE: Final = "q"
SUBJECTS: Final = ("a", "b", "c")


@dataclass
class Stage:
    """The state of a world, and what happens on it."""

    plan: Plan
    draws: Draws
    server: SimulatedServer
    queue: WorkQueue
    account: Account = field(default_factory=Account)
    connections: list[SimulatedConnection] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    filters: dict[str, set[str]] = field(default_factory=dict)
    settling: bool = False
    story: list[str] = field(default_factory=list)

    def tell(self, what: str) -> None:
        """Add to the story of the world."""
        self.story.append(f"{self.server.loop.time():9.4f} {what}")

    def problem(self, text: str) -> None:
        """Note what must not be."""
        if text not in self.account.problems:
            self.tell(f"PROBLEM: {text}")
            self.account.problems.append(text)

    @property
    def subjects(self) -> list[str]:
        """The subjects of its jobs."""
        return [f"{QUEUE}.jobs.{token}" for token in SUBJECTS]

    @property
    def is_calm(self) -> bool:
        """Whether nothing is killed or cut off, and nobody is slower than the ack wait."""
        return not self.plan.faults and not self.plan.outlasts

    def touch(self, *bodies: str) -> None:
        """Note that something happens to bodies."""
        self.account.touched |= dict.fromkeys(bodies, self.server.now())

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[SimulatedConnection]:
        """Open a connection, which a fault may cut."""
        connection = SimulatedConnection(self.server)
        if not self.server.is_up:
            connection.lose()
        self.connections.append(connection)
        try:
            yield connection
        finally:
            connection.close()
            self.connections.remove(connection)

    def restore(self, connection: SimulatedConnection) -> None:
        """Restore a connection that was lost, if its server is there."""
        if not connection.is_closed and not connection.is_connected and self.server.is_up:
            connection.restore()

    def excuse_running(self) -> None:
        """Excuse another delivery of what is running, or was done and isn't acknowledged."""
        self.account.excuse({body for body, count in self.account.running.items() if count > 0})
        self.account.excuse(self.bodies_done_twice_if_back())

    def bodies_done_twice_if_back(self) -> set[str]:
        """Return the bodies that are stored, and running or done."""
        return {body for body in self._bodies_in(QUEUE) if self.account.done[body] or self.account.running[body] > 0}

    def bodies_stored(self) -> set[str]:
        """Return the bodies of which the server has a copy."""
        return self._bodies_in(QUEUE) | self._bodies_in(f"{QUEUE}-archive") | self._bodies_in(f"{QUEUE}-dead")

    def copies_of(self, sequence: int) -> set[bytes]:
        """Return the bodies that the archive has of jobs of a sequence."""
        copies = self.server.streams[f"{QUEUE}-archive"].messages.values()
        return {copy.data for copy in copies if header(copy.headers, "Nats-Sequence") == str(sequence)}

    def _bodies_in(self, stream: str) -> set[str]:
        found = self.server.streams.get(stream)
        return {message.data.decode("utf-8", "replace") for message in found.messages.values()} if found else set()

    def kill(self, name: str) -> None:
        """Kill an actor and run it anew."""
        raise NotImplementedError

    @property
    def died(self) -> frozenset[tuple[int, bytes]]:
        """The jobs that have died, by their sequences and bodies."""
        return frozenset(self.server.streams[QUEUE].died)

    def check_death(
        self, sequence: int, what: str, died: frozenset[tuple[int, bytes]], body: bytes | None = None
    ) -> None:
        """Check that what is called dead has died: the job of this body, where it is known."""
        bodies = {data for job, data in died | self.died if job == sequence}
        if "power" in self.plan.kinds and body not in bodies and bodies.isdisjoint(copies := self.copies_of(sequence)):
            # Of the job that died losses of power have left nothing, but a copy of the one before.
            bodies |= copies
        if sequence not in self.account.passed and not (bodies if body is None else body in bodies):
            self.problem(f"{sequence}{f' ({body.decode()})' if body else ''} is {what}, and never died")

    def letter_actions(self) -> dict[int, list[str]]:
        """Return what the audit says was done to each letter, in order."""
        found: dict[int, list[str]] = {}
        prefix = f"audit.{QUEUE}.letters."
        for message in self.server.streams[f"{QUEUE}-audit"].messages.values():
            if message.subject.startswith(prefix):
                sequence = int(message.subject.removeprefix(prefix))
                found.setdefault(sequence, []).append(json.loads(message.data)["action"])
        return found

    @property
    def discarded(self) -> set[int]:
        """The sequences of the letters that are discarded at this moment."""
        if not self.plan.tidiers:
            return set()
        return {sequence for sequence, actions in self.letter_actions().items() if actions[-1] == "discarded"}

    def check_discarded(self, sequences: Iterable[int], before: set[int], what: str) -> None:
        """Check that none of some jobs is one that was discarded before, and still is."""
        if before and (both := sorted(before & self.discarded & set(sequences))):
            self.problem(f"{both} are {what}, and are discarded")

    async def redrive(self, name: str, request: RedriveRequest | None = None, changes: int | None = None) -> None:
        """Redrive once.

        :param changes: after how many changes it is killed
        """
        died = self.died
        async with self.connected() as connection:
            connection.changes_left = changes
            report = await redrive_dead_letters(connection, self.queue, request or RedriveRequest())
        self.account.counts["redrives"] += 1
        self.tell(
            f"{name} redrives {dict(report.redriven)}, parked {list(report.parked)}, discarded"
            f" {list(report.discarded)}, failed {report.failed}, by {report.protocol.value}"
        )
        if request is None:
            for sequence in report.redriven:
                self.check_death(sequence, "redriven", died)
