"""Looks at the letters of a modelled queue from step to step, each compared with the model as a scan is."""

from dataclasses import dataclass

from queue_model import QueueModel

from airflow_provider_jetstream.jetstream import Selection, WorkQueue
from airflow_provider_jetstream.jetstream.dead_letters.find import Summary
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from testbed.face import NatsPyConnection


@dataclass
class ModelledLooks:
    """The letters of one queue as of the last look; ``looks`` and ``proofs`` count how they were found."""

    looks: int = 0
    proofs: int = 0
    _letters: TrackedLetters | None = None

    async def compare(self, connection: NatsPyConnection, queue: WorkQueue, model: QueueModel, gone: int) -> None:
        """Look, prove all letters where a look can't tell, and check the result."""
        model.lapse()
        if self._letters and await self._letters.refresh(connection):
            self.looks += 1
        else:
            self.proofs += 1
            self._letters = await TrackedLetters.prove(connection, queue)
        summary = await self._letters.summary(Selection(), ())
        model.scanned(sequences_of(summary), summary.uncertain + gone)


def sequences_of(summary: Summary) -> set[int]:
    """Return the sequences of all letters of a summary."""
    return {sequence for first, last in summary.ranges for sequence in range(first, last + 1)}
