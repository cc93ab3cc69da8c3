"""Copies the bodies of dead letters into the dead letter queue, since the server may still lose them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, pause_if_due
from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, confirmed_once, store, store_each
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import copy_filter, copy_subject
from airflow_provider_jetstream.jetstream.dead_letters.record import SCAN, is_copy_of, record_headers
from airflow_provider_jetstream.jetstream.dead_letters.stored_copies import StoredCopies
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.queue.stream_config import StreamRoom, eviction_limits, stored_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

log = logging.getLogger(__name__)

# Before other tasks of the event loop may run.
_MADE_AT_ONCE = 16


class BodyPreserver:
    """Copies the bodies of dead letters into the dead letter queue.

    :param scan: the scan that finds the letters
    """

    def __init__(self, connection: Connection, scan: Scan) -> None:
        self._connection = connection
        self._scan = scan
        config = scan.context.dead_letter_queue["config"]
        captured = covered_by_any(config.get("subjects") or [], copy_filter(scan.queue.name))
        # Interest retention deletes at once a message that no consumer takes.
        self._is_possible = captured and config["retention"] != "interest"
        largest = config.get("max_msg_size", -1)
        self._max_size = min(connection.max_payload, largest) if largest > 0 else connection.max_payload
        self.preserved = 0
        self.copies = StoredCopies()
        self.not_preserved = 0

    def continue_with(self, scan: Scan) -> None:
        """Go on with a later scan of the same queue."""
        self._scan = scan

    async def preserve(self, letters: Sequence[DeadLetter]) -> None:
        """Copy the bodies that have no copy yet.

        :param letters: letters of the scan
        """
        all_new = [letter for letter in letters if not letter.preserved]
        new = await self._with_room(all_new) if self._is_possible else []
        self.not_preserved += len(all_new) - len(new)
        copied = sum(
            [await self._copy(new[start : start + MAX_CONCURRENT]) for start in range(0, len(new), MAX_CONCURRENT)]
        )
        self.preserved += copied
        self.not_preserved += len(new) - copied

    async def _with_room(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Return the letters whose copies make the dead letter queue drop none of its entries."""
        if not letters or not eviction_limits(self._scan.context.dead_letter_queue["config"]):
            return list(letters)
        room = StreamRoom.of(await stream_info(self._connection, self._scan.dead_letter_queue))
        fitting: list[DeadLetter] = []
        for letter in letters:
            subject = copy_subject(letter.death.stream, None, letter.death.sequence)
            size = stored_size(subject, self._fitting_headers(letter) or {}, letter.body)
            if not room.problem(1, size):
                room.take(1, size)
                fitting.append(letter)
        return fitting

    async def _copy(self, letters: Sequence[DeadLetter]) -> int:
        """Copy letters at once; return how many copies the dead letter queue has stored."""
        messages: list[tuple[str, bytes]] = []
        fitting: list[tuple[DeadLetter, Headers]] = []
        for number, letter in enumerate(letters):
            if number % _MADE_AT_ONCE == 0:
                await pause_if_due()
            if (headers := self._fitting_headers(letter)) is None:
                log.warning("%s is too large to be stored with the headers that describe its death", letter.job_id)
                continue
            death = letter.death
            messages.append((copy_subject(death.stream, None, death.sequence), letter.body))
            fitting.append((letter, headers))
        copied = 0
        acks = await store_each(self._connection, messages, [headers for _, headers in fitting]) if messages else []
        for (letter, headers), (subject, _), ack in zip(fitting, messages, acks, strict=True):
            stored = await self._stored_anew(letter, subject, headers, ack)
            if isinstance(stored, PubAck):
                copied += stored.stream == self._scan.dead_letter_queue
                self._note(letter, stored)
            else:
                log.warning("The body of dead letter %s couldn't be copied: %s", letter.job_id, stored)
        return copied

    def _note(self, letter: DeadLetter, ack: PubAck) -> None:
        if ack.stream == self._scan.dead_letter_queue and not ack.duplicate:
            self.copies.add(ack.sequence, letter)

    async def _stored_anew(
        self, letter: DeadLetter, subject: str, headers: Headers, ack: PubAck | ApiError | TransientError
    ) -> PubAck | ApiError | TransientError:
        """Return the acknowledgement of a copy, stored once more where another message of its id was stored before."""
        if not isinstance(ack, PubAck):
            return ack
        is_own = partial(is_copy_of, letter.death, letter.body)
        send = partial(store, self._connection, subject, letter.body)
        try:
            return await confirmed_once(self._connection, ack, subject, headers, is_own, send)
        except (ApiError, TransientError) as error:
            return error

    def _fitting_headers(self, letter: DeadLetter) -> Headers | None:
        """Return the headers of a letter's record, without the origin where only that fits; ``None`` where none fit."""
        for origin in dict.fromkeys((letter.origin, None)):
            headers = record_headers(
                letter.death,
                subject=letter.subject,
                time=letter.time,
                headers=letter.headers,
                writer=SCAN,
                origin=origin,
            )
            if len(letter.body) + wire_size(headers) <= self._max_size:
                return headers
        return None
