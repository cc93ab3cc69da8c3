"""The preconditions under which a queue's numbers and entries say which of its jobs are dead.

Every scan, wait and redrive checks them with the queue as it is on the server, whoever configured it. What it
finds is the same everywhere: a refusal where nothing that was found could be relied on, a restriction where something
isn't possible or isn't known, a risk where something could be lost.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter, entry_copies_filter, parked_filter
from airflow_provider_jetstream.jetstream.errors import UnsuitableQueueError
from airflow_provider_jetstream.jetstream.queue.finding import Finding, Refusal, Restriction, Risk
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import undeclared_changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


def require_no_refusal(queue: str, findings: Iterable[Finding]) -> None:
    """Raise if a queue can't be used.

    :raises UnsuitableQueueError: there is a refusal among the findings
    """
    if refusals := [finding for finding in findings if isinstance(finding, Refusal)]:
        raise UnsuitableQueueError(f"{queue} can't be used as a work queue: {'; '.join(refusals)}")


def queue_findings(
    snapshot: QueueSnapshot,
    queue: WorkQueue,
    *,
    handlers: Sequence[str] = (),
    unreadable: int = 0,
    other_domain: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """Return everything that is to be known of a queue before its letters are believed and changed.

    :param snapshot: the queue on the server, with its dead letter queue
    :param queue: the declaration
    :param handlers: the consumers of the dead letter queue that remove entries by acknowledging them
    :param unreadable: entries of the dead letter queue that don't state which job they are about
    :param other_domain: by consumer the entries of it that another JetStream domain's server has published
    """
    findings: list[Finding] = [*field_findings("queue", snapshot.info, "scan")]
    for companion in queue.companions():
        if info := snapshot.companions.get(companion.name):
            findings += field_findings(queue.companion_kind(companion), info, "scan", queue=snapshot.queue)
    for consumer in snapshot.consumers.values():
        findings += consumer.findings
    findings += _queue_restrictions(snapshot)
    findings += _queue_risks(snapshot, queue)
    findings += filter(None, _changes(snapshot, queue).values())
    if queue.dead_letters and (letters := snapshot.companions.get(queue.dead_letters.name)):
        findings += _capture_risks(snapshot.queue, letters["config"])
        findings += _entry_findings(snapshot, letters["config"]["name"], unreadable, other_domain)
        if handlers and not _copies_entries(snapshot, queue, letters["config"]):
            findings.append(
                Risk(
                    "no-entry-copies",
                    f"{letters['config']['name']} has a handler ({', '.join(handlers)}) and keeps no copies of its"
                    " entries: which letters it has handled isn't known; provision the queue again, with an audit",
                )
            )
    return tuple(findings)


def _changes(snapshot: QueueSnapshot, queue: WorkQueue) -> Mapping[str, Risk | None]:
    own = {"config": snapshot.config, "created": snapshot.created}
    consumers = {
        name: {"config": consumer.config, "created": consumer.created.isoformat()}
        for name, consumer in snapshot.consumers.items()
        if consumer.config
    }
    return undeclared_changes(queue, {snapshot.queue: own, **snapshot.companions}, consumers)


def _queue_restrictions(snapshot: QueueSnapshot) -> Iterator[Restriction]:
    queue = snapshot.queue
    for consumer in snapshot.consumers.values():
        if consumer.undecided:
            yield Restriction(
                "stalled-consumer",
                f"consumer {consumer.name} of {queue} {consumer.stalled}: the server looks at none of its"
                f" {consumer.undecided} open deliveries, each of which may have been a job's last, so these jobs count"
                " as uncertain",
            )
        if consumer.in_flight and consumer.resumes_in:
            yield Restriction(
                "briefly-paused-consumer",
                f"consumer {consumer.name} of {queue} is paused for {consumer.resumes_in.total_seconds():.0f} s more,"
                " as by a redrive in place or a count under a pause: which of its"
                f" {consumer.in_flight} open deliveries were the last ones of their jobs is known once it"
                " resumes; look again then",
            )
    for name, in_flight in snapshot.paused_count.incomplete.items() if snapshot.paused_count else ():
        yield Restriction(
            "count-incomplete",
            f"{in_flight} jobs of consumer {name} of {queue} stayed in flight, or waited for another delivery, while"
            " the count paused it: which of its jobs are dead isn't certain; try again when fewer jobs run or fail",
        )
    if held := held_problem(queue, snapshot.held_above):
        yield Restriction("sourced-queue", f"{held}, so dead ones without an entry count as uncertain")


def held_problem(queue: str, held_above: int | None) -> str:
    """Return a clause that says why jobs that are done may be stored still; empty if none is.

    :param held_above: the sequence above which they may be
    """
    if held_above is None:
        return ""
    return (
        f"another stream sources or mirrors {queue} and has yet to take jobs after {held_above}: jobs that are done"
        " stay stored until it has"
    )


def _queue_risks(snapshot: QueueSnapshot, queue: WorkQueue) -> Iterator[Finding]:
    name = snapshot.queue
    if not _exists(snapshot, queue.archive) or not snapshot.config.get("republish"):
        yield Risk(
            "no-archive",
            f"{name} has no archive: a job that a worker terminates, or that the server deletes, takes its body with"
            " it; provision the queue with an archive",
        )
    for consumer in snapshot.consumers.values():
        if consumer.dead is not None and consumer.dead < 0:
            yield Risk(
                "inconsistent-consumer",
                f"{name} has fewer jobs than consumer {consumer.name} has in flight, as after a crash: its dead letters"
                " can't be told from live jobs until its ack wait is over; if that stays so, recreate the consumer",
            )
    if missing := [consumer.name for consumer in queue.consumers if consumer.name not in snapshot.consumers]:
        yield Risk(
            "consumer-missing",
            f"{name} has no consumer {', '.join(missing)}: removed by its inactive_threshold, in memory when its server"
            f" restarted, or deleted; {sum(snapshot.unconsumed.values())} jobs match no consumer, and those among them"
            " that are dead letters would run again once it is created: provision the queue again, which refuses that"
            " or parks them first",
        )
    unknown = [consumer for consumer in snapshot.consumers.values() if consumer.in_flight and not consumer.up_since]
    if unknown:
        yield Risk(
            "restart-unknown",
            f"since when the server of {', '.join(consumer.name for consumer in unknown)} of {name} has been up isn't"
            f" known ({_why_unknown(snapshot, queue, unknown[0])}): one that is killed delivers jobs again that it had"
            " just reported dead, and while others are in flight such a job counts as dead where as many deaths went"
            " unreported",
        )
    if not _exists(snapshot, queue.audit):
        yield Restriction(
            "no-audit",
            f"{name} has no audit: nothing is redriven or parked, since a redrive that is cut off couldn't be told from"
            " one that never began; provision the queue with an audit",
        )


def _why_unknown(snapshot: QueueSnapshot, queue: WorkQueue, consumer: ConsumerState) -> str:
    if consumer.clustered:
        return "clusters tell since nats-server 2.12, and of consumers with several replicas"
    if not _exists(snapshot, queue.audit):
        return "the queue has no audit, on which a consumer in memory would show it"
    return "the audit's consumer in memory that shows it can't be created, or isn't in memory"


def _capture_risks(queue: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    letters, subjects = config["name"], config.get("subjects") or []
    if not covered_by_any(subjects, f"{TERMINATED}.{queue}.*"):
        yield Risk(
            "terminations-uncaptured",
            f"{letters} doesn't capture {TERMINATED}.{queue}.*: terminated jobs go unseen, or are unaccounted where a"
            " worker has stored a record, which by itself proves no termination; add it",
        )
    if not covered_by_any(subjects, copy_filter(queue)):
        yield Risk(
            "copies-uncaptured",
            f"{letters} doesn't capture {copy_filter(queue)}: workers and scans can't store the body of a dead letter"
            " there; add it",
        )
    if not covered_by_any(subjects, parked_filter(queue)):
        yield Restriction(
            "no-parking", f"{letters} doesn't capture {parked_filter(queue)}: no letter can be parked; add it"
        )


def _entry_findings(
    snapshot: QueueSnapshot, letters: str, unreadable: int, other_domain: Mapping[str, int]
) -> Iterator[Finding]:
    if unreadable:
        yield Risk(
            "unreadable-entries",
            f"{unreadable} entries of {letters} don't state which job they are about: check them by hand",
        )
    if other_domain:
        yield Restriction(
            "other-domain",
            f"{sum(other_domain.values())} entries of {letters} were published in another JetStream domain, about a"
            " queue of the same name there, and don't count: keep $JS.EVENT.> from crossing the leaf node connection",
        )
    if same := sorted(snapshot.consumers.keys() & other_domain):
        # An acknowledgement's subject names no domain. Measured with 2.15: one sent to a leaf settled the hub's job.
        yield Risk(
            "acknowledgements-cross-domains",
            f"another JetStream domain has a stream {snapshot.queue} with a consumer {', '.join(same)}, too: where"
            " $JS.ACK.> crosses the leaf node connection, each acknowledgement settles the jobs of both, and so does a"
            " redrive; deny it there, or give the consumers other names, and then remove the entries of that domain",
        )


def _exists(snapshot: QueueSnapshot, companion: Any) -> bool:
    return companion is not None and companion.name in snapshot.companions


def _copies_entries(snapshot: QueueSnapshot, queue: WorkQueue, config: Mapping[str, Any]) -> bool:
    copies = entry_copies_filter(snapshot.queue)
    audit = snapshot.companions.get(queue.audit.name) if queue.audit else None
    rule = config.get("republish") or {}
    return rule.get("dest") == copies and covered_by_any(audit["config"].get("subjects") or [] if audit else [], copies)
