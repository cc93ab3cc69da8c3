"""Looking once, and holding all that is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.verdicts import Dismissal
    from airflow_provider_jetstream.jetstream.queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at a queue found, all of it at once; see :class:`Scan` for many letters.

    :param letters: dead letters, in the order of the jobs
    :param dismissed: what the dead letter queue holds about other jobs
    :param uncertain: how many more dead letters there are that can't be told yet
    :param undeliverable: how many jobs no consumer takes
    :param risks: what could be lost as things are, a sentence each
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[Dismissal, ...]
    uncertain: int
    undeliverable: int
    risks: tuple[str, ...]


async def find_dead_letters(connection: Connection, queue: WorkQueue, selection: Selection | None = None) -> Findings:
    """Look once, and hold everything that is found.

    :param connection: the server
    :param queue: the work queue
    :param selection: which dead letters; all in circulation where absent
    :return: dead letters, and what else the dead letter queue holds
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    chosen = selection or Selection()
    scan = await Scan.begin(connection, queue, vanished=chosen.vanished)
    letters: list[DeadLetter] = []
    dismissed: list[Dismissal] = []
    async for page in scan.pages(chosen):
        letters += page.letters
        dismissed += page.dismissed
    return Findings(tuple(letters), tuple(dismissed), scan.reckoning.uncertain, scan.undeliverable, scan.risks)
