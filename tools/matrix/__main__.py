"""``python -m tools.matrix [server|airflow|dependencies] [--environment NAME] [--case NAME]``.

Each outcome is stored, and the page written, as soon as a case has ended: a run that is interrupted loses nothing.
"""

import argparse
import sys

from tools.matrix.outcomes import read_outcomes, store_outcomes
from tools.matrix.page import write_page
from tools.matrix.runs import AIRFLOW, DEPENDENCY, SERVER, cases_of, environments, run_environment

_AXES = (SERVER, AIRFLOW, DEPENDENCY)


def main() -> int:
    """Run the matrix, or a part of it; the exit status is 0 only if no case failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="write docs/reliability.md")
    parser.add_argument("axes", nargs="*", metavar="axis", help=f"of {', '.join(_AXES)}; all where none is named")
    parser.add_argument("--environment", action="append", help="only environments whose name contains this")
    parser.add_argument("--case", action="append", help="only these cases")
    parser.add_argument("--page", action="store_true", help="only write the page from what was seen")
    chosen = parser.parse_args()
    if unknown := set(chosen.axes).difference(_AXES):
        parser.error(f"expected {', '.join(_AXES)}, found {', '.join(sorted(unknown))}")
    if chosen.page:
        write_page(read_outcomes())
        return 0
    failed = 0
    for axis in chosen.axes or _AXES:
        cases = [case for case in cases_of(axis) if not chosen.case or case.name in chosen.case]
        for environment in environments(axis):
            if chosen.environment and not any(part in environment for part in chosen.environment):
                continue
            for outcome in run_environment(axis, environment, cases):
                write_page(store_outcomes([outcome]))
                failed += bool(outcome.failed)
                seen = outcome.missing or f"{outcome.passed} passed, {len(outcome.failed)} failed"
                print(f"{environment}: {outcome.case}: {seen}", flush=True)
                for test in outcome.failed:
                    print(f"  FAILED {test}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
