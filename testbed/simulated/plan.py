"""What a world is like, and what really happens in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

NAMES: Final = ("n1", "n2", "n3")
EDITS: Final = ("filters", "max_deliver", "sample_freq", "republish", "purge", "delete", "recreate")
# In seconds: two clocks differ by less than the package's skew.
CLOCK: Final = 2.0
_CLUSTERED = 0.3
_LOSING: Final = {"power", "purge", "delete", "republish"}
_ROUGH = 0.6
_PACE = 0.3
_SLOW = 3.0
_AGED = 0.5


class Fault(NamedTuple):
    """Something that goes wrong.

    :param at: when, in seconds
    :param kind: what
    :param pick: what its details are drawn from
    """

    at: float
    kind: str
    pick: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a world is like.

    :param jobs: how many jobs each publisher publishes
    :param fails: the share of attempts that fail
    :param terminates: the share of attempts that give the job up
    :param outlasts: the share of a foreign worker's attempts that take longer than the ack wait
    :param waits: how many waits there are
    :param watchers: how many watch dead letters
    :param people: how many cancel jobs and park letters
    :param pace: the longest time that work takes, in seconds
    :param consumers: how many consumers the queue has, each with subjects of its own
    :param faults: what goes wrong, in order; nothing in a calm world
    :param clocks: of a cluster by how many nanoseconds each server's clock is ahead; empty for one server
    :param full: the stream that takes few messages; empty where none does
    :param handlers: how many programs handle entries of the dead letter queue
    :param tidiers: how many discard dead letters, and undo that
    :param keep: for how many seconds letters of each reason are kept, by the policy that tidiers apply; empty for none
    :param later: what comes of tasks that have published: ``clear``, ``rerun`` where their run is deleted and made
        again, or nothing
    """

    version: tuple[int, int, int]
    jobs: tuple[int, ...]
    workers: int
    foreign: int
    max_deliver: int
    ack_wait: float
    fails: float
    terminates: float
    outlasts: float
    waits: int
    watchers: int
    people: int
    consumers: int
    faults: tuple[Fault, ...]
    clocks: dict[str, int]
    full: str
    room: int
    seconds: float
    handlers: int = 0
    later: str = ""
    pace: float = _PACE
    tidiers: int = 0
    keep: dict[str, float] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[str]:
        """What goes wrong."""
        return frozenset(fault.kind for fault in self.faults)

    def fields(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Plan:
        """Return the plan of such fields."""
        tuples = {name: tuple(fields[name]) for name in ("version", "jobs")}
        return cls(**fields | tuples | {"faults": tuple(Fault(*fault) for fault in fields["faults"])})

    @classmethod
    def draw(cls, rng: random.Random, *, calm: bool = False) -> Plan:
        """Draw a plan."""
        # Waits, people and what they may be told aren't judged yet where power, leaders, consumers or limits change.
        rough = rng.random() < _ROUGH
        clustered = rough and rng.random() < _CLUSTERED
        kinds = _kinds(rng, rough=rough, clustered=clustered)
        tasks, most = (rng.randint(2, 6), 6) if rough else (rng.randint(1, 3), 12)
        # A loss of power takes its time, and jobs are to come after it.
        seconds = rng.uniform(12.0, 25.0) if "power" in kinds else rng.uniform(3.0, 20.0)
        plan = cls(
            version=rng.choice([(2, 15, 0), (2, 15, 0), (2, 12, 8)]),
            jobs=tuple(rng.randint(1, most) for _ in range(tasks)),
            workers=rng.randint(1, 3),
            foreign=rng.choice([0, 1, 2]),
            max_deliver=rng.choice([1, 1, 2, 2, 3]),
            ack_wait=rng.choice([1.0, 2.0, 5.0]),
            fails=rng.choice([0.0, 0.2, 0.5]),
            terminates=rng.choice([0.0, 0.1, 0.3]),
            outlasts=0.0 if calm else rng.choice([0.0, 0.3, 0.7] if rough else [0.0, 0.0, 0.3]),
            waits=0 if rough else rng.choice([0, 2, 4]),
            watchers=0 if rough else rng.choice([0, 1]),
            people=0 if rough else rng.choice([0, 0, 1]),
            consumers=2 if "filters" in kinds else rng.choice([1, 1, 2]) if rough else 1,
            faults=() if calm else _faults(rng, kinds, seconds),
            clocks={name: round(rng.uniform(-CLOCK, CLOCK) * 1e9) for name in NAMES} if clustered else {},
            full="" if calm or not rough else rng.choice(["", "", "", "queue", "dead_letters", "events", "audit"]),
            room=rng.randint(3, 12),
            seconds=seconds,
            handlers=0 if rough else rng.choice([0, 0, 1]),
            pace=rng.choice([_PACE, _PACE, _SLOW]) if rough else _PACE,
        )
        if not plan.full and not _LOSING & plan.kinds:
            # What comes later has the bodies of what was before: the two aren't told apart where jobs are lost.
            plan = replace(plan, later=rng.choice(["", "", "clear", "rerun"]))
        has_letters = not rough and plan.fails + plan.terminates > 0
        plan = replace(plan, tidiers=rng.choice([0, 1, 1, 2]) if has_letters else 0)
        ages = {
            name: rng.choice([0.2, 1.0, 5.0])
            for name in ("max_deliveries", "default", "parked")
            if rng.random() < _AGED
        }
        return replace(plan, keep=ages if plan.tidiers else {})


def _kinds(rng: random.Random, *, rough: bool, clustered: bool) -> list[str]:
    """Draw what may go wrong: few kinds, so that each of them happens often enough to meet the others."""
    server = "leader" if clustered else "server"
    plain = rng.sample(["actor", "connection", server], rng.randint(1, 3))
    if not rough:
        return plain
    rare = [*EDITS, "filters", *(() if clustered else ["power", "power", "power"])]
    return [*plain[: rng.randint(0, 2)], *rng.sample(rare, rng.randint(1, 2))]


def _faults(rng: random.Random, kinds: Sequence[str], seconds: float) -> tuple[Fault, ...]:
    """Draw what goes wrong: the more often the worse the world is."""
    share, at, faults = rng.choice([0.2, 0.4, 0.8]), 0.0, list[Fault]()
    while (at := at + rng.expovariate(share)) < seconds:
        faults.append(Fault(round(at, 3), rng.choice(kinds), rng.getrandbits(32)))
    return tuple(faults)


@dataclass
class Account:
    """What really happened.

    :param stored: the bodies that a publisher's report calls stored
    :param rounds: how often each body was stored as a job of its own: by a task, after a clear, by another run
    :param done: how often a handler has finished each body
    :param handled: the sequences of the jobs that a handler of the dead letter queue has handled
    :param ends: the sequences of the jobs that are done, and their bodies
    :param again: the bodies that may be delivered once more after they were done: whoever had them was killed, cut off,
        or outlasted the ack wait
    :param unproved: the bodies of whose end the server may have no evidence
    :param removed: the bodies of which the server, or a person, may have removed every copy
    :param in_doubt: the bodies that a task is publishing, whether they are stored or not
    :param terminated: the bodies that a program has terminated which stores no copy of them, and the sequence of each
    :param deleted: the sequences of jobs that a person removed before they were done
    :param given_up: the sequences of jobs that a worker has terminated, or is about to
    :param passed: the sequences of jobs that a consumer may have passed, and nothing shows that
    :param edited: when another tool last edited each consumer, in seconds by the simulated clock
    :param touched: when something last happened to each body, by the simulated clock
    :param without_metrics: whether the server may not report acknowledgements
    :param without_copies: whether the archive may not have every job
    """

    stored: set[str] = field(default_factory=set)
    rounds: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    handled: set[int] = field(default_factory=set)
    ends: dict[int, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    unproved: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    terminated: dict[str, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    edited: dict[str, float] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)
    without_metrics: bool = False
    without_copies: bool = False
    running: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def excuse(self, bodies: set[str]) -> None:
        """Excuse another delivery of some bodies: whoever had them was killed or cut off."""
        self.again |= bodies
        self.unproved |= bodies
