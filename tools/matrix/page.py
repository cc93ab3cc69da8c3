"""Writes docs/reliability.md from what was seen."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.matrix.cases import Case
from tools.matrix.outcomes import ROOT, Outcome
from tools.matrix.runs import AIRFLOW, DEPENDENCY, SERVER, cases_of, environments

PAGE = ROOT / "docs" / "reliability.md"

_HEAD = """\
# Reliability

What was run with which versions, and how it ended. `make matrix` runs it and writes this page;
`make matrix MATRIX=server` (or `airflow`, `dependencies`) runs a part of it. A case is a promise; a cell says how many
of its tests passed there. *n skipped*: tests of what that version lacks, with the reasons below each table. *n alone*:
tests that failed beside others on the busy machine of the run and passed when run again alone. **n failed**: named
below the table. —: wasn't run.
"""

_SECTIONS = (
    (
        SERVER,
        "nats-server",
        """\
The oldest server that is supported, and the newest of each later minor release, with the locked Python packages.
`make test-all` runs everything with the newest one.""",
    ),
    (
        AIRFLOW,
        "Airflow and Python",
        "Each in an environment of its own, with a real scheduler, triggerer, DAG processor and API server.",
    ),
    (
        DEPENDENCY,
        "Dependencies",
        """\
`lowest-direct`: the lowest versions that `pyproject.toml` allows; `highest`: the newest of all packages, as uv resolves
them on that day.""",
    ),
)

_KNOWN = """\
## What the matrix has shown

- nats-server before 2.12: a server that is killed right after acknowledgements may keep open the deliveries of jobs
  that are gone, for good. The consumer then has more jobs in flight than are stored. Its dead letters count as
  uncertain, neither a worker nor a pause ends it, and the scan names it (`inconsistent-consumer`): create the
  consumer anew, or upgrade.
- nats-server before 2.11: no answer shows the exact bytes of a subject that isn't UTF-8; the letter stays, and the
  report says so.
- nats-server before 2.14 takes three replicas without a cluster where a stream is updated, and keeps one; the plan
  refuses it.
- Python 3.11: `asyncio.wait_for` loses a cancellation that comes right after the result. 32 of 100 cancelled
  connections went on; they end now (`tests/environment/test_oldest_versions.py`).
- nats-py 2.12 and 2.13 connected without this package's transport and renewal of settings: 2.14 is the lowest.
- Airflow 3.1.0 doesn't import with structlog 25.5 or newer, which its metadata allows: install it with its constraints.
- Airflow 3.1 and 3.2 list tasks without their rendered fields; a single task has them.
"""


def write_page(outcomes: Sequence[Outcome], page: Path = PAGE) -> None:
    """Write the page."""
    page.write_text(page_text(outcomes), encoding="utf-8")


def page_text(outcomes: Sequence[Outcome]) -> str:
    """Return the page."""
    parts = [_HEAD]
    for axis, title, text in _SECTIONS:
        seen = {(outcome.environment, outcome.case): outcome for outcome in outcomes if outcome.axis == axis}
        names = environments(axis)
        parts += [f"## {title}\n", f"{text}\n", _table(cases_of(axis), names, seen)]
        parts += _notes(names, cases_of(axis), seen)
    return "\n".join([*parts, _KNOWN])


def _table(cases: Sequence[Case], names: Sequence[str], seen: dict[tuple[str, str], Outcome]) -> str:
    lines = [_line(["", "case", "expected", *names]), _line(["---"] * (3 + len(names)))]
    lines += [
        _line([case.kind, case.name, case.expected, *(_cell(seen.get((name, case.name))) for name in names)])
        for case in cases
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "—"
    if outcome.missing:
        return "missing"
    parts = [f"{outcome.passed} passed"]
    if outcome.skipped:
        parts.append(f"{sum(outcome.skipped.values())} skipped")
    if outcome.again:
        parts.append(f"{len(outcome.again)} alone")
    if outcome.failed:
        parts.append(f"**{len(outcome.failed)} failed**")
    return ", ".join(parts)


def _notes(names: Sequence[str], cases: Sequence[Case], seen: dict[tuple[str, str], Outcome]) -> Iterator[str]:
    for name in names:
        outcomes = [outcome for case in cases if (outcome := seen.get((name, case.name)))]
        if not outcomes:
            yield f"**{name}**: not run.\n"
            continue
        dates = sorted({outcome.date for outcome in outcomes})
        versions = next((outcome.versions for outcome in outcomes if outcome.versions), "")
        yield f"**{name}**, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}{f': {versions}' if versions else ''}.\n"
        if lines := list(_findings(outcomes)):
            yield "\n".join(lines) + "\n"


def _findings(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for reason in dict.fromkeys(outcome.missing for outcome in outcomes if outcome.missing):
        yield f"- missing: {reason}"
    for outcome in outcomes:
        for test in outcome.failed:
            yield f"- **failed**: `{test}`"
        for test in outcome.again:
            yield f"- failed beside others, passed alone: `{test}`"
    skipped: Counter[str] = Counter()
    for outcome in outcomes:
        skipped.update(outcome.skipped)
    if skipped:
        reasons = "; ".join(f"{count} of {reason}" for reason, count in sorted(skipped.items()))
        yield f"- skipped: {reasons}"
