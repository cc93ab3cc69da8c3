"""The ledgers that programs of tests and demo append JSON lines to."""

import json
from pathlib import Path
from typing import Any


def read_ledger(path: Path) -> list[Any]:
    """
    Return the complete lines of a ledger; none where no program has written one yet.

    A program may be in the middle of its last line while it is read.
    """
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
