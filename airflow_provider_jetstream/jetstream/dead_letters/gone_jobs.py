"""Decides what a job is that has entries in the dead letter queue and isn't stored any more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.ack_metrics import AckMetrics
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


@dataclass(frozen=True, slots=True)
class GoneJobs:
    """Decides about the jobs of one queue.

    :param metrics: the ack metrics of jobs that are gone
    :param vanished: whether a job that vanished counts as a dead letter
    """

    snapshot: QueueSnapshot
    metrics: AckMetrics
    vanished: bool

    async def status(self, message: StoredMessage | None, death: Death, kinds: Collection[EntryKind]) -> Status | None:
        """Return the status of a job that is gone; ``None`` where it is a dead letter."""
        # A worker that gives up an expired job terminates it. Where only the server reports the deletion, the report
        # may be wrong.
        if (
            death.reason == Reason.EXPIRED
            and EntryKind.DELETION in kinds
            and not {EntryKind.PROVEN_COPY, EntryKind.TERMINATION} & set(kinds)
        ):
            if message is None:
                return Status.LOST if await self._may_have_expired(death) else Status.SPURIOUS
            return None if await self._has_expired(message, death) else Status.SPURIOUS
        # A worker stores its record before it terminates the job, and may have been stopped in between: another one may
        # have finished the job since.
        is_proved = bool({EntryKind.TERMINATION, EntryKind.PROVEN_COPY} & set(kinds))
        if death.reason in (Reason.TERMINATED, Reason.EXPIRED) and is_proved:
            return Status.LOST if message is None else None
        if message is None:
            return Status.GONE
        if not self.vanished:
            return Status.VANISHED
        # A job that was acknowledged would run a second time.
        return Status.COMPLETED if await self.metrics.is_acknowledged(death.sequence) else None

    async def _has_expired(self, message: StoredMessage, death: Death) -> bool:
        max_age = self.snapshot.max_age
        if self.snapshot.config.get("allow_msg_ttl") and (ttl := message.header("Nats-TTL")):
            with suppress(ValueError, OverflowError):
                nanoseconds = 0 if ttl == "never" else parse_duration(f"{ttl}s" if ttl.isdecimal() else ttl)
                max_age = timedelta(microseconds=nanoseconds / 1_000)
        # A difference: the sum may be later than any time.
        if not message.time or max_age <= timedelta() or death.died_at - message.stored_at < max_age:
            return False
        return not await self.metrics.is_acknowledged(death.sequence)

    async def _may_have_expired(self, death: Death) -> bool:
        """Return whether a job without a copy may have expired; its copy in the archive expires as well."""
        max_age = self.snapshot.max_age
        by_age = max_age > timedelta() and death.died_at - self.snapshot.created_at >= max_age
        by_ttl = bool(self.snapshot.config.get("allow_msg_ttl"))
        return (by_age or by_ttl) and not await self.metrics.is_acknowledged(death.sequence)
