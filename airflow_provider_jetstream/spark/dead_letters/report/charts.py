"""Charts as SVG elements: a few rectangles and words, coloured by the page's style sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 960, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 12, 28
_STEPS = 4
_LABELS = 8
_HALF_LABEL = 40
_GAP = 0.18
_NICE = (1, 2, 5, 10)


def stacked_columns(buckets: Sequence[tuple[str, Mapping[str, int]]], series: Sequence[str], name: str) -> Element:
    """Draw counts over time, a column for each bucket.

    :param buckets: in order: a label, and a count for each of some series
    :param series: all of them, from the bottom up
    :param name: what is shown, for those who can't see it
    :return: the chart
    """
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "class": "trend", "role": "img", "aria-label": name})
    top = _ceiling(max((sum(counts.values()) for _, counts in buckets), default=0))
    height = _HEIGHT - _TOP - _BOTTOM
    for step in range(_STEPS + 1):
        value = top * step / _STEPS
        y = _TOP + height - height * step / _STEPS
        SubElement(svg, "line", _at(x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y) | {"class": "grid"})
        if value.is_integer():
            _text(svg, _LEFT - 8, y + 4, f"{int(value):,}", "end")
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(buckets))
    apart = -(-len(buckets) // _LABELS)
    for number, (label, counts) in enumerate(buckets):
        x, y = _LEFT + number * width, float(_TOP + height)
        for place, part in enumerate(series):
            if not (count := counts.get(part, 0)):
                continue
            tall = height * count / top
            y -= tall
            box = _at(x=x + width * _GAP / 2, y=y, width=width * (1 - _GAP), height=tall)
            rectangle = SubElement(svg, "rect", box | {"class": f"s{place}"})
            SubElement(rectangle, "title").text = f"{label}: {count:,} {part}"
        if number % apart == 0:
            middle = x + width / 2
            outside = middle + _HALF_LABEL > _WIDTH
            _text(svg, _WIDTH if outside else middle, _HEIGHT - 8, label, "end" if outside else "middle")
    return svg


def bar(count: int, largest: int) -> Element:
    """Draw one count of many as a bar that is as wide as its place allows.

    :param count: the count
    :param largest: the largest of them
    :return: the bar
    """
    svg = Element("svg", {"class": "bar", "aria-hidden": "true"})
    share = 100 * count / largest if largest else 0
    SubElement(svg, "rect", {"width": f"{max(share, 0.5):.2f}%", "height": "100%", "rx": "2", "class": "s0"})
    return svg


def _text(svg: Element, x: float, y: float, text: str, anchor: str) -> None:
    SubElement(svg, "text", _at(x=x, y=y) | {"text-anchor": anchor}).text = text


def _at(**places: float) -> dict[str, str]:
    return {name: f"{value:.2f}".rstrip("0").rstrip(".") for name, value in places.items()}


def _ceiling(largest: int) -> int:
    """Give a round number that isn't below the largest, for the end of the axis."""
    scale = 1
    while True:
        for factor in _NICE:
            if factor * scale >= largest:
                return max(factor * scale, 1)
        scale *= 10
