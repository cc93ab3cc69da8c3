"""What was seen: the outcome of each case in each environment, kept as JSON beside the page."""

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.matrix.cases import Case

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ROOT / "docs" / "reliability.json"


@dataclass(frozen=True)
class SeenTest:
    """How one test ended."""

    file: str
    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """How the tests of a case ended in an environment.

    :param again: tests that failed beside others and passed alone
    :param missing: why the case wasn't run at all
    """

    axis: str
    environment: str
    case: str
    versions: str
    date: str
    passed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    missing: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later outcome replaces."""
        return self.axis, self.environment, self.case


def outcome_of(
    axis: str,
    environment: str,
    case: Case,
    *,
    versions: str,
    date: str,
    tests: Sequence[SeenTest],
    again: Sequence[SeenTest] = (),
) -> Outcome:
    """Count the tests of a case; those that failed are judged by how they ended alone."""
    own = [test for test in tests if _is_of(case, test)]
    alone = {(test.file, test.name): test for test in again}
    failed = [test for test in own if test.state == "failed"]
    recovered = [test for test in failed if (ended := alone.get((test.file, test.name))) and ended.state == "passed"]
    return Outcome(
        axis=axis,
        environment=environment,
        case=case.name,
        versions=versions,
        date=date,
        passed=sum(test.state == "passed" for test in own) + len(recovered),
        skipped=dict(sorted(Counter(test.reason for test in own if test.state == "skipped").items())),
        failed=tuple(f"{test.file}::{test.name}" for test in failed if test not in recovered),
        again=tuple(f"{test.file}::{test.name}" for test in recovered),
        missing="" if own else "no test of it ran",
    )


def _is_of(case: Case, test: SeenTest) -> bool:
    return any(test.file == file or test.file.startswith(f"{file}/") for file in case.files)


def read_outcomes(path: Path = OUTCOMES) -> list[Outcome]:
    """Return what was seen so far."""
    if not path.exists():
        return []
    return [
        Outcome(**{**seen, "failed": tuple(seen["failed"]), "again": tuple(seen["again"])})
        for seen in json.loads(path.read_text(encoding="utf-8"))
    ]


def store_outcomes(new: Iterable[Outcome], path: Path = OUTCOMES) -> list[Outcome]:
    """Add outcomes to those seen so far, in place of earlier ones of the same case and environment."""
    # Axes may run at the same time.
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {outcome.key: outcome for outcome in read_outcomes(path)}
        kept.update({outcome.key: outcome for outcome in new})
        outcomes = list(kept.values())
        path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
    return outcomes
