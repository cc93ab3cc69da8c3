"""What differs between a letter's body and its new job's, for people: a unified difference of lines."""

from __future__ import annotations

from difflib import unified_diff
from typing import Final

from airflow_provider_jetstream.jetstream.redrive.json_text import indented_json

# Comparing longer ones takes long, and nobody reads more.
_LARGEST: Final = 64 * 1024
_MOST_LINES: Final = 2_000
_SHOWN_LINES: Final = 40
_SHOWN_CHARACTERS: Final = 200


def body_difference(before: bytes, after: bytes) -> str:
    """Return the first lines in which two bodies differ; JSON with a line for each value, which changes no value.

    What isn't UTF-8 is escaped. Empty where nothing differs.
    """
    if before == after:
        return ""
    if max(len(before), len(after)) > _LARGEST:
        return f"{len(before)} bytes before, {len(after)} after: too long to show what differs"
    old, new = _lines(before), _lines(after)
    if old == new:
        # White space of JSON.
        old, new = (body.decode("utf-8", "backslashreplace").splitlines() for body in (before, after))
    if max(len(old), len(new)) > _MOST_LINES:
        return f"{len(old)} lines before, {len(new)} after: too many to show what differs"
    lines = list(unified_diff(old, new, "before", "after", lineterm=""))
    shown = [_short(line) for line in lines[:_SHOWN_LINES]]
    return "\n".join([*shown, f"… {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else shown)


def _lines(body: bytes) -> list[str]:
    text = body.decode("utf-8", "backslashreplace")
    try:
        return indented_json(text).splitlines()
    except ValueError:
        return text.splitlines()


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}… ({len(line)} characters)"
