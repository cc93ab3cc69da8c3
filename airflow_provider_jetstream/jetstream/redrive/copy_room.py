"""Finds how many copies a queue, and how many parked letters a dead letter queue, stores without dropping anything.

A stream that discards its oldest messages drops live jobs, or other letters, for what a redrive stores, and says
nothing. The room is computed from what will be stored, on the stream's state just before: what somebody else stores at
the same moment isn't counted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.streams import next_message
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import parked_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.queue.stream_config import (
    StreamRoom,
    eviction_limits,
    per_subject_limit,
    stored_size,
)
from airflow_provider_jetstream.jetstream.redrive.redriven_job import parked_headers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.redrive.redriven_job import RedrivenJob

# Why each letter has no room, by its sequence.
NoRoom: TypeAlias = dict[int, str]

_ADVICE = "raise the limit, declare discard new, or redrive all letters in place; original kept"


class CopyRoom:
    """The free room of each stream in which a redrive stores.

    :param config: the configuration on the server of the queue that gets the new jobs
    :param letters_config: the dead letter queue's, if it is known
    """

    def __init__(
        self, connection: Connection, config: Mapping[str, Any], letters_config: Mapping[str, Any] | None
    ) -> None:
        self._connection = connection
        self._config = config
        self._letters_config = letters_config or {}

    async def for_copies(self, jobs: Sequence[RedrivenJob]) -> NoRoom:
        """Return the copies that have no room now; once one hasn't, those after it wait as well.

        :param jobs: the copies in the order in which they are stored
        """
        no_room: NoRoom = {}
        queue = self._config["name"]
        if jobs and eviction_limits(self._config):
            room = StreamRoom.of(await stream_info(self._connection, queue))
            problem = ""
            for job in jobs:
                size = _copy_size(job)
                problem = problem or room.problem(1, size)
                if problem:
                    no_room[job.letter.sequence] = _no_room(queue, job.letter, problem)
                else:
                    room.take(1, size)
        if jobs and (limit := per_subject_limit(self._config)):
            no_room |= await self._beyond_subjects(jobs, limit)
        return no_room

    async def for_parked(self, letters: Sequence[DeadLetter], why: Mapping[int, str]) -> NoRoom:
        """Return the letters that can't be parked now.

        :param why: the reasons with which they are to be parked
        """
        if not letters or not self._letters_config:
            return {}
        name = self._letters_config["name"]
        if self._letters_config["retention"] == "interest":
            problem = (
                f"expected limits or workqueue retention of {name} for a parked letter, found interest: it stores"
                " nothing that no consumer takes; original kept"
            )
            return {letter.sequence: problem for letter in letters}
        if not eviction_limits(self._letters_config):
            return {}
        room = StreamRoom.of(await stream_info(self._connection, name))
        no_room: NoRoom = {}
        for letter in letters:
            size = _parked_size(letter, why[letter.sequence])
            if problem := room.problem(1, size):
                no_room[letter.sequence] = (
                    f"{name} has no room for the parked letter {letter.sequence} ({problem}): it would drop its oldest"
                    " entries for it; raise the limit; original kept"
                )
            else:
                room.take(1, size)
        return no_room

    async def _beyond_subjects(self, jobs: Sequence[RedrivenJob], limit: int) -> NoRoom:
        no_room: NoRoom = {}
        stored: Counter[str] = Counter()
        queue = self._config["name"]
        for subject in dict.fromkeys(job.subject for job in jobs):
            async for name, count in subject_counts(self._connection, queue, subject):
                stored[name] += count
        for job in jobs:
            letter, count = job.letter, stored[job.subject]
            if job.subject != (shown := readable_text(job.subject)):
                # JSON has no such subject, so the server can't be asked for it.
                problem = f"max_msgs_per_subject {limit}, and {shown} isn't UTF-8: its jobs can't be counted"
                no_room[letter.sequence] = _no_room(queue, letter, problem)
            elif count < limit or (count == limit and await self._is_oldest(letter, job.subject)):
                # The next copy of the subject would drop another job.
                stored[job.subject] += 1
            else:
                problem = f"max_msgs_per_subject {limit}, {count} on {job.subject}, 1 needed"
                no_room[letter.sequence] = _no_room(queue, letter, problem)
        return no_room

    async def _is_oldest(self, letter: DeadLetter, subject: str) -> bool:
        """Return whether the job that a copy on a subject would drop is the letter's own original."""
        oldest = await next_message(self._connection, self._config["name"], 1, subject)
        is_stored_there = letter.source == BodySource.QUEUE and letter.death.stream == self._config["name"]
        return is_stored_there and oldest is not None and oldest.sequence == letter.sequence


def _copy_size(job: RedrivenJob) -> int:
    return stored_size(job.subject, job.headers, job.content.body)


def take_room(room: StreamRoom, job: RedrivenJob) -> None:
    """Count a copy in a queue's room, and its original as removed.

    :raises RedriveError: the queue would drop a job for it
    """
    letter = job.letter
    size = _copy_size(job)
    if problem := room.problem(1, size):
        raise RedriveError(_no_room(job.stream, letter, problem))
    room.take(1, size)
    if letter.source == BodySource.QUEUE and letter.death.stream == job.stream:
        room.take(-1, -stored_size(letter.subject, Headers(letter.headers), letter.body))


def require_room_for_all(
    snapshot: QueueSnapshot, letters: int, largest: int, dead_letter_queue: str | None = None
) -> None:
    """Refuse a redrive by several processes where copies may not fit: no process knows what the others store.

    :param letters: how many copies there may be
    :param largest: the largest message that the server accepts
    :param dead_letter_queue: the dead letter queue, where letters may be parked
    :raises RedriveRequestError: the queue might drop jobs for the copies, or the dead letter queue entries
    """
    config = snapshot.config
    if limit := per_subject_limit(config):
        raise RedriveRequestError(
            f"expected a queue without max_msgs_per_subject for a bulk redrive, found {limit} on {snapshot.queue}:"
            " copies would drop jobs of their subjects; redrive without Spark"
        )
    rooms = [StreamRoom(config, snapshot.state["messages"], snapshot.state["bytes"])]
    if dead_letter_queue and (info := snapshot.companions.get(dead_letter_queue)):
        rooms.append(StreamRoom.of(info))
    for room in rooms:
        limit = room.config.get("max_msg_size", -1)
        size = limit if 0 < limit < largest else largest
        if problem := room.problem(letters, letters * size):
            raise RedriveRequestError(
                f"expected room for the copies of up to {letters} letters, found otherwise ({problem}):"
                f" {room.config['name']} would drop its oldest messages for them; redrive without Spark, which stores"
                " as many as fit, or raise the limit"
            )


def _no_room(queue: str, letter: DeadLetter, problem: str) -> str:
    return f"{queue} has no room for the copy of {letter.sequence} ({problem}): it would drop live jobs; {_ADVICE}"


def _parked_size(letter: DeadLetter, why: str) -> int:
    death = letter.death
    headers = parked_headers(letter, why)
    return stored_size(parked_subject(death.stream, death.consumer, death.sequence), headers, letter.body)
