"""Charts as SVG elements: rectangles and labels, coloured by the page's style sheet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, SubElement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT = 960, 240
_RIGHT, _TOP, _BOTTOM = 8, 12, 28
_STEPS = 4
_GAP = 0.18
# Of a step between two lines of the grid, times a power of ten.
_NICE = (1, 2, 3, 4, 5, 6, 8, 10)
# A character of a label in 12 px, which is wider in no usual font, and the least space around labels.
_CHARACTER, _SPACE = 7.5, 8


def stacked_columns(buckets: Sequence[tuple[str, Mapping[str, int]]], series: Sequence[str], name: str) -> Element:
    """Draw counts over time, a column per bucket.

    :param buckets: in order: a label, and a count by series
    :param series: all series, from the bottom up
    :param name: describes the chart to screen readers
    """
    svg = Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "class": "trend", "role": "img", "aria-label": name})
    step, steps = _axis(max((sum(counts.values()) for _, counts in buckets), default=0))
    top, height = step * steps, _HEIGHT - _TOP - _BOTTOM
    left = _CHARACTER * len(f"{top:,}") + 2 * _SPACE
    for number in range(steps + 1):
        y = _TOP + height - height * number / steps
        SubElement(svg, "line", _attributes(x1=left, x2=_WIDTH - _RIGHT, y1=y, y2=y) | {"class": "grid"})
        _text(svg, left - _SPACE, y + 4, f"{step * number:,}", "end")
    width = (_WIDTH - left - _RIGHT) / max(1, len(buckets))
    label_width = _CHARACTER * max((len(label) for label, _ in buckets), default=0) + 2 * _SPACE
    label_step = max(1, math.ceil(label_width / width))
    for number, (label, counts) in enumerate(buckets):
        x, y = left + number * width, float(_TOP + height)
        for index, name_of_series in enumerate(series):
            if not (count := counts.get(name_of_series, 0)):
                continue
            column_height = height * count / top
            y -= column_height
            box = _attributes(x=x + width * _GAP / 2, y=y, width=width * (1 - _GAP), height=column_height)
            rectangle = SubElement(svg, "rect", box | {"class": f"s{index}"})
            SubElement(rectangle, "title").text = f"{label}: {count:,} {name_of_series}"
        if number % label_step == 0:
            half = (label_width - _SPACE) / 2
            _text(svg, min(max(x + width / 2, half), _WIDTH - half), _HEIGHT - 8, label, "middle")
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


def _axis(largest: int) -> tuple[int, int]:
    """Return a round step of an axis, and how many steps reach the largest value: all whole numbers."""
    if largest <= _STEPS:
        return 1, max(largest, 1)
    scale = 1
    while True:
        for factor in _NICE:
            if factor * scale * _STEPS >= largest:
                return factor * scale, math.ceil(largest / (factor * scale))
        scale *= 10
