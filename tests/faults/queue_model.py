"""A plain model of a work queue: for each job the states in which it can be.

Usually that is one state. Where a program is killed in the middle of a step, it is one of several, until a delivery or
the report of a redrive shows which. What the server does that no state allows raises a :class:`ModelError`.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# A server that is killed may have forgotten what its consumers did within this time (it writes their states later).
FORGOTTEN_SECONDS = 2.5


class State(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    """It is stored, and its consumer delivers it."""
    HELD = "held"
    """A worker has it, or had it and its ack wait hasn't passed."""
    DEAD = "dead"
    """It is stored and has used up its deliveries."""
    TERMINATED = "terminated"
    """A worker terminated it: the archive alone has it."""
    PARKED = "parked"
    """It is out of circulation."""
    DONE = "done"
    """A worker has acknowledged it."""
    DELETED = "deleted"
    """Somebody deleted it: the archive alone has it, and nothing says how it ended."""


GONE_OR_DEAD = frozenset({State.DEAD, State.TERMINATED, State.DELETED})


class ModelError(AssertionError):
    """A job was lost, was done twice, or was taken for what it isn't."""


@dataclass(slots=True)
class ModelJob:
    """One job, by its body.

    :param possible: the states in which it can be
    :param done: how often workers have finished it
    :param cut_off: whether a redrive of it was cut off: until another one has finished, it may be listed as a dead
        letter though its copy is stored, or done
    :param changed_at: when its state changed last, by the monotonic clock
    :param lapses_at: when its ack wait passes, where no worker has it any more
    :param after_lapse: its state from then on
    """

    body: str
    possible: frozenset[State]
    done: int = 0
    cut_off: bool = False
    changed_at: float = field(default_factory=time.monotonic)
    lapses_at: float | None = None
    after_lapse: State = State.WAITING

    def become(self, *states: State) -> None:
        """Be in one of these states from now on."""
        self.possible = frozenset(states)
        self.changed_at = time.monotonic()
        self.lapses_at = None

    @property
    def is_dead(self) -> bool:
        """Whether it can be nothing but dead, so that a scan has to show it."""
        return self.possible <= GONE_OR_DEAD and not self.cut_off

    def __str__(self) -> str:
        return f"{self.body} ({' or '.join(sorted(self.possible))}{', cut off' if self.cut_off else ''})"


class QueueModel:
    """The jobs of one queue.

    :param max_deliver: how many deliveries a job has
    :param ack_wait: seconds until a job is delivered again that no worker answers
    """

    def __init__(self, max_deliver: int, ack_wait: float) -> None:
        self._max_deliver = max_deliver
        self._ack_wait = ack_wait
        self._bodies: dict[int, str] = {}
        self.jobs: dict[str, ModelJob] = {}

    def published(self, body: str, sequence: int) -> None:
        """Note that a job is stored."""
        self.jobs[body] = ModelJob(body, frozenset({State.WAITING}))
        self._bodies[sequence] = body

    def delivered(self, body: str, sequence: int) -> None:
        """Note that a worker has got a job."""
        job = self._job(body)
        self._bodies[sequence] = body
        if State.WAITING not in job.possible:
            raise ModelError(f"a worker got {job}")
        job.become(State.HELD)

    def acknowledged(self, body: str) -> None:
        """Note that a worker has finished a job."""
        job = self._job(body)
        job.done += 1
        job.become(State.DONE)
        if job.done > 1:
            raise ModelError(f"{body} was done {job.done} times")

    def failed(self, body: str, attempt: int) -> None:
        """Note that a worker has given back a job.

        :param attempt: the number of the delivery, as the server stated it
        """
        self._job(body).become(self._after(attempt))

    def terminated(self, body: str) -> None:
        """Note that a worker has terminated a job."""
        self._job(body).become(State.TERMINATED)

    def abandoned(self, body: str, attempt: int) -> None:
        """Note that the worker which had a job is gone: its ack wait has yet to pass."""
        job = self._job(body)
        job.become(State.HELD, self._after(attempt))
        job.lapses_at = time.monotonic() + 1.2 * self._ack_wait
        job.after_lapse = self._after(attempt)

    def deleted(self, body: str) -> None:
        """Note that somebody has deleted a stored job."""
        self._job(body).become(State.DELETED)

    def redelivered_from_the_start(self) -> None:
        """Note that the consumer was created anew: it delivers all that is stored."""
        for job in self.jobs.values():
            if job.possible & {State.HELD, State.DEAD}:
                job.become(*(job.possible - {State.HELD, State.DEAD}), State.WAITING)

    def server_killed(self) -> None:
        """Note that the server may have forgotten what its consumers did just before: deliveries, deaths, resets."""
        since = time.monotonic() - FORGOTTEN_SECONDS
        stored = {State.WAITING, State.HELD, State.DEAD}
        for job in self.jobs.values():
            if job.changed_at > since and job.possible & stored:
                after, job.changed_at = job.possible | stored, time.monotonic()
                job.become(*after)
                # The server counts the ack wait of what it hasn't forgotten from its start.
                job.lapses_at, job.after_lapse = time.monotonic() + 2 * self._ack_wait, State.HELD

    def redriven(self, sequences: Mapping[int, int], parked: Iterable[int]) -> None:
        """Note what a redrive has reported.

        :param sequences: original sequence → new sequence
        :param parked: original sequences
        """
        for old, new in sequences.items():
            body = self._body(old)
            job, is_known = self._job(body), new != old and self._bodies.get(new) == body
            self._bodies[new] = body
            if job.done:
                # A redrive that was cut off had stored the copy already, and a worker did it.
                job.become(State.DONE)
            elif is_known and job.cut_off:
                # Likewise, and a worker has had the copy: it is what that worker made of it.
                continue
            elif job.cut_off:
                job.become(*(job.possible - {State.TERMINATED, State.DELETED, State.PARKED}), State.WAITING)
            elif job.possible & (GONE_OR_DEAD | {State.PARKED}):
                job.become(State.WAITING)
            else:
                raise ModelError(f"{job} was redriven")
        for sequence in parked:
            job = self._job(self._body(sequence))
            if job.done or not (job.cut_off or job.possible & GONE_OR_DEAD):
                raise ModelError(f"{job} was parked")
            job.become(State.PARKED)
        for body in {self._bodies[sequence] for sequence in (*sequences, *parked)}:
            self._job(body).cut_off = False

    def finished(self, *, evidence_lost: bool) -> None:
        """Note that a redrive of all letters has finished without a failure: none of them is dead any more.

        :param evidence_lost: whether jobs may be gone without evidence, which are redriven only by name
        """
        redriven = {State.DEAD} if evidence_lost else GONE_OR_DEAD
        for job in self.jobs.values():
            if not (rest := job.possible - redriven):
                raise ModelError(f"{job} wasn't redriven")
            if State.PARKED not in rest:
                job.cut_off = False
            job.possible = rest

    def cut_off(self, bodies: Iterable[str], state: State) -> None:
        """Note that a redrive was killed or failed on the way.

        :param bodies: the jobs that it may have redriven
        :param state: what they became, if it got so far
        """
        for body in bodies:
            job = self._job(body)
            if job.possible & (GONE_OR_DEAD | {State.PARKED}) or job.cut_off:
                lapse = job.lapses_at, job.after_lapse
                job.become(*job.possible, *([] if job.done else [state]))
                job.lapses_at, job.after_lapse = lapse
                job.cut_off = True

    def scanned(self, found: Collection[int], uncertain: int, parked: Collection[int] | None = None) -> None:
        """Check what a scan has found: dead and parked letters by their sequences, and a count of uncertain ones.

        Each of them has to be dead, and each dead job has to be listed or counted. Whose ack wait passed while the scan
        read may or may not be among them: call :meth:`lapse` before the scan.
        """
        listed = {self._body(sequence) for sequence in found}
        for job in map(self._job, listed):
            if not (job.possible & {State.DEAD, State.TERMINATED} or job.cut_off):
                raise ModelError(f"{job} was listed as a dead letter")
        unlisted = [job for job in self.jobs.values() if job.is_dead and job.body not in listed]
        if len(unlisted) > uncertain:
            named = ", ".join(map(str, unlisted))
            raise ModelError(f"of dead jobs {uncertain} are uncertain, and these aren't listed: {named}")
        if parked is None:
            return
        set_aside = {self._body(sequence) for sequence in parked}
        for job in self.jobs.values():
            if job.body in set_aside and not (State.PARKED in job.possible or job.cut_off):
                raise ModelError(f"{job} was listed as parked")
            if job.possible == {State.PARKED} and not job.cut_off and job.body not in set_aside:
                raise ModelError(f"{job} isn't listed as parked")

    def lapse(self) -> None:
        """Move on the jobs whose ack wait has passed since their worker was gone."""
        now = time.monotonic()
        for job in self.jobs.values():
            if job.lapses_at is not None and now > job.lapses_at:
                lapsed = job.possible - {State.HELD}
                job.become(*(lapsed or {job.after_lapse}))

    @property
    def has_lapsing(self) -> bool:
        """Whether the ack wait of a job is about to pass."""
        return any(job.lapses_at is not None for job in self.jobs.values())

    def in_state(self, *states: State) -> list[str]:
        """Return the bodies of the jobs that can be in one of these states."""
        return [job.body for job in self.jobs.values() if job.possible & set(states)]

    def cut_off_bodies(self) -> list[str]:
        """Return the bodies of the jobs whose redrive was cut off."""
        return [job.body for job in self.jobs.values() if job.cut_off]

    def bodies(self, sequences: Iterable[int]) -> list[str]:
        """Return the bodies of the jobs that have these sequences."""
        return [self._body(sequence) for sequence in sequences]

    def last_sequence(self, body: str) -> int:
        """Return the highest sequence that a job is known to have had."""
        return max(sequence for sequence, other in self._bodies.items() if other == body)

    def problems(self) -> Sequence[str]:
        """Return what is wrong at the end: each job has to be done, once."""
        return [f"{job}: done {job.done} times" for job in self.jobs.values() if job.done != 1]

    def _after(self, attempt: int) -> State:
        return State.DEAD if attempt >= self._max_deliver else State.WAITING

    def _body(self, sequence: int) -> str:
        if sequence not in self._bodies:
            raise ModelError(f"{sequence} is no job")
        return self._bodies[sequence]

    def _job(self, body: str) -> ModelJob:
        return self.jobs[body]
