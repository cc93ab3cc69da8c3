"""A consumer of a work queue as of one moment, and what its numbers prove about its jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.queue.finding import Finding

# Redrives in place and counts under a pause pause a consumer for less at a time.
_BRIEF_PAUSE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a moment without open deliveries has proved about a consumer; holds until the consumer is reset.

    :param sequence: the sequence up to which every stored job of the consumer was dead
    :param at: when, by the server's clock
    """

    sequence: int
    at: datetime


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer as of one moment.

    :param name: its name
    :param created: when it was created
    :param filters: its filter subjects
    :param max_ack_wait: the longest time that the server waits for an acknowledgement
    :param delivered: the highest stream sequence that it delivered
    :param ack_floor: the stream sequence up to which every delivery ended
    :param pending: jobs that it has yet to deliver for the first time
    :param in_flight: deliveries that haven't ended (``num_ack_pending``)
    :param stored: stored jobs that its filters match
    :param dead: stored jobs that it will never deliver again; ``None`` where it was too busy to be counted
    :param last_active: when it last delivered a job, or ``taken_at`` where the server doesn't know
    :param taken_at: when this was so, by the server's clock as the other times
    :param stalled: a clause that says why the server doesn't look at its open deliveries; empty where it does, or will
        within a minute
    :param resumes_in: for how long a pause lasts that is about to end by itself; zero without one
    :param held_above: the sequence above which jobs that are done may be stored still, since a stream that sources the
        queue has yet to acknowledge them; ``None`` where there is none
    :param up_since: since when the server that keeps its state certainly hasn't restarted; ``None`` where unknown
    :param clustered: whether another server may come to keep its state
    :param settlement: what a count under a pause has proved
    :param deliveries: how often it delivered a job since it was created or reset
    :param sample_freq: the share of acknowledgements that the server reports, in its own form
    :param findings: what its fields mean for its jobs
    :param config: its configuration, as the server returns it
    """

    name: str
    created: datetime
    filters: tuple[str, ...]
    max_ack_wait: timedelta
    delivered: int
    ack_floor: int
    pending: int
    in_flight: int
    stored: int
    dead: int | None
    last_active: datetime
    taken_at: datetime
    stalled: str = ""
    resumes_in: timedelta = timedelta()
    held_above: int | None = None
    up_since: datetime | None = None
    clustered: bool = False
    settlement: Settlement | None = None
    deliveries: int = 0
    sample_freq: str = ""
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> tuple[object, ...]:
        """A fingerprint: a number changes whenever a job of the consumer is stored, delivered, settled or removed."""
        return (self.created, self.delivered, self.deliveries, self.pending, self.in_flight, self.stored, self.dead)

    @property
    def undecided(self) -> int:
        """The number of open deliveries that may have used up ``max_deliver`` before the server checked."""
        return self.in_flight if self.stalled else 0

    @property
    def settled(self) -> int:
        """The sequence up to which every stored job of the consumer is dead."""
        settled = settled_sequence(self.delivered, self.ack_floor, self.in_flight, self.held_above)
        return max(settled, self.settlement.sequence) if self.settlement else settled

    def may_have_open(self, sequence: int) -> bool:
        """Return whether one of the open deliveries may be the delivery of a stored job."""
        return self.in_flight > 0 and sequence <= self.delivered

    def proves_death(self, sequence: int, *, has_evidence: bool, requeued_at: datetime | None = None) -> bool:
        """Return whether the consumer will never again deliver a job that is still stored.

        At or below the settled sequence the numbers alone prove the death, with or without an entry. Above it, while
        other jobs are in flight, only evidence does, and only for a job that was delivered.

        :param sequence: the job's stream sequence
        :param has_evidence: whether an entry proves a death of this very message: newer than the message, its consumer,
            the last requeue in place and ``up_since``, and of a consumer whose numbers agree with the entries
        :param requeued_at: when the job was last requeued in place, if it was
        """
        if self.settlement and requeued_at and requeued_at >= self.settlement.at:
            return replace(self, settlement=None).proves_death(sequence, has_evidence=has_evidence)
        return bool(are_dead(sequence, settled=self.settled, delivered=self.delivered, has_evidence=has_evidence))

    def believes(self, recorded_at: datetime) -> bool:
        """Return whether a death of this time still holds, as far as restarts of the server go.

        A server that is killed right after it published a death has forgotten it when it is back: it delivers the job
        again. Measured with a kill -9: 90 to 100 of 100. Where it isn't known when the server started, or another one
        took over, every death is believed whose consumer has as many dead jobs as entries.
        """
        return self.up_since is None or recorded_at >= self.up_since


def are_dead(sequences: Any, *, settled: Any, delivered: Any, has_evidence: Any) -> Any:
    """Return whether consumers will never again deliver stored jobs, of one job or of columns.

    :param sequences: the jobs' stream sequences
    :param settled: up to which sequence every stored job of its consumer is dead
    :param delivered: the highest sequence that its consumer delivered
    :param has_evidence: as of :meth:`ConsumerState.proves_death`
    """
    return (sequences <= settled) | (has_evidence & (sequences <= delivered))


def settled_sequence(delivered: int, ack_floor: int, in_flight: int, held_above: int | None = None) -> int:
    """Return the sequence up to which a consumer delivers nothing any more, as the numbers of CONSUMER.INFO prove it.

    A job that is stored at or below this sequence is dead: the consumer has passed the job, and no delivery of it is
    open. While deliveries are open only the ack floor proves that.

    :param delivered: the highest stream sequence that the consumer delivered
    :param ack_floor: the stream sequence up to which every delivery ended
    :param in_flight: deliveries that haven't ended (``num_ack_pending``)
    :param held_above: the sequence above which jobs that are done may be stored still, if there is one
    """
    settled = ack_floor if in_flight else delivered
    return settled if held_above is None else min(settled, held_above)


def filter_subjects(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the filter subjects of a consumer's configuration; ``>`` where it has none."""
    return tuple(config.get("filter_subjects") or [config.get("filter_subject") or ">"])


def consumer_state(info: Mapping[str, Any], stored: int, dead: int | None, held_above: int | None) -> ConsumerState:
    """Read a consumer's state from the server's CONSUMER.INFO.

    :param stored: stored jobs that its filters match
    :param dead: how many of them it will never deliver again; ``None`` where that couldn't be counted
    :param held_above: the sequence above which jobs that are done may be stored still, if there is one
    """
    config, taken_at = info["config"], datetime.fromisoformat(info["ts"])
    last_active, cluster = info["delivered"].get("last_active"), info.get("cluster") or {}
    max_ack_wait = max([config.get("ack_wait", 0), *(config.get("backoff") or [])])
    return ConsumerState(
        name=info["name"],
        created=datetime.fromisoformat(info["created"]),
        filters=filter_subjects(config),
        max_ack_wait=timedelta(microseconds=max_ack_wait / 1_000),
        delivered=info["delivered"]["stream_seq"],
        ack_floor=info["ack_floor"]["stream_seq"],
        pending=info["num_pending"],
        in_flight=info["num_ack_pending"],
        stored=stored,
        dead=dead,
        last_active=datetime.fromisoformat(last_active) if last_active else taken_at,
        taken_at=taken_at,
        stalled=_why_stalled(info),
        resumes_in=_resumes_in(info),
        held_above=held_above,
        # Since 2.12. Another server that takes over may not have what the last one did just before.
        up_since=datetime.fromisoformat(cluster["leader_since"]) if "leader_since" in cluster else None,
        deliveries=info["delivered"]["consumer_seq"],
        clustered=bool(cluster.get("name")),
        sample_freq=config.get("sample_freq") or "",
        findings=field_findings("consumer", info, "scan", name=info["name"], queue=info["stream_name"]),
        config=config,
    )


def _why_stalled(info: Mapping[str, Any]) -> str:
    """Return why the server doesn't check whether a consumer's jobs have used up their deliveries.

    It checks before it delivers: not for a paused consumer, and not for a push consumer without a subscriber.
    """
    config = info["config"]
    if config.get("max_deliver", -1) <= 0:
        return ""
    if info.get("paused") and not _resumes_in(info):
        return f"is paused until {config['pause_until']}" if config.get("pause_until") else "is paused"
    if config.get("deliver_subject") and not info.get("push_bound"):
        return f"delivers to {config['deliver_subject']}, to which nobody subscribes"
    return ""


def _resumes_in(info: Mapping[str, Any]) -> timedelta:
    """Return the rest of a pause that is no longer than this package's own pauses; zero without such a pause."""
    left = timedelta(microseconds=(info.get("pause_remaining") or 0) / 1_000) if info.get("paused") else timedelta()
    return left if left <= _BRIEF_PAUSE else timedelta()
