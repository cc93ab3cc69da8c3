"""JSON as its text: a change of one value leaves every byte of the others as it was.

Parsing to Python's values and back would lose what two programs may well tell apart: ``1.10`` becomes ``1.1``,
``1E400`` infinite, ``-0`` zero; escaped characters become others, and all white space goes. So a scalar is kept as its
text here, and an object or an array with the text between its parts.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.limits import MESSAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Deeper ones are refused: what reads and writes them calls itself for each level.
MOST_LEVELS: Final = 100

_SPACE: Final = r"[ \t\n\r]*"
_TEXT: Final = r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
_NUMBER: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_STRING = re.compile(_TEXT)
_SCALAR = re.compile(f"{_TEXT}|{_NUMBER}|true|false|null")
_BLANK = re.compile(_SPACE)
# What stands before the value of a member, and what stands behind any value.
_LEAD = re.compile(f"{_SPACE}({_TEXT}){_SPACE}:{_SPACE}")
_NEXT = re.compile(f"({_SPACE})([]}},]?)")
_INDENT = "  "


class Scalar:
    """A text, number or literal of JSON.

    :param text: as it is written
    """

    __slots__ = ("after", "before", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # White space around it, where it is an item of an array.
        self.before: str | None = None
        self.after = ""

    def __eq__(self, other: object) -> bool:
        """Whether both are the same value by RFC 6902: numbers by value, texts by characters."""
        return isinstance(other, Scalar) and (self.text == other.text or self._value() == other._value())

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, _: object) -> Scalar:
        """Return the value without the white space around it."""
        return Scalar(self.text)

    def _value(self) -> tuple[str, object]:
        if self.text[0] == '"':
            return "text", json.loads(self.text)
        if self.text[0] in "tfn":
            return "literal", self.text
        try:
            return "number", Decimal(self.text)
        except InvalidOperation:
            # Its exponent is beyond what decimals have.
            return "number", self.text


class Object(dict[str, "Node"]):
    """An object; its members in their order."""

    __slots__ = ("after", "before", "closing", "leads")

    def __init__(self) -> None:
        super().__init__()
        # The text before each value since the comma: white space, its name, a colon.
        self.leads: dict[str, str] = {}
        self.closing = ""
        self.before: str | None = None
        self.after = ""

    def __setitem__(self, name: str, item: Node) -> None:
        """Add or replace a member; the white space around the one before stays."""
        super().__setitem__(name, _in_place_of(self.get(name), item))


class Array(list["Node"]):
    """An array."""

    __slots__ = ("after", "before", "closing", "gap")

    def __init__(self) -> None:
        super().__init__()
        # White space before the items that get none of their own.
        self.gap = ""
        self.closing = ""
        self.before: str | None = None
        self.after = ""

    def __setitem__(self, index: Any, item: Any) -> None:
        """Replace an item; the white space around it stays."""
        super().__setitem__(index, _in_place_of(self[index], item))


Node: TypeAlias = Scalar | Object | Array


def _in_place_of(old: Node | None, new: Node) -> Node:
    if old is None:
        return new
    # The same scalar of a patch gets into the bodies of many letters.
    placed = Scalar(new.text) if isinstance(new, Scalar) else new
    placed.before, placed.after = old.before, old.after
    return placed


def parse_json(text: str) -> tuple[str, Node, str]:
    """Parse a JSON text into the white space before it, its value, and the white space after it.

    :raises ValueError: it isn't JSON, an object has two members of one name, or it has too many levels
    """
    reader = _JsonReader(text)
    before = reader.space()
    value = reader.value(0)
    after = reader.space()
    if reader.position != len(text):
        raise reader.unexpected()
    return before, value, after


def json_text(value: Node, most: int = MESSAGE) -> str:
    """Return the text of a value: what was parsed and not replaced is as it was.

    :param most: how many bytes the text may have in UTF-8; parts beyond them aren't made. White space around one value
        is repeated for each that is added beside it
    :raises OverflowError: it has more
    :raises ValueError: it has too many levels
    """
    parts = _Parts(most)
    _write(value, parts, 0)
    return "".join(parts)


class _Parts(list[str]):
    """The parts of a text, bounded before each is added."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = self.room = most

    def append(self, part: str) -> None:
        self.room -= len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
        if self.room < 0:
            raise OverflowError(f"expected at most {self.most} bytes, found more")
        super().append(part)


def compacted(value: Node) -> Node:
    """Return a value without the white space in it; scalars stay as they are."""
    if isinstance(value, Object):
        compact_object = Object()
        for name, item in value.items():
            compact_object[name] = compacted(item)
            compact_object.leads[name] = f"{_name_of(value, name)}:"
        return compact_object
    if isinstance(value, Array):
        compact_array = Array()
        compact_array.extend(compacted(item) for item in value)
        return compact_array
    return Scalar(value.text)


def indented_json(text: str) -> str:
    """Return a JSON text with a line for each value, for people; scalars and names stay as they are.

    :raises ValueError: it isn't JSON
    """
    _, value, _ = parse_json(text)
    return "\n".join(_lines(value, "", ""))


def _lines(value: Node, lead: str, indent: str) -> list[str]:
    if isinstance(value, Scalar):
        return [f"{indent}{lead}{value.text}"]
    opening, closing = "{}" if isinstance(value, Object) else "[]"
    if not value:
        return [f"{indent}{lead}{opening}{closing}"]
    members = (
        [(f"{_name_of(value, name)}: ", item) for name, item in value.items()]
        if isinstance(value, Object)
        else [("", item) for item in value]
    )
    lines = [f"{indent}{lead}{opening}"]
    for number, (name, item) in enumerate(members, 1):
        lines += _lines(item, name, indent + _INDENT)
        if number < len(members):
            lines[-1] += ","
    return [*lines, f"{indent}{closing}"]


def _name_of(value: Object, name: str) -> str:
    found = _STRING.search(value.leads.get(name, ""))
    return found.group() if found else json.dumps(name)


def _write(value: Node, parts: _Parts, level: int) -> None:
    if isinstance(value, Scalar):
        parts.append(value.text)
        return
    if level >= MOST_LEVELS:
        raise _too_deep()
    is_object = isinstance(value, Object)
    parts.append("{" if is_object else "[")
    for number, (lead, item) in enumerate(_members(value)):
        if number:
            parts.append(",")
        parts.append(lead)
        _write(item, parts, level + 1)
        parts.append(item.after)
    parts.append(value.closing)
    parts.append("}" if is_object else "]")


def _members(value: Object | Array) -> Iterator[tuple[str, Node]]:
    """Return what an object or array holds, each value with the text before it."""
    if isinstance(value, Object):
        return ((value.leads.get(name) or _new_lead(value, name), item) for name, item in value.items())
    return ((value.gap if item.before is None else item.before, item) for item in value)


def _new_lead(value: Object, name: str) -> str:
    """Return the text before the value of a member that was added, in the manner of those that were there."""
    if not value.leads:
        return f"{json.dumps(name)}:"
    *_, lead = value.leads.values()
    found = _STRING.search(lead)
    return f"{lead[: found.start()]}{json.dumps(name)}{lead[found.end() :]}" if found else f"{json.dumps(name)}:"


def _too_deep() -> ValueError:
    return ValueError(f"expected at most {MOST_LEVELS} levels of objects and arrays, found more")


class _JsonReader:
    """Reads the values of a text, one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def space(self) -> str:
        """Return the white space that is next."""
        return self._taken(_BLANK).group()

    def value(self, level: int) -> Node:
        """Return the value that is next."""
        if found := _SCALAR.match(self.text, self.position):
            self.position = found.end()
            return Scalar(found.group())
        if level >= MOST_LEVELS:
            raise _too_deep()
        character = self.text[self.position : self.position + 1]
        if character == "{":
            return self._object(level)
        if character == "[":
            return self._array(level)
        raise self.unexpected()

    def unexpected(self) -> ValueError:
        """Return the error of a text that isn't JSON here."""
        return ValueError(f"expected JSON, found something else at character {self.position}")

    def _taken(self, pattern: re.Pattern[str]) -> re.Match[str]:
        if not (found := pattern.match(self.text, self.position)):
            raise self.unexpected()
        self.position = found.end()
        return found

    def _object(self, level: int) -> Object:
        found, leads = Object(), {}
        if self._is_empty("}", found):
            return found
        while True:
            lead = self._taken(_LEAD)
            raw = lead[1]
            name = json.loads(raw) if "\\" in raw else raw[1:-1]
            if name in found:
                # Programs differ in which of the two they read.
                raise ValueError(f"expected each name of an object once, found {json.dumps(name)[:100]} twice")
            leads[name] = lead[0]
            item = self.value(level + 1)
            dict.__setitem__(found, name, item)
            if self._is_last("}", found, item):
                found.leads = leads
                return found

    def _array(self, level: int) -> Array:
        found = Array()
        if self._is_empty("]", found):
            return found
        while True:
            found.gap = before = self.space()
            item = self.value(level + 1)
            item.before = before
            found.append(item)
            if self._is_last("]", found, item):
                return found

    def _is_empty(self, closing: str, found: Object | Array) -> bool:
        """Take what begins an object or array, and also its end if it is empty."""
        self.position += 1
        start, found.closing = self.position, self.space()
        if self.text[self.position : self.position + 1] == closing:
            self.position += 1
            return True
        self.position = start
        return False

    def _is_last(self, closing: str, found: Object | Array, item: Node) -> bool:
        """Take what stands behind a value; return whether it was the last one."""
        space, character = self._taken(_NEXT).groups()
        if character == ",":
            item.after = space
            return False
        if character != closing:
            raise self.unexpected()
        found.closing = space
        return True
