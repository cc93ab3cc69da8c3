"""Sentences about a queue with stable names; the kinds that the preconditions find."""

from __future__ import annotations

from typing import Self


class Finding(str):
    """A sentence about a queue's configuration or state.

    :param name: stays the same between releases, such as ``paused-consumer``
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, name: str, text: str) -> Self:
        """Make a finding of its name and the sentence."""
        finding = super().__new__(cls, text)
        finding.name = name
        return finding

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.name, str(self)


class Refusal(Finding):
    """Why a queue can't be scanned, waited for or redriven at all."""

    __slots__ = ()


class Restriction(Finding):
    """What isn't possible with a queue, or can't be known of it now."""

    __slots__ = ()


class Risk(Finding):
    """What could be lost."""

    __slots__ = ()
