"""A warning of the lint: a sentence with a stable name, under which the documentation explains the rule."""

from __future__ import annotations

from typing import Self

_RULES = "docs/queue.md"


class QueueWarning(str):
    """A sentence about a setting that works and will cause trouble later, or about a queue that runs into some.

    :param name: stays the same between releases, such as ``long-ack-wait``
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, name: str, text: str) -> Self:
        """Make a warning of the rule's name and the sentence."""
        warning = super().__new__(cls, text)
        warning.name = name
        return warning

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.name, str(self)

    @property
    def rule(self) -> str:
        """The place in the documentation that explains the rule."""
        return f"{_RULES}#{self.name}"
