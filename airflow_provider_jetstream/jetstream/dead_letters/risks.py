"""What could be lost with a queue's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter, entry_copies_filter, parked_filter

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext


def find_risks(context: ScanContext, unreadable: int) -> tuple[str, ...]:
    """Return a sentence for each thing that could be lost.

    :param unreadable: entries of the dead letter queue that don't state which job they are about
    """
    risks: list[str] = []
    snapshot, info, declared = context.snapshot, context.dead_letter_queue, context.queue
    queue, config, state = snapshot.queue, info["config"], info["state"]
    letters, subjects = config["name"], config.get("subjects") or []
    has_archive = declared.archive is not None and declared.archive.name in snapshot.companions
    if not has_archive or not snapshot.config.get("republish"):
        risks.append(
            f"{queue} has no archive: a job that a worker terminates, or that the server deletes, takes its body"
            " with it; provision the queue with an archive"
        )
    if not covered_by_any(subjects, f"{TERMINATED}.{queue}.*"):
        risks.append(f"{letters} doesn't capture {TERMINATED}.{queue}.*: terminated jobs go unseen; add it")
    if not covered_by_any(subjects, copy_filter(queue)):
        risks.append(
            f"{letters} doesn't capture {copy_filter(queue)}: workers and scans can't store the body of a dead"
            " letter there; add it"
        )
    if not covered_by_any(subjects, parked_filter(queue)):
        risks.append(f"{letters} doesn't capture {parked_filter(queue)}: no letter can be parked; add it")
    risks += [
        f"{letters} is full and refuses what is new: deaths are found by counting only; raise {limit}"
        for limit, used in (("max_msgs", state["messages"]), ("max_bytes", state["bytes"] * 1.01))
        if config.get("discard") == "new" and _full(config.get(limit), used)
    ]
    risks += [
        f"{queue} has fewer jobs than consumer {consumer.name} has in flight, as after a crash: its dead letters can't"
        " be told from live jobs until its ack wait is over; if that stays so, recreate the consumer"
        for consumer in snapshot.consumers.values()
        if consumer.dead is not None and consumer.dead < 0
    ]
    if unreadable:
        risks.append(f"{unreadable} entries of {letters} don't state which job they are about: check them by hand")
    if snapshot.config.get("allow_msg_ttl") and not snapshot.config.get("allow_atomic"):
        risks.append(
            f"{queue} lets jobs bring their own age limit (Nats-TTL), which their copies in an archive have, too: one"
            " that expires while a worker has it is lost; have a max_age instead"
        )
    if context.handlers and not _copies_entries(context):
        risks.append(
            f"{letters} has a handler ({', '.join(context.handler_names)}) and keeps no copies of its entries: letters"
            " that it has handled count as dead and are redriven; provision the queue again, with an audit"
        )
    if declared.audit is None or declared.audit.name not in snapshot.companions:
        risks.append(
            f"{queue} has no audit: a redrive of terminated jobs that is cut off may repeat them after the"
            " duplicate window; provision the queue with an audit"
        )
    return tuple(risks)


def _copies_entries(context: ScanContext) -> bool:
    copies, audit = entry_copies_filter(context.snapshot.queue), context.audit
    rule = context.dead_letter_queue["config"].get("republish") or {}
    return rule.get("dest") == copies and covered_by_any(audit["config"].get("subjects") or [] if audit else [], copies)


def _full(limit: int | None, used: float) -> bool:
    return limit is not None and 0 < limit <= used
