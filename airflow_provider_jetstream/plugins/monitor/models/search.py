"""Models of a search in letters: a stream of lines, each one of these."""

from typing import Literal

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.letters import LetterLine, LetterState


class FoundLetter(MonitorModel):
    """A letter that was found.

    :param where: what of it holds the text: ``job_id``, ``error``, ``body``, ``header``
    :param state: ``dead`` or ``parked``, or what became of it, as the audit says
    """

    type: Literal["found"] = "found"
    letter: LetterLine
    state: LetterState
    where: list[Literal["job_id", "error", "body", "header"]]


class SearchProgress(MonitorModel):
    """How far the search has come; every second at least.

    :param read: letters that were read
    :param of: letters that are to be read
    """

    type: Literal["progress"] = "progress"
    read: int
    of: int


class SearchEnd(MonitorModel):
    """The last line.

    :param reason: ``all`` were read; ``limit`` so many were found; ``time`` the time was over, in
        which letters are also read for the first time; ``error``
    :param next_after: ``after`` of a search that goes on; ``null`` where all were read
    :param not_shown: letters that were left out, of DAGs whose task instances the user may not see
    :param problem: with ``error``, what went wrong
    """

    type: Literal["end"] = "end"
    reason: Literal["all", "limit", "time", "error"]
    read: int
    found: int
    next_after: int | None = None
    not_shown: int = 0
    problem: str | None = Field(default=None)
