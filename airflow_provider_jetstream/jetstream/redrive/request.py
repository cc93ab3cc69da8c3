"""The request for a redrive: which letters, how, and when a redrive in waves stops at the gate after a wave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.dead_letters.selection import NotKept, Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.function_problem import function_problem
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
from airflow_provider_jetstream.jetstream.task_values import TaskValue
from airflow_provider_jetstream.jetstream.units import format_duration, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.repair import Transform


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


# Longer than the lease of a process that was killed.
LEASE_TIMEOUT = 60.0
# Of the number of a subject's token.
_MOST_DIGITS = 3
# Discards the letters that the queue's declaration keeps no longer.
BY_POLICY: Final = "by_policy"
Discard: TypeAlias = bool | Literal["by_policy"]


_OPTIONAL_TEXT = ((str, NoneType), "text")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "selection": (Selection, "a Selection"),
    "subject": _OPTIONAL_TEXT,
    "rate": ((int, float, NoneType), "a number of letters a second"),
    "max_redrives": ((int, NoneType), "a whole number"),
    "order_key": _OPTIONAL_TEXT,
    "why": _OPTIONAL_TEXT,
    "who": (dict, "a dict"),
    "run": _OPTIONAL_TEXT,
    "without_copy": (bool, "True or False"),
    "undo": _OPTIONAL_TEXT,
    "count_under_pause": (bool, "True or False"),
    "keep_open": (bool, "True or False"),
}


class Protocol(StrEnum):
    """How letters are brought back."""

    AUTO = "auto"
    """The safest protocol that the queue allows."""
    COPY = "copy"
    """Store a copy under an id that only this letter has, then remove the original."""
    IN_PLACE = "in_place"
    """Make the consumer deliver the originals again, all of its letters at once."""


@checked_field_names(RedriveRequestError)
@dataclass(frozen=True, slots=True)
class RedriveRequest(TaskValue):
    """The request for a redrive.

    :param selection: which letters; all in circulation where absent
    :param subject: the subject of the new jobs, one of the same queue or of the target; each job's own subject where
        absent
    :param target: the work queue that gets the new jobs; the same queue where absent
    :param transform: repairs letters before they become jobs
    :param rate: letters per second at most; as fast as possible where absent
    :param protocol: how letters are brought back
    :param max_redrives: letters that were redriven so often are parked instead; 0 parks all
    :param order_key: where each letter states its key: ``header:<name>``, ``subject:<number of the token>`` or
        ``body:<field>``. Letters of a key come back one after the other, each once the job before it has completed
    :param why: a reason, for the audit
    :param who: who requests it, for the audit; any JSON value
    :param run: the redrive's key, one token: a redrive with the key of one that was cut off continues it
    :param lease_timeout: how long to wait at most for another operation that changes the queue's letters: seconds, a
        :class:`~datetime.timedelta`, or text such as ``"2m"``
    :param count_under_pause: pause consumers until nothing is in flight, for their ack wait and half a minute
        at most, so that more letters are certain; needs nats-server 2.11
    :param waves: how many letters each wave brings back, ``rest`` as the last one for all that remain, such as
        ``[10, 100, "rest"]``: the ends of a wave's jobs are awaited before the next; one wave without a gate where
        absent
    :param stop_when: when the redrive stops at the gate after a wave, until a person resumes or aborts it: a
        :class:`~airflow_provider_jetstream.jetstream.StopWhen`, its dict, or the share of a wave's jobs that may die
        again; where absent, 0.2
    :param keep_open: whether the redrive stays open in the audit once all letters are handled, because a caller that
        waits for the jobs may be cut off in that too
    :param patch: operations by RFC 6902 on the letters' JSON bodies, in place of a transform: a
        :class:`~airflow_provider_jetstream.jetstream.JsonPatch`, its JSON text or its operations
    :param discard: whether letters are dropped instead, recorded in the audit, from which they can be brought back
        for as long as it has the record and, where the record refers to the archive, that has the copy. With
        ``"by_policy"`` these are the letters that ``dead_letters.keep`` of the queue's declaration keeps no longer
    :param without_copy: with ``discard``: whether also letters are dropped of which there would be no copy, so that
        nothing brings them back
    :param undo: the id of a redrive that discarded letters: these come back, parked; all of them, or the ``sequences``
        of the selection
    :raises RedriveRequestError: a field has an invalid value, or fields exclude each other
    """

    selection: Selection = field(default_factory=Selection)
    subject: str | None = None
    target: WorkQueue | None = None
    transform: Transform | None = None
    rate: float | None = None
    protocol: Protocol = Protocol.AUTO
    max_redrives: int | None = None
    order_key: str | None = None
    why: str | None = None
    who: dict[str, Any] = field(default_factory=dict)
    run: str | None = None
    lease_timeout: timedelta | float | str = LEASE_TIMEOUT
    count_under_pause: bool = False
    keep_open: bool = False
    waves: Sequence[WaveSize] = ()
    stop_when: StopWhen | Mapping[str, Any] | float | None = None
    patch: JsonPatch | Sequence[Mapping[str, Any]] | str | None = None
    discard: Discard = False
    without_copy: bool = False
    undo: str | None = None

    def __post_init__(self) -> None:
        self._parse()
        if unusable := self._type_problem() or self._limit_problem():
            raise RedriveRequestError(unusable)
        if self.subject is not None and (problem := subject_problem(self.subject, wildcards=False)):
            raise RedriveRequestError(f"expected a subject to redrive to, found {self.subject!r}: {problem}")
        if self.subject is not None and ("{" in self.subject or "}" in self.subject):
            raise RedriveRequestError(
                f"expected a subject to redrive to, found {self.subject!r}: its braces would be part of the subject;"
                " leave it out, or have a transform name a subject for each letter"
            )
        if self.run is not None and ("." in self.run or subject_problem(self.run, wildcards=False)):
            raise RedriveRequestError(f"expected a key without dots, wildcards and white space, found {self.run!r}")
        if problem := self._discard_problem() or self._target_problem():
            raise RedriveRequestError(problem)
        if problem := self._wave_problem() or self._patch_problem():
            raise RedriveRequestError(problem)
        if self.order_key is not None and (problem := _order_key_problem(self.order_key)):
            raise RedriveRequestError(problem)
        if problem := self._audit_problem():
            raise RedriveRequestError(f"expected who and why to fit a record in JSON, found otherwise: {problem}")
        if self.protocol == Protocol.IN_PLACE and (fields := self.impossible_in_place):
            raise RedriveRequestError(
                f"expected nothing but the protocol, found {', '.join(fields)}: a redrive in place brings back all"
                " letters of a consumer as they are; leave them out, or use another protocol"
            )

    def _parse(self) -> None:
        if self.protocol in tuple(Protocol):
            # Its name is as good as the protocol itself.
            object.__setattr__(self, "protocol", Protocol(self.protocol))
        object.__setattr__(self, "waves", checked_waves(self.waves))
        try:
            object.__setattr__(self, "lease_timeout", parse_seconds(self.lease_timeout))
        except ValueError as error:
            raise RedriveRequestError(f"lease_timeout: {error}") from None
        if self.stop_when is not None:
            object.__setattr__(self, "stop_when", StopWhen.of(self.stop_when))
        if self.patch is not None:
            object.__setattr__(self, "patch", JsonPatch.of(self.patch))
        if self.discard == BY_POLICY and self.selection == Selection():
            # None, until the queue's policy is known.
            object.__setattr__(self, "selection", NotKept())

    @property
    def operation(self) -> str:
        """What the holder of the queue's lease does, in words."""
        if self.discard or self.undo:
            return "discard" if self.discard else "undo a discard"
        if self.max_redrives == 0:
            return "park"
        return "redrive in place" if self.protocol == Protocol.IN_PLACE else "redrive"

    @property
    def makes_jobs(self) -> bool:
        """Whether letters become jobs, rather than being parked or discarded, all of them."""
        return not (self.discard or self.undo) and self.max_redrives != 0

    @property
    def impossible_in_place(self) -> tuple[str, ...]:
        """The names of the set fields that a redrive in place can't honour."""
        fields = {
            "selection": not self.selection.selects_all,
            "subject": self.subject,
            "target": self.target is not None,
            "transform": self.transform,
            "patch": self.patch,
            "rate": self.rate,
            "max_redrives": self.max_redrives is not None,
            "discard": self.discard,
            "undo": self.undo,
            "order_key": self.order_key,
            "waves": self.waves,
        }
        return tuple(name for name, is_set in fields.items() if is_set)

    @property
    def lease_seconds(self) -> float:
        """For how many seconds to wait at most for another operation that changes the queue's letters."""
        return parse_seconds(self.lease_timeout)

    @property
    def stop_rule(self) -> StopWhen:
        """When it stops at the gate after a wave."""
        return StopWhen() if self.stop_when is None else StopWhen.of(self.stop_when)

    @property
    def body_patch(self) -> JsonPatch | None:
        """What it changes in the letters' bodies."""
        return None if self.patch is None else JsonPatch.of(self.patch)

    def why_of(self, letter: DeadLetter) -> str | None:
        """Return why it does what it does to a letter."""
        age = self.selection.age_of(letter) if isinstance(self.selection, NotKept) else None
        return self.why if age is None else f"kept {format_duration(age)}; {self.why}"

    def must_park(self, letter: DeadLetter) -> bool:
        """Return whether a letter is to be parked rather than redriven."""
        return bool(self.undo) or (self.max_redrives is not None and letter.redrives >= self.max_redrives)

    def _type_problem(self) -> str:
        """Return which field has a value of another type than it can have; empty where none has."""
        if problem := function_problem("transform", self.transform, "DeadLetter"):
            return problem
        if self.discard != BY_POLICY and not isinstance(self.discard, bool):
            return f'expected True, False or "{BY_POLICY}" as discard, found {self.discard!r}: convert it'
        for name, (types, expected) in _TYPES.items():
            value = getattr(self, name)
            is_flag = isinstance(value, bool)
            if not isinstance(value, types) or is_flag != (types is bool):
                return f"expected {expected} as {name}, found {value!r}: convert it"
        return ""

    def _limit_problem(self) -> str:
        """Return which limit or protocol can't be used; empty where each can."""
        if self.protocol not in tuple(Protocol):
            return f"expected a protocol among {', '.join(Protocol)}, found {self.protocol!r}: choose one"
        if self.rate is not None and not (isfinite(self.rate) and self.rate > 0):
            return f"expected a rate above 0 letters a second, found {self.rate}: leave it out for all speed"
        if self.max_redrives is not None and self.max_redrives < 0:
            return f"expected max_redrives of at least 0, found {self.max_redrives}"
        return ""

    def _discard_problem(self) -> str:
        """Return what a discard or its undo can't have; empty where it has nothing of that."""
        if self.without_copy and not self.discard:
            return "expected discard beside without_copy, found none: it drops letters of which no copy would be stored"
        if not (self.discard or self.undo):
            return ""
        if self.discard == BY_POLICY and not isinstance(self.selection, NotKept):
            return (
                "expected no selection beside discard by_policy, found one: the policy selects; leave one of them out"
            )
        what = "undo" if self.undo else "discard"
        others = set(self.impossible_in_place) - {what, "selection", "rate"}
        if self.protocol != Protocol.AUTO:
            others.add("protocol")
        if others:
            named = ", ".join(sorted(others))
            return f"expected nothing that makes or changes jobs beside {what}, found {named}: leave that out"
        if self.undo and self.selection != Selection(sequences=self.selection.sequences):
            return "expected nothing but sequences in the selection of an undo, found other fields: leave them out"
        return ""

    def _target_problem(self) -> str:
        """Return why the target can't get the new jobs; empty if it can, as far as that shows without a server."""
        if self.target is None:
            return ""
        if not isinstance(self.target, WorkQueue):
            return f"expected a WorkQueue as target, found {type(self.target).__name__}: load it with WorkQueue.load"
        if self.subject is None and self.transform is None:
            return (
                f"expected a subject of {self.target.name} for the new jobs, found none: a letter's own subject belongs"
                " to its own queue; name one, or have a transform name one for each letter"
            )
        return ""

    def _wave_problem(self) -> str:
        """Return why the redrive can't go in waves as the request says; empty if it can."""
        if self.stop_when is not None and not self.waves:
            return "expected waves beside stop_when, found none: name them, such as [10, 100, 'rest']"
        if self.waves and self.order_key is not None:
            return (
                "expected either waves or order_key, found both: a redrive in the order of each key has waves of its"
                " own, and a job that dies again holds only the letters of its key up"
            )
        if self.waves and self.max_redrives == 0:
            return "expected letters that become jobs in waves, found max_redrives 0, which parks all: leave waves out"
        return ""

    def _patch_problem(self) -> str:
        """Return why the letters can't be patched; empty if they can."""
        if self.patch is not None and self.transform is not None:
            return "expected either a patch or a transform, found both: have the transform do what the patch does"
        if self.patch is not None and self.max_redrives == 0:
            return "expected letters that become jobs for a patch, found max_redrives 0, which parks all as they are"
        return ""

    def _audit_problem(self) -> str:
        """Return why the audit couldn't record the request, before a copy is stored; empty if it can."""
        try:
            json.dumps([self.who, self.why], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return str(error)
        return ""


def _order_key_problem(order_key: str) -> str:
    """Return a sentence that says why a text doesn't say where letters state their key; empty if it does."""
    kind, _, name = order_key.partition(":")
    is_number = name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS and int(name) > 0
    if name and (kind in ("header", "body") or (kind == "subject" and is_number)):
        return ""
    return (
        "expected header:<name>, subject:<number of the token, from 1> or body:<field> as order_key, found"
        f" {order_key!r}"
    )
