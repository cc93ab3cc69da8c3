"""What actors and faults may use of the world that they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    import random
    from contextlib import AbstractAsyncContextManager

    from airflow_provider_jetstream.jetstream import RedriveRequest, WorkQueue
    from testbed.simulated.connection import SimulatedConnection
    from testbed.simulated.plan import Account, Plan
    from testbed.simulated.server import SimulatedServer


class Stage(Protocol):
    """A world, as far as they need it."""

    plan: Plan
    rng: random.Random
    server: SimulatedServer
    queue: WorkQueue
    account: Account
    connections: list[SimulatedConnection]
    tasks: dict[str, asyncio.Task[Any]]
    filters: dict[str, set[str]]

    @property
    def subjects(self) -> list[str]:
        """The subjects of its jobs."""

    @property
    def is_calm(self) -> bool:
        """Whether nothing is killed or cut off, and nobody is slower than the ack wait."""

    def tell(self, what: str) -> None:
        """Add to the story of the world."""

    def problem(self, text: str) -> None:
        """Note what must not be."""

    def touch(self, *bodies: str) -> None:
        """Note that something happens to bodies."""

    def connected(self) -> AbstractAsyncContextManager[SimulatedConnection]:
        """Open a connection, which a fault may cut."""

    async def redrive(self, name: str, request: RedriveRequest | None = None) -> None:
        """Redrive once."""

    def restore(self, connection: SimulatedConnection) -> None:
        """Restore a connection that was lost, if its server is there."""

    def kill(self, name: str) -> None:
        """Kill an actor and run it anew."""

    def excuse_running(self) -> None:
        """Excuse another delivery of what is running, or was done and isn't acknowledged."""

    def bodies_done_twice_if_back(self) -> set[str]:
        """Return the bodies that are stored, and running or done."""

    def bodies_stored(self) -> set[str]:
        """Return the bodies of which the server has a copy."""
