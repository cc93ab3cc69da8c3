"""Which letters of a queue a viewer wants to see, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

Sort: TypeAlias = Literal["sequence", "-sequence", "died_at", "-died_at"]

_EXACT_FIELDS: Final[tuple[GroupField, ...]] = (
    "error_class",
    "fingerprint",
    "traceback_digest",
    "consumer",
    "dag_id",
    "run_id",
    "task_id",
)


# Letters may be on as many subjects, so that the subject isn't part of their kind.
KIND_FIELDS: Final[tuple[GroupField, ...]] = tuple(field for field in get_args(GroupField) if field != "subject")
_POSITIONS: Final = {field: position for position, field in enumerate(KIND_FIELDS)}


class LetterKind(NamedTuple):
    """The fields by which letters are selected and grouped, but for their subject.

    :param of_unknown_task: whether a task published the job, and it isn't known which one
    :param values: the values of these group fields, in their order
    """

    parked: bool
    map_index: int | None
    of_unknown_task: bool
    values: GroupKey

    def value(self, field: GroupField) -> str | None:
        """Return the value of a group field other than the subject."""
        return self.values[_POSITIONS[field]]


@dataclass(frozen=True, slots=True)
class LetterQuery:
    """A selection of letters to look at.

    :param selection: without ages, which are given by ``died_from`` and ``died_to``
    :param dags: without the letters of all other DAGs; ``None`` for every letter
    :param job_id: of this job
    :param died_from: died at that time or later
    :param died_to: died before that time
    """

    selection: Selection
    dags: frozenset[str] | None = None
    job_id: str | None = None
    died_from: datetime | None = None
    died_to: datetime | None = None

    def of_all_dags(self) -> LetterQuery:
        """Return the same query without a restriction to DAGs."""
        return replace(self, dags=None)

    def of_kinds(self) -> LetterQuery:
        """Return what of the query kinds of letters alone decide."""
        selection = self.selection.model_copy(update={"subject": None, "sequences": None})
        return LetterQuery(selection, self.dags)

    @property
    def is_of_kinds(self) -> bool:
        """Whether kinds of letters alone decide, so that no letter has to be looked at."""
        return self.is_of_times and self.died_from is None and self.died_to is None

    @property
    def is_of_times(self) -> bool:
        """Whether kinds of letters and their times of death alone decide."""
        return self.selection.sequences is None and self.selection.subject is None and self.job_id is None

    def includes_kind(self, kind: LetterKind) -> bool:
        """Return whether letters of a kind may be included."""
        selection = self.selection
        return (
            kind.parked == selection.parked
            and (selection.reasons is None or kind.value("reason") in selection.reasons)
            and all(getattr(selection, field) in (None, kind.value(field)) for field in _EXACT_FIELDS)
            and is_of(kind.value("dag_id"), self.dags)
        )

    def includes(self, letter: DeadLetter) -> bool:
        """Return whether a letter that was proved again is included."""
        return (
            self.selection.matches(letter, letter.death.died_at)
            and is_of(letter.origin.dag_id if letter.origin else None, self.dags)
            and self.job_id in (None, readable_text(letter.job_id))
            and (self.died_from is None or letter.death.died_at >= self.died_from)
            and (self.died_to is None or letter.death.died_at < self.died_to)
        )


def is_of(dag_id: str | None, dags: Collection[str] | None) -> bool:
    """Return whether a letter belongs to no DAG or to one of these; to any DAG for ``None``."""
    return dag_id is None or dags is None or dag_id in dags
