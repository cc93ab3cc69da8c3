"""Which dead letters are meant."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, field_validator, model_validator

from airflow_provider_jetstream.jetstream.client.subjects import covers, subject_problem
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.jetstream.line_text import shown_field, shown_value
from airflow_provider_jetstream.jetstream.queue.declaration import Duration, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.origin import Origin


class Selection(BaseModel):
    """The dead letters that match every field which is set.

    :param sequences: stream sequences in the work queue
    :param reasons: why they died; jobs that match no consumer are selected only where ``undeliverable`` is named
    :param error_class: the error's type, as a worker recorded it
    :param fingerprint: the digest that letters of one cause share, by the error's text
    :param traceback_digest: the digest that failures of the same kind at the same line share, whatever the text
    :param subject: a subject or filter
    :param consumer: the consumer that delivered them
    :param older_than: dead for at least this long
    :param younger_than: dead for less than this
    :param dag_id: published by this DAG
    :param run_id: published by this run
    :param task_id: published by this task
    :param parked: letters that are out of circulation instead of those in circulation
    :param unaccounted: also jobs that are gone without evidence of their end and have a copy; a slow worker may have
        finished them, so they may run twice
    :raises SelectionError: a field is unknown or has an invalid value
    """

    # Built when the first one is made: importing this is most of what a DAG file pays that names no such model.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def __init__(self, *unnamed: object, **values: Any) -> None:
        if unnamed:
            raise SelectionError(
                f"expected the fields of a selection by name, such as Selection(consumer=…), found {unnamed[0]!r}"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _selection_error(values, error) from None

    sequences: frozenset[int] | None = None
    reasons: frozenset[Reason] | None = None
    error_class: str | None = None
    fingerprint: str | None = None
    traceback_digest: str | None = None
    subject: str | None = None
    consumer: str | None = None
    older_than: Duration | None = None
    younger_than: Duration | None = None
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    parked: bool = False
    unaccounted: bool = False

    @field_validator("subject")
    @classmethod
    def _check_subject(cls, subject: str | None) -> str | None:
        if subject is not None and (problem := subject_problem(subject)):
            raise ValueError(f"{subject!r} selects nothing: {problem}")
        return subject

    @field_validator("sequences", mode="before")
    @classmethod
    def _check_sequences(cls, sequences: Any) -> Any:
        listed = list(sequences) if isinstance(sequences, Iterable) and not isinstance(sequences, str) else []
        if wrong := [item for item in listed if isinstance(item, bool) or (isinstance(item, int) and item < 1)]:
            raise ValueError(f"expected stream sequences, whole numbers from 1, found {wrong[0]!r}")
        return sequences

    @field_validator("older_than", "younger_than")
    @classmethod
    def _check_age(cls, age: int | None) -> int | None:
        if age is not None and age < 0:
            raise ValueError("expected an age of at least 0, found a negative one")
        return age

    @model_validator(mode="after")
    def _check_ages(self) -> Self:
        if self.older_than is not None and self.younger_than is not None and self.older_than >= self.younger_than:
            raise ValueError("expected older_than below younger_than, found it above, which selects nothing")
        return self

    @classmethod
    def of(cls, source: Selection | Mapping[str, Any] | None) -> Selection:
        """Build a selection from any form that the operators accept.

        :param source: a selection, its dict, or ``None`` for every dead letter in circulation
        :raises SelectionError: a field is unknown or has an invalid value
        """
        if isinstance(source, Selection):
            return source
        try:
            return cls(**dict(source or {}))
        except SelectionError:
            raise
        except (TypeError, ValueError) as error:
            raise _selection_error(source, error) from None

    @property
    def selects_all(self) -> bool:
        """Whether it selects every dead letter in circulation."""
        return self == Selection()

    @property
    def names_unaccounted(self) -> bool:
        """Whether it selects the named jobs that are gone without evidence of their end."""
        return self.sequences is not None and not self.parked

    @property
    def selects_undeliverable(self) -> bool:
        """Whether it selects the jobs that match no consumer."""
        return self.reasons is not None and Reason.UNDELIVERABLE in self.reasons

    def matches(self, letter: DeadLetter, now: datetime) -> bool:
        """Return whether a letter is selected.

        :param now: the time that ages refer to, by the server's clock as the times of deaths
        """
        death = letter.death
        age = now - death.died_at
        return (
            (letter.parked is not None) == self.parked
            and (self.sequences is None or letter.sequence in self.sequences)
            and (death.reason in self.reasons if self.reasons is not None else death.reason != Reason.UNDELIVERABLE)
            and self.error_class in (None, death.error_class)
            # A fingerprint takes longer to compute than all other fields together.
            and (self.fingerprint is None or self.fingerprint == death.fingerprint)
            and self.traceback_digest in (None, death.traceback_digest)
            and self.consumer in (None, death.consumer)
            and (self.subject is None or covers(self.subject, letter.subject))
            and (self.older_than is None or age >= _timedelta(self.older_than))
            and (self.younger_than is None or age < _timedelta(self.younger_than))
            and (self.dag_id is self.run_id is self.task_id is None or self._matches_origin(letter.origin))
        )

    def _matches_origin(self, origin: Origin | None) -> bool:
        return (
            self.dag_id in (None, origin and origin.dag_id)
            and self.run_id in (None, origin and origin.run_id)
            and self.task_id in (None, origin and origin.task_id)
        )


class EveryLetter(Selection):
    """Every dead letter, parked or not, but for jobs that match no consumer."""

    @property
    def names_unaccounted(self) -> bool:
        """Match no job that is gone without evidence, whatever the sequences."""
        return False

    def matches(self, letter: DeadLetter, now: datetime) -> bool:
        """Match every letter."""
        return True


class NotKept(Selection):
    """The dead letters, parked or not, that a queue keeps no longer; none where no policy says so."""

    keep: Retention | None = None

    @field_serializer("keep")
    def _describe(self, keep: Retention | None) -> str | None:
        return keep.describe() if keep else None

    def age_of(self, letter: DeadLetter) -> int | None:
        """Return for how many nanoseconds a letter is kept; ``None`` for as long as it is stored."""
        reason, is_parked = letter.death.reason, letter.parked is not None
        return self.keep.age_of(reason, is_parked=is_parked) if self.keep else None

    def matches(self, letter: DeadLetter, now: datetime) -> bool:
        """Return whether a letter is older than it is kept."""
        age = self.age_of(letter)
        return age is not None and now - (letter.kept_since or letter.death.died_at) >= _timedelta(age)


def _selection_error(source: object, error: Exception) -> SelectionError:
    problems = "; ".join(
        ": ".join(part for part in (shown_field(problem["loc"]), problem["msg"].removeprefix("Value error, ")) if part)
        for problem in (error.errors(include_url=False) if isinstance(error, ValidationError) else [])
    )
    return SelectionError(
        f"expected a selection of dead letters by {', '.join(Selection.model_fields)}; found {shown_value(source)}:"
        f" {problems or error}"
    )


def _timedelta(nanoseconds: int) -> timedelta:
    return timedelta(microseconds=nanoseconds / 1_000)
