"""The report of a redrive."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes, RedriveState, Wave
from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.redrive.request import Protocol
from airflow_provider_jetstream.jetstream.task_values import TaskReport

_NAMED_FAILURES = 1_000
_REPORTED_FAILURES = 20
_REPORTED_RANGES = 1_000


class SequenceMap(Mapping[int, int]):
    """Original sequences with their new ones, 16 bytes each.

    :param items: the first items
    """

    def __init__(self, items: Mapping[int, int] | None = None) -> None:
        self._keys: array[int] = array("Q", (items or {}).keys())
        self._values: array[int] = array("Q", (items or {}).values())
        self._highest = max(self._keys, default=0)

    def add(self, key: int, value: int) -> None:
        """Add an original sequence with its new one, or replace the new one.

        :param key: the original sequence
        :param value: the new sequence
        """
        if key in self:
            self._values[self._keys.index(key)] = value
            return
        self._keys.append(key)
        self._values.append(value)
        self._highest = max(self._highest, key)

    def __contains__(self, key: object) -> bool:
        # Sequences are added nearly in order: a higher one than all before needs no search.
        return isinstance(key, int) and key <= self._highest and key in self._keys

    def __getitem__(self, key: int) -> int:
        try:
            return self._values[self._keys.index(key)]
        except ValueError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def new_sequences(self) -> array[int]:
        """Return the new sequences in the order of the original ones."""
        return self._values

    def __repr__(self) -> str:
        return repr(dict(zip(self._keys, self._values, strict=True)))


@dataclass(slots=True)
class RedriveReport(TaskReport):
    """What a redrive did.

    :param protocol: how letters were brought back
    :param guarantee: what the protocol guarantees
    :param target: the queue that gets the new jobs, where it is another one
    :param redriven: original sequence → new sequence; the same one where the job was requeued in place, and 0 where an
        earlier redrive brought it to another queue than this one does
    :param parked: sequences of letters that were parked
    :param discarded: sequences of letters that were discarded
    :param failed: original sequence → why it is still a dead letter; the first thousand
    :param failures: how many are still dead letters
    :param gone: sequences of jobs that are no dead letters (any more)
    :param left_to_handlers: sequences of dead letters whose entries a handler of the dead letter queue still has
    :param entries_left: entries that the dead letter queue doesn't allow to be removed; later scans ignore them
    :param uncertain: more jobs that may be dead: they can't be identified yet
    :param undeliverable: jobs that match no consumer
    :param risks: what could be lost with the queue as it is, and what isn't possible or known, a sentence each
    :param resumed: how many of the redriven, parked and discarded letters an earlier try had handled
    :param cancelled: whether it was stopped before the end
    :param redrive: the redrive's id, by which it is read, paused, resumed and aborted
    :param state: its state
    :param reason: why it is in this state; empty where the state says it
    :param outcomes: what became of the redriven letters as far as this redrive has awaited it; the others are unknown
    :param waves: its waves so far
    :param waiting: what it waits for at this moment, and until when; empty where it doesn't
    """

    protocol: Protocol = Protocol.COPY
    guarantee: str = ""
    target: str | None = None
    redriven: SequenceMap = field(default_factory=SequenceMap)
    parked: array[int] = field(default_factory=lambda: array("Q"))
    discarded: array[int] = field(default_factory=lambda: array("Q"))
    failed: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    gone: array[int] = field(default_factory=lambda: array("Q"))
    left_to_handlers: array[int] = field(default_factory=lambda: array("Q"))
    entries_left: int = 0
    uncertain: int = 0
    undeliverable: int = 0
    risks: tuple[str, ...] = ()
    resumed: int = 0
    cancelled: bool = False
    redrive: str = ""
    state: RedriveState = RedriveState.PLANNED
    reason: str = ""
    outcomes: RedriveOutcomes = field(default_factory=RedriveOutcomes)
    waves: tuple[Wave, ...] = ()
    waiting: str = ""
    # Sequences are added nearly in order: a higher one than all before needs no search.
    _highest_parked: int = field(default=0, init=False, repr=False, compare=False)
    _highest_discarded: int = field(default=0, init=False, repr=False, compare=False)
    _highest_gone: int = field(default=0, init=False, repr=False, compare=False)

    def add_failure(self, sequence: int, why: str) -> None:
        """Add a letter that is still a dead letter, once.

        :param why: why it is
        """
        if sequence in self.failed:
            return
        self.failures += 1
        if len(self.failed) < _NAMED_FAILURES:
            self.failed[sequence] = why

    def add_redriven(self, sequence: int, new_sequence: int | None, stream: str | None) -> None:
        """Add a letter that has a new job.

        :param sequence: its original sequence
        :param new_sequence: the new job's
        :param stream: the new job's stream, where it isn't the letter's own
        """
        self.redriven.add(sequence, (new_sequence or 0) if stream == self.target else 0)

    def add_parked(self, sequence: int) -> None:
        """Add a letter that was parked."""
        if sequence > self._highest_parked or sequence not in self.parked:
            self.parked.append(sequence)
            self._highest_parked = max(self._highest_parked, sequence)

    def add_discarded(self, sequence: int) -> None:
        """Add a letter that was discarded."""
        if sequence > self._highest_discarded or sequence not in self.discarded:
            self.discarded.append(sequence)
            self._highest_discarded = max(self._highest_discarded, sequence)

    def add_gone(self, sequence: int) -> None:
        """Add a job that is no dead letter (any more), unless this redrive has handled it."""
        ours = sequence in self.redriven or sequence in self.parked or sequence in self.discarded
        if not ours and (sequence > self._highest_gone or sequence not in self.gone):
            self.gone.append(sequence)
            self._highest_gone = max(self._highest_gone, sequence)

    def add(self, other: RedriveReport) -> None:
        """Add what another process did with other letters."""
        for sequence, new_sequence in zip(other.redriven, other.redriven.new_sequences(), strict=True):
            self.redriven.add(sequence, new_sequence)
        for sequence in other.parked:
            self.add_parked(sequence)
        for sequence, why in other.failed.items():
            self.add_failure(sequence, why)
        self.failures += other.failures - len(other.failed)
        for sequence in other.gone:
            self.add_gone(sequence)
        self.entries_left += other.entries_left

    @property
    def done(self) -> int:
        """How many letters were redriven, parked or discarded."""
        return len(self.redriven) + len(self.parked) + len(self.discarded)

    def awaited_sequences(self) -> set[int]:
        """Return the stream sequences of the new jobs whose ends can be awaited."""
        pairs = zip(self.redriven, self.redriven.new_sequences(), strict=True)
        # A new job that died between two tries was redriven or parked itself, and its end can't be found any more.
        superseded = {old for old, new in pairs if old != new} | set(self.parked) if self.target is None else set()
        return set(self.redriven.new_sequences()) - superseded - {0}

    def as_json(self) -> dict[str, Any]:
        """Return the report in a form that fits an XCom: counts, and sequences as ranges."""
        return {
            "protocol": self.protocol.value,
            "target": self.target,
            "redriven": len(self.redriven),
            "parked": len(self.parked),
            "discarded": len(self.discarded),
            "failed": self.failures,
            "gone": len(self.gone),
            "left_to_handlers": len(self.left_to_handlers),
            "entries_left": self.entries_left,
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "resumed": self.resumed,
            "from_sequences": sequence_ranges(self.redriven)[:_REPORTED_RANGES],
            "to_sequences": sequence_ranges(filter(None, self.redriven.new_sequences()))[:_REPORTED_RANGES],
            "failures": dict(sorted(self.failed.items())[:_REPORTED_FAILURES]),
            "risks": [str(risk) for risk in self.risks],
            "redrive": self.redrive,
            "state": self.state.value,
            "reason": self.reason,
            "outcomes": self.outcomes.model_dump(),
            "waves": [wave.model_dump(mode="json", exclude={"cursor", "returned"}) for wave in self.waves],
        }

    def raise_for_failures(self) -> None:
        """Raise unless every dead letter was redriven or parked.

        :raises RedriveError: the redrive was stopped, or letters failed
        """
        done = self.done
        if self.cancelled:
            raise RedriveError(
                f"stopped after {done} dead letters, as requested; the others stayed where they were, and running it"
                " again goes on with them"
            )
        if self.failures:
            named = "; ".join(f"{sequence}: {reason}" for sequence, reason in sorted(self.failed.items())[:5])
            verb = "discarded" if self.discarded else "redriven"
            raise RedriveError(
                f"{done} dead letters were {verb}, {self.failures} stayed where they were: {named};"
                " running it again is safe"
            )


def problem_of(report: RedriveReport) -> str:
    """Return what :meth:`RedriveReport.raise_for_failures` raises as text; empty where it raises nothing."""
    try:
        report.raise_for_failures()
    except RedriveError as error:
        return str(error)
    return ""
