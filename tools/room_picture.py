"""Draws the rooms of the package from its imports: ``docs/pictures/rooms.svg``, by ``make reference``.

An arrow leads from a room to one that it imports. An arrow is left out where others lead there as well.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
_PACKAGE = ROOT / "airflow_provider_jetstream"
_IMPORT = re.compile(r"^ *from airflow_provider_jetstream([\w.]*) import (\([^)]*\)|.+)$", re.MULTILINE)
_NAME = re.compile(r"\w+")
_AIRFLOW = "Airflow classes"
_BOX, _GAP, _ROW = (128, 30), 48, 66
_STYLE = """\
text { font: 13px sans-serif; text-anchor: middle; fill: #1f2937 }
rect { fill: #f3f4f6; stroke: #6b7280; rx: 5 }
rect.core { fill: #dbeafe }
line { stroke: #9ca3af; marker-end: url(#head) }
path { fill: #9ca3af }"""
_HEAD = """\
<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0 8 4 0 8z"/></marker>"""


def room_of(module: tuple[str, ...]) -> str | None:
    """Return the room of a module, ``None`` if it belongs to no room."""
    folder = _PACKAGE / module[0] if module else _PACKAGE
    if not module or not folder.is_dir():
        return None
    if module[0] == "jetstream":
        in_folder = len(module) > 1 and (folder / module[1]).is_dir()
        return f"jetstream/{module[1]}" if in_folder or module[1:] in {("documents",), ("publication",)} else None
    if module[0] == "testing":
        # The fixture for users' tests is made of what dev starts.
        return "dev"
    return module[0] if module[0] in {"worker", "spark", "command", "dev", "plugins"} else _AIRFLOW


def room_imports() -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        room = room_of(path.relative_to(_PACKAGE).with_suffix("").parts)
        if room is None:
            continue
        imported = found.setdefault(room, set())
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            base = tuple(module.split(".")[1:])
            imported |= {other for name in _NAME.findall(names) if (other := room_of((*base, name)) or room_of(base))}
        imported.discard(room)
    return found


def picture() -> str:
    """Return the picture as SVG."""
    imports = room_imports()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(imports[room]).union(*map(below, imports[room]))

    @cache
    def level(room: str) -> int:
        return max((level(other) + 1 for other in imports[room]), default=0)

    rows: dict[int, list[str]] = {}
    for room in sorted(imports):
        rows.setdefault(level(room), []).append(room)
    width = max(map(len, rows.values())) * (_BOX[0] + _GAP) + _GAP
    height = (max(rows) + 1) * _ROW
    places = {
        room: (width * (number + 0.5) / len(row), height - _ROW * (each + 0.5))
        for each, row in rows.items()
        for number, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>The rooms of the package, and which of them each imports</title>",
        f"<style>\n{_STYLE}\n</style>",
        _HEAD,
    ]
    for room in sorted(imports):
        for other in sorted(imports[room]):
            if not any(other in below(between) for between in imports[room]):
                (x, y), (to_x, to_y) = places[room], places[other]
                start, end = y + _BOX[1] / 2, to_y - _BOX[1] / 2
                parts.append(f'<line x1="{x:.0f}" y1="{start:.0f}" x2="{to_x:.0f}" y2="{end:.0f}"/>')
    for room, (x, y) in sorted(places.items()):
        kind = "core" if room.startswith("jetstream/") else "above"
        left, top = x - _BOX[0] / 2, y - _BOX[1] / 2
        box = f'x="{left:.0f}" y="{top:.0f}" width="{_BOX[0]}" height="{_BOX[1]}"'
        parts.append(f'<rect class="{kind}" {box}/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{room.removeprefix("jetstream/")}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
