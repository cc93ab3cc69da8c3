"""What a redrive is asked to do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.repair import Transform


class Protocol(StrEnum):
    """How letters are brought back."""

    AUTO = "auto"
    """The safest that the queue allows."""
    COPY = "copy"
    """Store a copy under an id of the letter's own, then remove the original."""
    ATOMIC = "atomic"
    """Store the copy together with a marker, all or nothing, then remove the original."""
    IN_PLACE = "in_place"
    """Have the consumer deliver the originals again; all of its letters at once."""


@dataclass(frozen=True, slots=True)
class RedriveRequest:
    """What a redrive is asked to do.

    :param selection: which letters; all in circulation where absent
    :param subject: where the jobs go; each where it was where absent. A subject of the same queue
    :param transform: repairs letters on their way
    :param rate: letters a second at most; as fast as possible where absent
    :param protocol: how
    :param max_redrives: letters redriven so often before are parked instead; 0 parks all
    :param why: a reason, for the audit
    :param who: who does it, for the audit; what JSON can hold
    :param run: the redrive's key, one token: a redrive with the key of one that was cut off goes on with it
    :param keep_open: whether it isn't over when all letters are done: who waits for the jobs may be cut off in that too
    :raises RedriveOrderError: parts of it can't be used, or not together
    """

    selection: Selection = field(default_factory=Selection)
    subject: str | None = None
    transform: Transform | None = None
    rate: float | None = None
    protocol: Protocol = Protocol.AUTO
    max_redrives: int | None = None
    why: str | None = None
    who: dict[str, Any] = field(default_factory=dict)
    run: str | None = None
    keep_open: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not (isfinite(self.rate) and self.rate > 0):
            raise RedriveRequestError(
                f"expected a rate above 0 letters a second, found {self.rate}: leave it out for all speed"
            )
        if self.max_redrives is not None and self.max_redrives < 0:
            raise RedriveRequestError(f"expected max_redrives of at least 0, found {self.max_redrives}")
        if self.subject is not None and (problem := subject_problem(self.subject, wildcards=False)):
            raise RedriveRequestError(f"expected a subject to redrive to, found {self.subject!r}: {problem}")
        if self.run is not None and ("." in self.run or subject_problem(self.run, wildcards=False)):
            raise RedriveRequestError(f"expected a key without dots, wildcards and white space, found {self.run!r}")
        if problem := self._unwritable():
            raise RedriveRequestError(f"expected who and why to fit a record in JSON, found otherwise: {problem}")
        if self.protocol == Protocol.IN_PLACE and (asked := self.impossible_in_place):
            raise RedriveRequestError(
                f"expected nothing but the protocol, found {', '.join(asked)}: a redrive in place brings back all"
                " letters of a consumer as they are; leave them out, or use another protocol"
            )

    @property
    def impossible_in_place(self) -> tuple[str, ...]:
        """What is asked for that a redrive in place can't do."""
        asked = {
            "selection": not self.selection.selects_all,
            "subject": self.subject,
            "transform": self.transform,
            "rate": self.rate,
            "max_redrives": self.max_redrives is not None,
        }
        return tuple(name for name, there in asked.items() if there)

    def must_park(self, letter: DeadLetter) -> bool:
        """Tell whether a letter is to be parked rather than redriven.

        :param letter: the dead letter
        :return: whether it is
        """
        return self.max_redrives is not None and letter.redrives >= self.max_redrives

    def _unwritable(self) -> str:
        """Say what keeps the audit from being written, before a copy is stored that it couldn't record."""
        try:
            json.dumps([self.who, self.why], ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return str(error)
        return ""
