"""Dead letters of one cause, counted while they are read: in limited memory, whatever the letters' texts are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import JOB_RELEASE
from airflow_provider_jetstream.jetstream.dead_letters.frequent_values import FrequentValues
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.line_text import one_line

if TYPE_CHECKING:
    from datetime import datetime
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

    # Reason, consumer, the error's class, and the digest of the place in the code or else of the error's text.
    CauseKey: TypeAlias = tuple[Reason, str | None, str | None, str, str]

# A group of more than a 500th of all letters is found, however many groups of one letter there are.
_MOST_GROUPS = 1_000


def shown_text(text: str | None) -> str | None:
    """Return any text as one line of at most 200 characters, without control characters and invalid UTF-8."""
    line = one_line(readable_text(text)) if text else None
    return line[:SHOWN_VALUE] if line else None


@dataclass(slots=True)
class CauseGroup:
    """Letters of one cause.

    :param reason: why they died
    :param consumer: the consumer that delivered them
    :param select: the fields of a selection of just these letters
    :param first: when the first of them died
    :param last: when the last of them died
    :param example: the letter of the lowest stream sequence
    :param redriven: how many of them were redriven before, and died again
    :param subjects: their subjects
    :param tasks: DAG and task that published them
    :param releases: the releases that their jobs name in the header ``Job-Release``
    """

    reason: Reason
    consumer: str | None
    select: dict[str, object]
    first: datetime
    last: datetime
    example: int
    error_class: str | None
    error_message: str | None
    error_place: str | None
    count: int = 0
    redriven: int = 0
    subjects: FrequentValues[str] = field(default_factory=FrequentValues)
    tasks: FrequentValues[tuple[str, str]] = field(default_factory=FrequentValues)
    releases: FrequentValues[str] = field(default_factory=FrequentValues)

    @property
    def place(self) -> str:
        """Where and of what the letters died, in a few words."""
        what = self.error_class or self.error_message or str(self.reason)
        return f"{what} in {self.error_place}" if self.error_place else what

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        died_at = letter.death.died_at
        self.count += 1
        self.redriven += letter.redrives > 0
        self.first, self.last = min(self.first, died_at), max(self.last, died_at)
        self.subjects.add(shown_text(letter.subject) or "")
        if letter.origin:
            self.tasks.add((shown_text(letter.origin.dag_id) or "", shown_text(letter.origin.task_id) or ""))
        if release := shown_text(first(letter.headers, JOB_RELEASE)):
            self.releases.add(release)


class CauseGroups:
    """All letters by cause; groups of the fewest letters are given up where there are too many."""

    def __init__(self) -> None:
        self.letters = 0
        self.left_out = 0
        self._groups: dict[CauseKey, CauseGroup] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        key = _key(letter)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _group(letter, key)
        group.add(letter)
        self.letters += 1
        if len(self._groups) > _MOST_GROUPS:
            ranked = sorted(self._groups.items(), key=lambda item: -item[1].count)
            self._groups = dict(ranked[: _MOST_GROUPS // 2])
            self.left_out += sum(group.count for _, group in ranked[_MOST_GROUPS // 2 :])

    def largest(self) -> list[CauseGroup]:
        """Return the groups in descending order of their size, groups of one size by their first sequence."""
        return sorted(self._groups.values(), key=lambda group: (-group.count, group.example))


def _key(letter: DeadLetter) -> CauseKey:
    death = letter.death
    if death.traceback_digest:
        return (death.reason, death.consumer, death.error_class, "traceback_digest", death.traceback_digest)
    return (death.reason, death.consumer, death.error_class, "fingerprint", death.fingerprint)


def _group(letter: DeadLetter, key: CauseKey) -> CauseGroup:
    death = letter.death
    reason, consumer, error_class, digest_field, digest = key
    select: dict[str, object] = {"reasons": [reason.value], "consumer": consumer, "error_class": error_class}
    return CauseGroup(
        reason,
        consumer,
        {name: value for name, value in {**select, digest_field: digest}.items() if value is not None},
        death.died_at,
        death.died_at,
        letter.sequence,
        shown_text(error_class),
        shown_text(death.error_message or death.explanation),
        shown_text(death.error_place),
    )
