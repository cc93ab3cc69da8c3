"""What a watcher has reported, kept while the watcher is recreated.

Airflow runs a watcher from its beginning after each restart of the triggerer and each change of its DAG. In one process
the state is in memory; from Airflow 3.3 on, the store of the watched asset keeps it beyond the process. It is stored
there some time after the event: Airflow doesn't say when it has stored an event, and an event that is lost with the
triggerer must be reported again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.letter_arrivals import ReportedLetters

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

# Airflow stores an event within some seconds; one that is older is stored, or lost with its process.
STORED_AFTER = 30.0
# What doesn't fit is forgotten, and reported once more after a restart.
_LARGEST_STATE = 60_000
_MOST_WATCHERS = 10_000

_reported: dict[str, ReportedLetters] = {}


class ReportedStore:
    """Keeps what one watcher has reported.

    :param criteria: the arguments that make up the watcher; another one of the same asset has a state of its own
    :param assets: the store of the watched asset, if Airflow has one
    """

    def __init__(self, criteria: Mapping[str, Any], assets: Any) -> None:
        self._key = hashlib.sha256(json.dumps(criteria, sort_keys=True).encode()).hexdigest()[:24]
        self._assets = assets
        self._saving: asyncio.Task[None] | None = None

    async def load(self) -> ReportedLetters:
        """Return what was reported; nothing where that isn't known."""
        if known := _reported.get(self._key):
            return known
        if self._assets is None:
            return ReportedLetters()
        try:
            return ReportedLetters.of_json(await self._assets.aget(self._name))
        except Exception as error:  # noqa: BLE001 - what Airflow raises for a store of several assets, or one that is away
            log.info("What was reported isn't known, so all letters are reported once more: %s", error)
            return ReportedLetters()

    def keep(self, reported: ReportedLetters) -> None:
        """Keep what is reported from now on."""
        if len(_reported) >= _MOST_WATCHERS:
            _reported.pop(next(iter(_reported)))
        _reported[self._key] = reported
        if self._assets is not None:
            self.close()
            self._saving = asyncio.create_task(self._save(reported))

    def close(self) -> None:
        """Forget what isn't stored yet."""
        if self._saving:
            self._saving.cancel()

    @property
    def _name(self) -> str:
        return f"jetstream_reported_{self._key}"

    async def _save(self, reported: ReportedLetters) -> None:
        await asyncio.sleep(STORED_AFTER)
        state = reported.as_json()
        if len(state["sequences"]) > _LARGEST_STATE or not reported.sequences.is_storable:
            log.warning("The letters reported are too scattered to be stored: a new triggerer reports them once more")
            return
        try:
            await self._assets.aset(self._name, state)
        except Exception as error:  # noqa: BLE001 - whatever Airflow raises: the watcher itself goes on
            log.info("What was reported isn't stored, so a new triggerer reports it once more: %s", error)
