"""What a redrive did."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.redrive.request import Protocol

_NAMED_FAILURES = 1_000
_REPORTED_FAILURES = 20
_REPORTED_RANGES = 1_000


class SequenceMap(Mapping[int, int]):
    """Stream sequences and what became of them, 16 bytes each.

    :param items: the first ones
    """

    def __init__(self, items: Mapping[int, int] | None = None) -> None:
        self._keys: array[int] = array("Q", (items or {}).keys())
        self._values: array[int] = array("Q", (items or {}).values())
        self._highest = max(self._keys, default=0)

    def add(self, key: int, value: int) -> None:
        """Take note of one; what is noted later about the same one counts.

        :param key: its stream sequence
        :param value: what became of it
        """
        if key in self:
            self._values[self._keys.index(key)] = value
            return
        self._keys.append(key)
        self._values.append(value)
        self._highest = max(self._highest, key)

    def __contains__(self, key: object) -> bool:
        # They come nearly in order, so that nearly every new one is told without a search.
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
        """Give what became of them.

        :return: the values in the order of the keys
        """
        return self._values

    def __repr__(self) -> str:
        return repr(dict(zip(self._keys, self._values, strict=True)))


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did.

    :param protocol: how
    :param guarantee: what that protects from
    :param redriven: original sequence → the new one; the same where it was requeued in place
    :param parked: sequences of letters that were taken out of circulation
    :param failed: original sequence → why it stayed a dead letter; the first thousand
    :param failures: how many stayed
    :param gone: sequences of jobs that are no dead letters (any more)
    :param entries_left: entries that the dead letter queue doesn't allow to be removed; they are recognised as done
    :param uncertain: dead letters that can't be told yet
    :param undeliverable: jobs that no consumer takes
    :param risks: what could be lost as things are, a sentence each
    :param resumed: how many of the redriven and parked an earlier try had done
    :param cancelled: whether it was told to stop before the end
    """

    protocol: Protocol = Protocol.COPY
    guarantee: str = ""
    redriven: SequenceMap = field(default_factory=SequenceMap)
    parked: array[int] = field(default_factory=lambda: array("Q"))
    failed: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    gone: array[int] = field(default_factory=lambda: array("Q"))
    entries_left: int = 0
    uncertain: int = 0
    undeliverable: int = 0
    risks: tuple[str, ...] = ()
    resumed: int = 0
    cancelled: bool = False
    # They come nearly in order, so that nearly every new one is told without a search.
    _highest_parked: int = field(default=0, init=False, repr=False, compare=False)
    _highest_gone: int = field(default=0, init=False, repr=False, compare=False)

    def add_failure(self, sequence: int, why: str) -> None:
        """Take note of a letter that stayed.

        :param sequence: the job's stream sequence
        :param why: why
        """
        self.failures += 1
        if len(self.failed) < _NAMED_FAILURES:
            self.failed[sequence] = why

    def add_parked(self, sequence: int) -> None:
        """Take note of a letter that was taken out of circulation.

        :param sequence: the job's stream sequence
        """
        if sequence > self._highest_parked or sequence not in self.parked:
            self.parked.append(sequence)
            self._highest_parked = max(self._highest_parked, sequence)

    def add_gone(self, sequence: int) -> None:
        """Take note of a job that is no dead letter (any more), unless it is this redrive's own doing.

        :param sequence: the job's stream sequence
        """
        ours = sequence in self.redriven or sequence in self.parked
        if not ours and (sequence > self._highest_gone or sequence not in self.gone):
            self.gone.append(sequence)
            self._highest_gone = max(self._highest_gone, sequence)

    def awaited_sequences(self) -> set[int]:
        """Give the jobs that were brought back and that weren't taken up again since.

        :return: stream sequences of jobs that end by themselves
        """
        made = zip(self.redriven, self.redriven.new_sequences(), strict=True)
        # One that died between two tries was redriven or parked in its turn, and its end can't be found any more.
        superseded = {old for old, new in made if old != new} | set(self.parked)
        return set(self.redriven.new_sequences()) - superseded

    def as_json(self) -> dict[str, Any]:
        """Give the report in a form that fits an XCom.

        :return: counts, and sequences as ranges
        """
        return {
            "protocol": self.protocol.value,
            "redriven": len(self.redriven),
            "parked": len(self.parked),
            "failed": self.failures,
            "gone": len(self.gone),
            "entries_left": self.entries_left,
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "resumed": self.resumed,
            "from_sequences": sequence_ranges(self.redriven)[:_REPORTED_RANGES],
            "to_sequences": sequence_ranges(self.redriven.new_sequences())[:_REPORTED_RANGES],
            "failures": dict(sorted(self.failed.items())[:_REPORTED_FAILURES]),
            "risks": list(self.risks),
        }

    def raise_for_failures(self) -> None:
        """Do nothing if every dead letter was redriven or parked.

        :raises RedriveError: some weren't
        """
        done = len(self.redriven) + len(self.parked)
        if self.cancelled:
            raise RedriveError(
                f"stopped after {done} dead letters, as asked; the others stayed where they were, and running it again"
                " goes on with them"
            )
        if self.failures:
            named = "; ".join(f"{sequence}: {reason}" for sequence, reason in sorted(self.failed.items())[:5])
            raise RedriveError(
                f"{done} dead letters were redriven, {self.failures} stayed where they were: {named};"
                " running it again is safe"
            )
