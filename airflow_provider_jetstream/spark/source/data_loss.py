"""Decides whether messages that a reader asked for are lost, from what can be known about messages that are gone.

The server keeps no trace of a message that left the head of a stream. So a finding rests on three things: which
messages the filters matched when the read was planned, which of the stream's limits can have removed anything at all,
and whether newer messages of the same subjects have superseded the ones that are gone. ``docs/spark.md`` defines a loss
in these terms and says what can't be proved.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.spark.errors import DataLossError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.spark.source.options import ReadOptions
    from airflow_provider_jetstream.spark.source.source_stream import SourceStream, StreamInfo

log = logging.getLogger(__name__)

LIMITS: Final = "limits"
_ROLLUP = "Nats-Rollup"
# Someone who deletes the message at the head leaves the same trace as a purge of that one message.
_DELETED_SINGLY = 1
_PLACES = 8


@dataclass(frozen=True)
class FirstMatches:
    """The first two messages at or after a sequence that the filters matched when a read was planned.

    :param start: the sequence
    :param messages: sequence and subject of each; fewer where there were no more
    """

    start: int
    messages: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Planned:
    """What is known about a range from when it was planned.

    :param matches: in order; empty where the stream's sequences alone tell what was there
    :param deleted: how many of the stream's sequences were missing
    :param oldest: nothing that was to be read was stored before, in nanoseconds since 1970
    """

    matches: tuple[FirstMatches, ...] = ()
    deleted: int = 0
    oldest: int = 0

    def between(self, first: int, end: int) -> list[tuple[int, str]]:
        """Return the known messages from one sequence to before another."""
        known = {message for found in self.matches for message in found.messages if first <= message[0] < end}
        return sorted(known)

    def had_none(self, first: int, end: int) -> bool:
        """Return whether the filters are known to have matched nothing from one sequence to before another."""
        for found in self.matches:
            start = found.start
            for sequence, _ in found.messages:
                if start <= first and end <= sequence:
                    return True
                start = sequence + 1
            if start <= first and len(found.messages) < 2:  # noqa: PLR2004  # it found all there were
                return True
        return False


def record_matches(stream: SourceStream, info: StreamInfo, starts: Sequence[int], subjects: Sequence[str]) -> Planned:
    """Find out what is stored for the filters, as far as a loss has to be told from something else later.

    :param starts: the sequences at which ranges begin
    """
    if info.retention != LIMITS or (matches_all(subjects, info) and not info.limits.compacts and not info.deleted):
        return Planned(deleted=info.deleted, oldest=info.oldest)
    # A task that is under way has read the first ones: some farther on tell what is lost then.
    size = info.last + 1 - starts[0] if starts else 0
    places = {*starts[:_PLACES], *(starts[0] + size * index // _PLACES for index in range(min(size, _PLACES)))}
    starts = sorted(places)[:: max(1, len(subjects) // _PLACES)]
    return Planned(tuple(_first_matches(stream, start, subjects) for start in starts), info.deleted, info.oldest)


def _first_matches(stream: SourceStream, start: int, subjects: Sequence[str]) -> FirstMatches:
    messages: list[tuple[int, str]] = []
    position = start
    while len(messages) < 2 and (message := stream.next_of(position, subjects)):  # noqa: PLR2004
        messages.append((message.sequence, message.subject))
        position = message.sequence + 1
    return FirstMatches(start, tuple(messages))


def matches_all(subjects: Sequence[str], info: StreamInfo) -> bool:
    """Return whether the filters match every subject that the stream takes."""
    if not subjects or ">" in subjects:
        return True
    own = info.limits.subjects
    return bool(own) and all(any(covers(wide, subject) for wide in subjects) for subject in own)


@dataclass(frozen=True)
class Loss:
    """Sequences that are gone and among which there were messages for the reader, or may have been.

    :param first: the first sequence
    :param last: the last sequence
    :param cause: what is known of why
    """

    first: int
    last: int
    cause: str


def find_loss(
    stream: SourceStream,
    info: StreamInfo,
    position: int,
    subjects: Sequence[str],
    planned: Planned | None = None,
    *,
    last: int | None = None,
    oldest: int = 0,
) -> Loss | None:
    """Find out whether messages between a position and the head of the stream are lost to the reader.

    :param info: the stream as it is now
    :param position: the next sequence to read
    :param planned: what was there; none where nothing is known, as about messages stored after a checkpoint
    :param last: the last sequence to read, where there is one
    :param oldest: nothing that was to be read was stored before, in nanoseconds since 1970
    """
    if info.retention != LIMITS or info.first <= position:
        return None
    if planned and planned.had_none(position, info.first):
        return None
    end, everything = info.first, matches_all(subjects, info)
    lost_to = min(end - 1, last or end)
    oldest = max(oldest, planned.oldest if planned else 0)
    if limit := info.limits.possible_cause(position, info.last, oldest, stream.socket.max_payload):
        return Loss(position, lost_to, f"the stream's {limit} can have removed them")
    removed = planned.between(position, end) if planned else []
    if info.limits.compacts:
        removed = [message for message in removed if not _is_superseded(stream, info, message)]
        certain = len(removed)
    elif everything:
        certain = max(len(removed), end - position - (planned.deleted if planned else 0))
    else:
        certain = len(removed)
    if certain > _DELETED_SINGLY:
        acts = "purged, deleted one by one, or had a TTL" if info.limits.ttls else "purged, or deleted one by one"
        return Loss(position, lost_to, f"no limit of the stream can have removed them, so they were {acts}")
    if not (removed or everything or info.limits.compacts):
        log.warning(
            "%s begins at %d now: someone purged or deleted messages from %d on. Whether %s matched any isn't known.",
            stream.name,
            end,
            position,
            ", ".join(subjects),
        )
    return None


def _is_superseded(stream: SourceStream, info: StreamInfo, message: tuple[int, str]) -> bool:
    """Return whether the stream holds as many newer messages of a message's subject as it keeps, or a rollup."""
    sequence, subject = message
    newest = stream.last_of(subject)
    if newest is not None and newest.sequence > sequence:
        kept = info.limits.per_subject
        if newest.header(_ROLLUP) or kept == 1 or (kept > 1 and stream.count_of(subject) >= kept):
            return True
    head = stream.next_message(info.first)
    return head is not None and (head.header(_ROLLUP) or "").lower() == "all"


def report_loss(finding: str, options: ReadOptions, loss: Loss | None = None) -> None:
    """Raise an error about messages that are gone, or log a warning.

    :param loss: which; none where that isn't known
    :raises DataLossError: neither ``failOnDataLoss`` nor ``acceptedLoss`` allows it
    """
    if loss:
        finding = f"{finding}: {_lost(loss, options.filter_subjects)} are lost, {loss.cause}"
    accepted = loss is not None and _is_covered(loss, options.losses)
    if not options.fail_on_data_loss or accepted:
        log.warning("Messages are missing: %s.", finding)
        return
    accept = f" accept exactly this with acceptedLoss={_acceptance(loss, options)}," if loss else ""
    raise DataLossError(
        f"expected every message to be there still, found that {finding}; keep messages longer,{accept} or set"
        " failOnDataLoss to false to go on without any that are missing"
    )


def _lost(loss: Loss, filters: Iterable[str]) -> str:
    names = ", ".join(filters)
    return f"the messages {loss.first} to {loss.last}" + (f" as far as {names} matched them" if names else "")


def _acceptance(loss: Loss, options: ReadOptions) -> str:
    ranges = f"{loss.first}-{loss.last}"
    return json.dumps({options.stream: ranges}, ensure_ascii=False) if options.several else ranges


def _is_covered(loss: Loss, accepted: Sequence[tuple[int, int]]) -> bool:
    position = loss.first
    for first, last in sorted(accepted):
        if first <= position <= last:
            position = last + 1
    return position > loss.last
