"""Renders the report as one HTML page without scripts, from a tree of elements, so that every value stays text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, tostring

from airflow_provider_jetstream.spark.dead_letters.report.charts import bar, stacked_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MISSING = "—"

_SHORT = 22
_LONGEST_PART = 40
# A name up to and with a separator, or up to a capital after a small letter: where a reader expects a break.
_NAME_PARTS = re.compile(r"[^\s./:_,;-]*?(?:[./:_,;-]+|(?<=[a-z])(?=[A-Z])|$)|\s+", re.DOTALL)
# Light or dark by the reader's preference, for screen and paper.
_STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1b1f24; --soft: #59636e; --line: #d9dee3;
  --link: #0757b8; --s0: #2f6fb5; --s1: #d9822b; --s2: #2a9d8f; --s3: #b5476f; --s4: #8a7f2e; --s5: #6b7785; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --card: #1d2127; --ink: #e4e8ec; --soft: #9ba6b1;
  --line: #343b43; --link: #7db4f2; --s0: #5b9bdf; --s1: #e6a15c; --s2: #4fbfb0; --s3: #dd7aa0; --s4: #b9ad55;
  --s5: #97a3b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; }
h2 { font-size: 1.05rem; margin: 0 0 8px; }
a { color: var(--link); }
.about { color: var(--soft); margin: 0 0 4px; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 16px 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin-top: 16px; align-items: start; }
main > section + section { margin-top: 16px; }
.wide { grid-column: 1 / -1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0 0 8px; padding: 0; }
.mark { width: 12px; height: 12px; margin-right: 6px; }
.trend { display: block; width: 100%; height: auto; }
.trend text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.trend .grid { stroke: var(--line); stroke-width: 1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; text-align: left; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: break-word; }
.endless { overflow-wrap: anywhere; }
.short { white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
td.count, th.count { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.count { text-align: right; width: 1%; }
td.share { width: 90px; min-width: 70px; padding-top: 10px; }
.bar { display: block; width: 100%; height: 10px; }
.second, .rest td { color: var(--soft); }
.second { font-size: .85rem; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); }
.s3 { fill: var(--s3); } .s4 { fill: var(--s4); } .s5 { fill: var(--s5); }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; } }
@media print { section { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Link:
    """A hyperlink."""

    text: str
    url: str


@dataclass(frozen=True)
class Table:
    """Counts, the largest first.

    :param title: what is counted
    :param names: the columns before the count
    :param rows: the values of those columns and the count; the values of a list are shown one below the other
    :param rest: how many more rows there are, and the sum of their counts
    :param wide: whether it takes the whole width
    :param note: a line under the title
    """

    title: str
    names: Sequence[str]
    rows: Sequence[tuple[Sequence[str | Link | list[str] | None], int]]
    rest: tuple[int, int] = (0, 0)
    wide: bool = False
    note: str = ""


@dataclass(frozen=True)
class ReportPage:
    """The content of the report.

    :param about: the lines under the title
    :param figures: the most important numbers by their labels
    :param trends: charts: the title, and its buckets in order: a label, and a count by series
    :param series: the charts' series
    """

    title: str
    about: Sequence[str]
    figures: Mapping[str, str]
    trends: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, int]]]]]
    series: Sequence[str] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)

    def html(self) -> str:
        """Render the whole document."""
        root = Element("html", {"lang": "en"})
        head = SubElement(root, "head")
        SubElement(head, "meta", {"charset": "utf-8"})
        SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
        SubElement(head, "meta", {"name": "color-scheme", "content": "light dark"})
        # No browser loads or runs anything, whatever the letters contain.
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": policy})
        SubElement(head, "title").text = self.title
        SubElement(head, "style").text = _STYLE
        body = SubElement(SubElement(root, "body"), "main")
        SubElement(body, "h1").text = self.title
        for line in self.about:
            SubElement(body, "p", {"class": "about"}).text = line
        figures = SubElement(body, "dl", {"class": "figures"})
        for name, value in self.figures.items():
            figure = SubElement(figures, "div")
            SubElement(figure, "dt").text = name
            SubElement(figure, "dd").text = value
        for title, buckets in self.trends:
            self._add_trend(body, title, buckets)
        grid = SubElement(body, "div", {"class": "grid"})
        for table in self.tables:
            _add_table(grid, table)
        return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"

    def _add_trend(self, body: Element, title: str, buckets: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        section = SubElement(body, "section", {"class": "wide"})
        SubElement(section, "h2").text = title
        if not buckets:
            SubElement(section, "p", {"class": "about"}).text = "No dead letters."
            return
        legend = SubElement(section, "ul", {"class": "legend"})
        for index, name in enumerate(self.series):
            item = SubElement(legend, "li")
            mark = SubElement(item, "svg", {"class": "mark", "aria-hidden": "true"})
            SubElement(mark, "rect", {"width": "100%", "height": "100%", "rx": "2", "class": f"s{index}"})
            total = sum(counts.get(name, 0) for _, counts in buckets)
            SubElement(item, "span").text = f"{name} {total:,}"
        section.append(stacked_columns(buckets, self.series, title))


def _add_table(grid: Element, table: Table) -> None:
    section = SubElement(grid, "section", {"class": "wide"} if table.wide else {})
    SubElement(section, "h2").text = table.title
    if table.note:
        SubElement(section, "p", {"class": "about"}).text = table.note
    scroll = SubElement(section, "div", {"class": "scroll"})
    element = SubElement(scroll, "table")
    head = SubElement(SubElement(element, "thead"), "tr")
    SubElement(head, "th", {"class": "count", "scope": "col", "colspan": "2"}).text = "letters"
    for name in table.names:
        SubElement(head, "th", {"scope": "col"}).text = name
    body = SubElement(element, "tbody")
    largest = max((count for _, count in table.rows), default=0)
    for values, count in table.rows:
        row = SubElement(body, "tr")
        SubElement(row, "td", {"class": "count"}).text = f"{count:,}"
        SubElement(row, "td", {"class": "share"}).append(bar(count, largest))
        for value in values:
            _fill_cell(SubElement(row, "td"), value)
    more, rest = table.rest
    if more:
        row = SubElement(body, "tr", {"class": "rest"})
        SubElement(row, "td", {"class": "count"}).text = f"{rest:,}"
        SubElement(row, "td")
        SubElement(row, "td", {"colspan": str(len(table.names))}).text = f"in {more:,} more"


def _fill_cell(cell: Element, value: str | Link | list[str] | None) -> None:
    match value:
        case Link():
            _fill(SubElement(cell, "a", {"href": value.url, "rel": "noreferrer"}), value.text)
        case list():
            for number, line in enumerate(value):
                _fill(SubElement(cell, "div", _classes("" if number == 0 else "second", line)), line)
        case _:
            cell.attrib |= _classes("", value or MISSING)
            _fill(cell, value or MISSING)


def _fill(element: Element, text: str) -> None:
    """Write a text; a name, which has no spaces, may be broken between its parts."""
    parts = [part for part in _NAME_PARTS.findall(text) if part] if len(text.split()) == 1 else []
    element.text = parts[0] if parts else text
    for part in parts[1:]:
        SubElement(element, "wbr").tail = part


def _classes(name: str, text: str) -> dict[str, str]:
    """Keep short texts, such as times and digests, on one line; break texts anywhere that have a part without end."""
    endless = any(len(part) > _LONGEST_PART for word in text.split() for part in _NAME_PARTS.findall(word))
    kind = "short" if len(text) <= _SHORT else "endless" if endless else ""
    names = " ".join(part for part in (name, kind) if part)
    return {"class": names} if names else {}
