"""Models of a queue's history, from samples that all API workers share, and from the times at which jobs died."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel


class Point(MonitorModel):
    """A queue at one time.

    A point whose numbers are all ``null`` says that nobody sampled the queue from there to the next point: no line.

    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param dead: certain dead letters of the last scan before that time; without a scan, ``dead_in_queue``
    :param in_per_second: stored a second, since the point before
    :param out_per_second: gone a second, likewise
    """

    at: datetime
    pending: int | None
    in_flight: int | None
    dead: int | None
    in_per_second: float | None
    out_per_second: float | None


class Deaths(MonitorModel):
    """How many jobs died in a time, by the times that the server stored: known for times without samples too.

    :param at: when it begins
    :param seconds: how long it is
    :param count: how many died
    """

    at: datetime
    seconds: float
    count: int


class History(MonitorModel):
    """The history of a queue.

    :param since: when it begins
    :param until: when it ends
    :param points: oldest first, at most 360
    :param deaths: oldest first, without times in which none died
    :param deaths_known_since: deaths before that time are left out, since their records are gone or weren't read;
        ``null`` where all are known
    :param stored: where the samples are stored: ``stream``, shared by all API workers, or ``memory`` of this one
    :param sampler: who samples, as it names itself; ``null`` where nobody does
    :param problem: why the samples aren't stored, if they aren't
    """

    since: datetime
    until: datetime
    points: list[Point] = Field(default_factory=list)
    deaths: list[Deaths] = Field(default_factory=list)
    deaths_known_since: datetime | None = None
    stored: Literal["stream", "memory"] = "memory"
    sampler: str | None = None
    problem: str | None = None
