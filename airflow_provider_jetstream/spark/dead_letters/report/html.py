"""The report as one HTML page without scripts: a tree of elements, so that no value can become anything but text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement, tostring

from airflow_provider_jetstream.spark.dead_letters.report.charts import bar, stacked_columns
from airflow_provider_jetstream.spark.dead_letters.report.style import STYLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MISSING = "—"

_SHORT = 22


@dataclass(frozen=True)
class Link:
    """Text that leads somewhere.

    :param text: what is shown
    :param url: where it leads
    """

    text: str
    url: str


@dataclass(frozen=True)
class Table:
    """Counts, the largest first.

    :param title: what is counted
    :param names: of the columns before the count
    :param rows: the values of those columns and the count; a list of values is shown one below the other
    :param rest: how many more rows there are, and what they count together
    :param wide: whether it takes the whole width
    :param note: what to know about it
    """

    title: str
    names: Sequence[str]
    rows: Sequence[tuple[Sequence[str | Link | list[str] | None], int]]
    rest: tuple[int, int] = (0, 0)
    wide: bool = False
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What the report says.

    :param title: its heading
    :param about: a line each under the heading
    :param figures: the most important numbers by what they count
    :param trend: what the chart shows, and its buckets in order: a label, and a count for each of some series
    :param series: of the chart
    :param tables: the counts
    """

    title: str
    about: Sequence[str]
    figures: Mapping[str, str]
    trend: tuple[str, Sequence[tuple[str, Mapping[str, int]]]]
    series: Sequence[str] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)

    def html(self) -> str:
        """Write the page.

        :return: the whole document
        """
        root = Element("html", {"lang": "en"})
        head = SubElement(root, "head")
        SubElement(head, "meta", {"charset": "utf-8"})
        SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
        SubElement(head, "meta", {"name": "color-scheme", "content": "light dark"})
        # Nothing is loaded and nothing runs, whatever a browser might find in here.
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": policy})
        SubElement(head, "title").text = self.title
        SubElement(head, "style").text = STYLE
        body = SubElement(SubElement(root, "body"), "main")
        SubElement(body, "h1").text = self.title
        for line in self.about:
            SubElement(body, "p", {"class": "about"}).text = line
        figures = SubElement(body, "dl", {"class": "figures"})
        for name, value in self.figures.items():
            each = SubElement(figures, "div")
            SubElement(each, "dt").text = name
            SubElement(each, "dd").text = value
        self._trend(body)
        grid = SubElement(body, "div", {"class": "grid"})
        for table in self.tables:
            _table(grid, table)
        return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"

    def _trend(self, body: Element) -> None:
        title, buckets = self.trend
        section = SubElement(body, "section", {"class": "wide"})
        SubElement(section, "h2").text = title
        if not buckets:
            SubElement(section, "p", {"class": "about"}).text = "No dead letters."
            return
        legend = SubElement(section, "ul", {"class": "legend"})
        for place, part in enumerate(self.series):
            item = SubElement(legend, "li")
            mark = SubElement(item, "svg", {"class": "mark", "aria-hidden": "true"})
            SubElement(mark, "rect", {"width": "100%", "height": "100%", "rx": "2", "class": f"s{place}"})
            total = sum(counts.get(part, 0) for _, counts in buckets)
            SubElement(item, "span").text = f"{part} {total:,}"
        section.append(stacked_columns(buckets, self.series, title))


def _table(grid: Element, table: Table) -> None:
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
            _cell(SubElement(row, "td"), value)
    more, rest = table.rest
    if more:
        row = SubElement(body, "tr", {"class": "rest"})
        SubElement(row, "td", {"class": "count"}).text = f"{rest:,}"
        SubElement(row, "td")
        SubElement(row, "td", {"colspan": str(len(table.names))}).text = f"in {more:,} more"


def _cell(cell: Element, value: str | Link | list[str] | None) -> None:
    match value:
        case Link():
            SubElement(cell, "a", {"href": value.url, "rel": "noreferrer"}).text = value.text
        case list():
            for number, line in enumerate(value):
                SubElement(cell, "div", _classes("" if number == 0 else "second", line)).text = line
        case _:
            cell.attrib |= _classes("", value or MISSING)
            cell.text = value or MISSING


def _classes(name: str, text: str) -> dict[str, str]:
    """Keep short texts, such as times and digests, on one line."""
    names = " ".join(each for each in (name, "short" if len(text) <= _SHORT else "") if each)
    return {"class": names} if names else {}
