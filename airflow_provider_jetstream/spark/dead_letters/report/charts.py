"""Charts as SVG elements: rectangles and labels, coloured by the page's style sheet."""

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
    """Draw counts over time, a column per bucket.

    :param buckets: in order: a label, and a count by series
    :param series: all series, from the bottom up
    :param name: describes the chart to screen readers
    """
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "class": "trend", "role": "img", "aria-label": name})
    top = _ceiling(max((sum(counts.values()) for _, counts in buckets), default=0))
    height = _HEIGHT - _TOP - _BOTTOM
    for step in range(_STEPS + 1):
        value = top * step / _STEPS
        y = _TOP + height - height * step / _STEPS
        SubElement(svg, "line", _attributes(x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y) | {"class": "grid"})
        if value.is_integer():
            _text(svg, _LEFT - 8, y + 4, f"{int(value):,}", "end")
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(buckets))
    label_step = -(-len(buckets) // _LABELS)
    for number, (label, counts) in enumerate(buckets):
        x, y = _LEFT + number * width, float(_TOP + height)
        for index, name_of_series in enumerate(series):
            if not (count := counts.get(name_of_series, 0)):
                continue
            column_height = height * count / top
            y -= column_height
            box = _attributes(x=x + width * _GAP / 2, y=y, width=width * (1 - _GAP), height=column_height)
            rectangle = SubElement(svg, "rect", box | {"class": f"s{index}"})
            SubElement(rectangle, "title").text = f"{label}: {count:,} {name_of_series}"
        if number % label_step == 0:
            middle = x + width / 2
            outside = middle + _HALF_LABEL > _WIDTH
            _text(svg, _WIDTH if outside else middle, _HEIGHT - 8, label, "end" if outside else "middle")
    return svg


def bar(count: int, largest: int) -> Element:
    """Draw a count as a bar whose width is relative to the largest count."""
    svg = Element("svg", {"class": "bar", "aria-hidden": "true"})
    percentage = 100 * count / largest if largest else 0
    SubElement(svg, "rect", {"width": f"{max(percentage, 0.5):.2f}%", "height": "100%", "rx": "2", "class": "s0"})
    return svg


def _text(svg: Element, x: float, y: float, text: str, anchor: str) -> None:
    SubElement(svg, "text", _attributes(x=x, y=y) | {"text-anchor": anchor}).text = text


def _attributes(**values: float) -> dict[str, str]:
    return {name: f"{value:.2f}".rstrip("0").rstrip(".") for name, value in values.items()}


def _ceiling(largest: int) -> int:
    """Return a round number not below the largest, for the end of the axis."""
    scale = 1
    while True:
        for factor in _NICE:
            if factor * scale >= largest:
                return max(factor * scale, 1)
        scale *= 10
