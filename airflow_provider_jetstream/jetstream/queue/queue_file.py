"""A queue's YAML file, read within limits: its size, its levels, and the values that its aliases stand for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.limits import QUANTITY, QUEUE_FILE, QUEUE_FILE_LEVELS, QUEUE_FILE_VALUES
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# A number to the base 60, as YAML 1.1 has them; making one takes a time that grows with the square of its length.
_SEXAGESIMAL: Final = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")


def read_queue_file(path: Path) -> Any:
    """Read the content of a YAML file.

    :raises QueueDeclarationError: there is no such file, it isn't YAML, or more than any queue needs
    """
    try:
        with path.open("rb") as file:
            content = file.read(QUEUE_FILE + 1)
    except (OSError, ValueError) as error:
        # ValueError: the path has a null character.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise QueueDeclarationError(str(path), [f"expected a YAML file at this path, found: {reason}"]) from None
    try:
        return parse_queue_yaml(content)
    except ValueError as error:
        raise QueueDeclarationError(str(path), [str(error)]) from None


def parse_queue_yaml(content: bytes) -> Any:
    """Parse YAML.

    :raises ValueError: it isn't YAML in UTF-8, or more than any queue needs
    """
    import yaml

    if len(content) > QUEUE_FILE:
        raise ValueError(f"expected a queue's file of at most {QUEUE_FILE} bytes, found more")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = content.decode()
        _DocumentSize().check(yaml.parse(text, Loader=loader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"expected YAML, found something else: {error}") from None
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506
    except (yaml.YAMLError, OverflowError, ValueError) as error:
        # Not YAML's own: a number of thousands of digits, or a date that there isn't.
        raise ValueError(f"expected YAML, found something else: {one_line(str(error))}") from None


class _DocumentSize:
    """The levels and values of a document, counted before any value of it is made; an alias has those of its anchor."""

    def __init__(self) -> None:
        self._values = 0
        # For each open collection the anchor that it has, and how many values began before it.
        self._opened: list[tuple[str | None, int]] = []
        self._anchors: dict[str, int] = {}

    def check(self, events: Iterable[Any]) -> None:
        """Count what a document consists of.

        :raises ValueError: it is more than any queue needs
        """
        for event in events:
            if tag := getattr(event, "tag", None):
                # Tags make other things than a declaration consists of.
                raise ValueError(f"expected values without tags, found {shown_value(tag)}: leave it out")
            self._count(event)
            if len(self._opened) > QUEUE_FILE_LEVELS:
                raise ValueError(f"expected at most {QUEUE_FILE_LEVELS} levels, found more")
            if self._values > QUEUE_FILE_VALUES:
                raise ValueError(f"expected at most {QUEUE_FILE_VALUES} values, with those of aliases, found more")

    def _count(self, event: Any) -> None:
        from yaml import events as kinds

        match event:
            case kinds.AliasEvent(anchor=anchor):
                if anchor not in self._anchors:
                    raise ValueError(f"expected an anchor before its alias, found *{anchor} within it or before")
                self._values += self._anchors[anchor]
            case kinds.ScalarEvent(anchor=anchor, value=text, implicit=(is_plain, _)):
                if is_plain and len(text) > QUANTITY and _SEXAGESIMAL.fullmatch(text):
                    raise ValueError(f"expected a number of at most {QUANTITY} characters, found {shown_value(text)}")
                self._values += 1
                if anchor:
                    self._anchors[anchor] = 1
            case kinds.CollectionStartEvent(anchor=anchor):
                self._opened.append((anchor, self._values))
                self._values += 1
            case kinds.CollectionEndEvent():
                anchor, before = self._opened.pop()
                if anchor:
                    self._anchors[anchor] = self._values - before
