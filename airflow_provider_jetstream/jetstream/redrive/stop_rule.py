"""When a redrive in waves stops at the gate after a wave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.task_values import TaskValue
from airflow_provider_jetstream.jetstream.units import parse_seconds

if TYPE_CHECKING:
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes

REST = "rest"
DIED_AGAIN = 0.2

Then: TypeAlias = 'Literal["stop", "go_on", "park"]'
# How many letters a wave has at most; "rest" for all that remain.
WaveSize: TypeAlias = 'int | Literal["rest"]'


@checked_field_names(RedriveRequestError)
@dataclass(frozen=True, slots=True)
class StopWhen(TaskValue):
    """When a redrive in waves stops at the gate after a wave, until a person resumes or aborts it.

    Whatever it says, a wave of which it isn't known how its jobs ended stops there too.

    :param died_again: more than this share of a wave's jobs died again, from 0 to 1
    :param then: what follows where more died again: ``stop``; ``go_on`` all the same; or ``park`` the letters that died
        of the same cause as before (the same fingerprint), and stop only if more than that share died of another one
    :param within: for how long the ends of a wave's jobs are awaited: seconds, a :class:`~datetime.timedelta`, or text
        such as ``"10m"``; without limit where absent
    :raises RedriveRequestError: a field has an invalid value
    """

    died_again: float = DIED_AGAIN
    then: Then = "stop"
    within: float | timedelta | str | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.died_again) or not 0 <= self.died_again <= 1:
            raise RedriveRequestError(
                f"expected the share of jobs that may die again as stop_when, from 0 to 1, found {self.died_again!r}"
            )
        if self.then not in ("stop", "go_on", "park"):
            raise RedriveRequestError(f"expected stop, go_on or park as then of stop_when, found {self.then!r}")
        if self.within is not None:
            object.__setattr__(self, "within", _seconds_above_zero(self.within))

    @property
    def within_seconds(self) -> float | None:
        """For how many seconds the ends of a wave's jobs are awaited; ``None`` without limit."""
        return None if self.within is None else parse_seconds(self.within)

    @classmethod
    def of(cls, source: object) -> StopWhen:
        """Build a rule from any form that requests and operators accept.

        :param source: a rule, the share of jobs that may die again, or the rule's fields as a dict
        :raises RedriveRequestError: it is none of these, or a field has an invalid value
        """
        if isinstance(source, StopWhen):
            return source
        if isinstance(source, int | float) and _is_number(source):
            return cls(died_again=source)
        if isinstance(source, Mapping):
            return cls(**{str(name): value for name, value in source.items()})
        raise RedriveRequestError(
            f"expected a share from 0 to 1, a StopWhen or its dict as stop_when, found {source!r}: correct it"
        )

    def exceeds(self, outcomes: RedriveOutcomes, died_again: int | None = None) -> bool:
        """Return whether too many jobs of a wave died again.

        :param outcomes: of the wave
        :param died_again: how many count as such, where not all of them do
        """
        died_again = outcomes.died_again if died_again is None else died_again
        return died_again > self.died_again * _total(outcomes)

    def is_unknown(self, outcomes: RedriveOutcomes) -> bool:
        """Return whether too many jobs may have ended in any way."""
        return bool(outcomes.still_running) or outcomes.unknown > self.died_again * _total(outcomes)


def checked_waves(waves: object) -> tuple[WaveSize, ...]:
    """Return the sizes of a request's waves; empty where it has none.

    :raises RedriveRequestError: they aren't whole numbers, or ``rest`` isn't the last one
    """
    if waves is None:
        return ()
    listed: list[Any] = list(waves) if isinstance(waves, list | tuple) else [waves]
    for number, size in enumerate(listed, 1):
        is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not is_count and not (size == REST and number == len(listed)):
            raise RedriveRequestError(
                f"expected waves as whole numbers above 0, and rest as the last one at most, such as [10, 100, 'rest'],"
                f" found {waves!r}"
            )
    return tuple(listed)


def _total(outcomes: RedriveOutcomes) -> int:
    return outcomes.completed + outcomes.died_again + outcomes.still_running + outcomes.unknown


def _seconds_above_zero(within: object) -> float:
    try:
        seconds = parse_seconds(within)
    except ValueError as error:
        raise RedriveRequestError(f"within of stop_when: {error}") from None
    if not seconds:
        raise RedriveRequestError(f"expected a time above 0 as within of stop_when, found {within!r}")
    return seconds


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
