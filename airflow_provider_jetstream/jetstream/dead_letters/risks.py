"""What could be lost as a queue is configured, said before it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED, copy_filter, parked_filter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


def find_risks(
    around: QueueSnapshot, letters_info: Mapping[str, Any], unreadable: int, *, archive: bool, audit: bool
) -> tuple[str, ...]:
    """Say what could be lost.

    :param around: how the work queue is
    :param letters_info: its dead letter queue, as the server gives it
    :param unreadable: entries there that don't say which job they are about
    :param archive: whether its archive exists
    :param audit: whether its audit exists
    :return: a sentence each
    """
    risks: list[str] = []
    queue, config, state = around.queue, letters_info["config"], letters_info["state"]
    letters, subjects = config["name"], config.get("subjects") or []
    if not archive or not around.config.get("republish"):
        risks.append(
            f"{queue} has no archive: a job that a worker terminates, or that the server deletes, takes its body"
            " with it; provision the queue with an archive"
        )
    if not covered_by_any(subjects, f"{TERMINATED}.{queue}.*"):
        risks.append(f"{letters} doesn't capture {TERMINATED}.{queue}.*: terminated jobs go unseen; add it")
    if not covered_by_any(subjects, copy_filter(queue)):
        risks.append(
            f"{letters} doesn't capture {copy_filter(queue)}: workers and scans can't keep the body of a dead"
            " letter there; add it"
        )
    if not covered_by_any(subjects, parked_filter(queue)):
        risks.append(f"{letters} doesn't capture {parked_filter(queue)}: no letter can be parked; add it")
    if config.get("discard") == "new" and _full(config.get("max_msgs"), state["messages"]):
        risks.append(f"{letters} is full and refuses what is new: deaths are found by counting only; raise max_msgs")
    if config.get("discard") == "new" and _full(config.get("max_bytes"), state["bytes"] * 1.01):
        risks.append(f"{letters} is full and refuses what is new: deaths are found by counting only; raise max_bytes")
    risks += [
        f"{queue} has fewer jobs than consumer {consumer.name} has in flight, as after a crash: its dead letters can't"
        " be told from live jobs until its ack wait is over; if that stays so, recreate the consumer"
        for consumer in around.consumers.values()
        if consumer.dead is not None and consumer.dead < 0
    ]
    if unreadable:
        risks.append(f"{unreadable} entries of {letters} don't say which job they are about: look at them by hand")
    if around.config.get("allow_msg_ttl") and not around.config.get("allow_atomic"):
        risks.append(
            f"{queue} lets jobs bring their own age limit (Nats-TTL), which their copies in an archive have, too: one"
            " that expires while a worker has it is lost; have a max_age instead"
        )
    if not audit:
        risks.append(
            f"{queue} has no audit: a redrive of terminated jobs that is cut off may repeat them after the"
            " duplicate window; provision the queue with an audit"
        )
    return tuple(risks)


def _full(limit: int | None, used: float) -> bool:
    return limit is not None and 0 < limit <= used
