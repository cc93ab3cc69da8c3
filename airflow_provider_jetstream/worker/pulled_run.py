"""The jobs that a pull request delivers, which are parsed many at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.worker.pulled_message import SHORT_REPLY, PulledMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_END: Final = b"\r\n"


class PulledRun:
    """The jobs of one subscription, in the form in which nearly all servers send them.

    A status of the server is none of them, nor is a job whose subject looks like one.

    :param status_prefix: how the subject of a status begins
    :param on_jobs: gets jobs that follow each other
    """

    def __init__(self, status_prefix: bytes, on_jobs: Callable[[Sequence[PulledMessage]], None]) -> None:
        self._status_prefix = status_prefix
        self._on_jobs = on_jobs

    def bind(self, number: int) -> None:
        """Set the number of the subscription."""
        frame = rb"(H?)MSG ([^ \t\r\n]+) %d (%b) (?:(\d{1,9}) )?(\d{1,9})\r\n" % (number, SHORT_REPLY)
        self._frame = re.compile(frame)

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the whole jobs that begin at a position over; return where they end, how many they are, and their size.

        :return: the size is that of their bodies
        """
        jobs: list[PulledMessage] = []
        position, total, match_frame = start, 0, self._frame.match
        while match := match_frame(data, position):
            has_headers, subject, reply, *fields, header_size, size = match.groups()
            begin = match.end()
            body, end = begin + int(header_size or 0), begin + int(size)
            is_form = bool(has_headers) is (header_size is not None) and body <= end
            if not is_form or data[end : end + 2] != _END or subject.startswith(self._status_prefix):
                # Cut short, or not what it looks like: the parser finds out.
                break
            jobs.append(PulledMessage.of(subject, reply, fields, data[begin:body], data[body:end]))
            position, total = end + len(_END), total + end - body
        if jobs:
            self._on_jobs(jobs)
        return position, len(jobs), total
