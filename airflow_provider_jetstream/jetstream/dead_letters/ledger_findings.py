"""What is to be known of the jobs that a ledger doesn't account for, as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges, ranges_text
from airflow_provider_jetstream.jetstream.contract import handled_filter
from airflow_provider_jetstream.jetstream.queue.finding import Finding, Restriction, Risk

if TYPE_CHECKING:
    from collections.abc import Collection


class LedgerFacts(NamedTuple):
    """What a look at a queue's ledger has found.

    :param unaccounted: jobs that are gone without evidence of their end
    :param unknown: jobs that are gone, and whose end nothing can prove
    :param unread: jobs that are gone, and of which evidence may have been left unread
    :param unread_messages: how many messages of the events stream and the audit were left for the next scan
    :param unproved: the consumers whose jobs leave no evidence
    :param without_copy: those unaccounted of which the archive has no copy any more
    :param events: the events stream, if it exists
    """

    queue: str
    unaccounted: SequenceRanges
    unknown: SequenceRanges
    unread: SequenceRanges
    unread_messages: int
    unproved: Collection[str]
    without_copy: SequenceRanges
    events: str | None
    archive: str


def ledger_findings(facts: LedgerFacts) -> tuple[Finding, ...]:
    """Return the sentences."""
    findings: list[Finding] = []
    queue, archive = facts.queue, facts.archive
    if unaccounted := facts.unaccounted - facts.without_copy:
        findings.append(
            Risk(
                "unaccounted-jobs",
                f"{unaccounted.count} jobs of {queue} are gone without evidence of their end"
                f" ({ranges_text(unaccounted)}): done just before a crash of the server, terminated while nothing"
                " captured it, expired, or deleted; they count as uncertain; look at them by their sequences, redrive"
                f" by their sequences those that weren't done, and report the others on {handled_filter(queue)}",
            )
        )
    if facts.without_copy:
        findings.append(
            Risk(
                "copies-dropped",
                f"{facts.without_copy.count} jobs of {queue} are gone without evidence of their end, and {archive} has"
                f" dropped their copies by its limits ({ranges_text(facts.without_copy)}): they count as uncertain"
                f" until they are reported on {handled_filter(queue)}; raise the archive's limits",
            )
        )
    if facts.unknown:
        consumers = ", ".join(sorted(facts.unproved))
        why = (
            "no events stream stores the ends of jobs: declare events"
            if facts.events is None
            else f"{facts.events} has no ack metrics and no completions of {consumers}: set sample_freq to 100%"
            if consumers
            else f"{facts.events} has dropped what it stored about them, or no consumer is left"
        )
        findings.append(
            Risk(
                "ends-unknown",
                f"whether {facts.unknown.count} jobs of {queue} that are gone were done isn't known"
                f" ({ranges_text(facts.unknown, 3)}), since {why}; one that was lost among them goes unseen, and their"
                f" copies stay in {archive} until its own limits drop them",
            )
        )
    if facts.unread_messages or facts.unread:
        findings.append(
            Restriction(
                "ledger-behind",
                f"how {facts.unread.count} jobs of {queue} ended isn't looked up yet ({facts.unread_messages} messages"
                " are unread): the next scan goes on; they count as uncertain",
            )
        )
    return tuple(findings)
