"""Writes the lines and modules of each room into the table of ``docs/architecture.md``, by ``make reference``.

The table has the ceiling of each room beside its size, and says what makes a room larger than that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
_PACKAGE = ROOT / "airflow_provider_jetstream"
_ROOMS = {"client", "queue", "provisioning", "publishing", "dead_letters", "waiting", "audit", "redrive"}
_REST, _AIRFLOW = "rest of the core", "all others"
_ROW = re.compile(
    r"^\| (?P<room>[\w /`]+) \| (?P<lines>[\d,]+) / (?P<modules>\d+) \| (?P<ceiling>[\d,]+) / \d+ \|"
    r" (?P<reason>.*) \|$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RoomSize:
    """Lines and modules of a room."""

    lines: int
    modules: int


@dataclass(frozen=True)
class Row:
    """What the page says of a room."""

    size: RoomSize
    ceiling: int
    reason: str


def room_sizes() -> dict[str, RoomSize]:
    """Return the size of each room of the table."""
    lines: dict[str, list[int]] = defaultdict(list)
    for path in _PACKAGE.rglob("*.py"):
        lines[_room_of(path)].append(len(path.read_text(encoding="utf-8").splitlines()))
    return {room: RoomSize(sum(found), len(found)) for room, found in lines.items()}


def rows() -> dict[str, Row]:
    """Return the rows of the page's table, by room."""
    return {
        found["room"].strip("`/"): Row(
            RoomSize(_number(found["lines"]), int(found["modules"])), _number(found["ceiling"]), found["reason"]
        )
        for found in _ROW.finditer(PAGE.read_text(encoding="utf-8"))
    }


def write_sizes() -> None:
    """Write the sizes of today into the table; lines are rounded to hundreds."""
    sizes = room_sizes()

    def row(found: re.Match[str]) -> str:
        size = sizes[found["room"].strip("`/")]
        numbers = f"| {round(size.lines, -2):,} / {size.modules} |"
        return found[0].replace(f"| {found['lines']} / {found['modules']} |", numbers, 1)

    PAGE.write_text(_ROW.sub(row, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _room_of(path: Path) -> str:
    top, *below = path.relative_to(_PACKAGE).parts
    if top == "jetstream":
        return below[0] if below[0] in _ROOMS else _REST
    return top if top in {"worker", "spark", "plugins"} else _AIRFLOW


def _number(text: str) -> int:
    return int(text.replace(",", ""))


if __name__ == "__main__":
    write_sizes()
