"""Text that anybody may have written, for a terminal: nothing in it moves the cursor, changes colours or hides text."""

from __future__ import annotations

import unicodedata

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text

# Control characters, halves of characters, and invisible ones: those that change the direction of text among them.
_UNSAFE = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_KEPT = "\n\t"


def safe_line(text: object, limit: int | None = None) -> str:
    """Return a text as one line in which every unsafe character is U+FFFD.

    :param limit: of the line, in characters; what is longer ends with …
    """
    shown = str(text)
    if limit is not None:
        # Whatever its length: only this much of it is looked at.
        shown = shown[: 2 * limit + 1]
    line = _safe(" ".join(shown.split()) if not shown.isprintable() else shown, kept="")
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def safe_text(text: str) -> str:
    """Return a text in which every unsafe character but line breaks and tabs is U+FFFD."""
    return _safe(text.replace("\r\n", "\n"), kept=_KEPT)


def _safe(text: str, kept: str) -> str:
    if text.isprintable() and text.isascii():
        return text
    return "".join(
        "\ufffd" if unicodedata.category(character) in _UNSAFE and character not in kept else character
        for character in readable_text(text)
    )
