"""What a command prints: results on the standard output, for people or as JSON; everything else on standard error.

Nothing that anybody may have written moves the cursor of a terminal, changes its colours or hides text.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# Control characters, halves of characters, and invisible characters, such as marks of the direction of text.
_UNSAFE = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_KEPT = "\n\t"
_REFRESH_SECONDS = 0.2
_LONGEST_CELL = 100
_ERASE_LINE = "\r\x1b[K"


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


class Output:
    """The standard output and standard error of a command.

    :param as_json: whether results are JSON
    :ivar is_closed: whether the reader of the standard output has closed it
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.is_closed = False
        self._shows_progress = False
        self._refreshed_at = 0.0
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                # A terminal of another encoding than UTF-8 gets escapes instead of an error.
                reconfigure(errors="backslashreplace")

    def document(self, value: Mapping[str, Any] | Sequence[Any]) -> None:
        """Print a result as JSON, of ASCII only: no letter's text can act on a terminal."""
        self._write(json.dumps(value, indent=2, allow_nan=False) + "\n")

    def record(self, value: Mapping[str, Any]) -> None:
        """Print one of many results as JSON on a line of its own."""
        self._write(json.dumps(value, allow_nan=False) + "\n")

    def text(self, text: str) -> None:
        """Print lines for people."""
        self._write(safe_text(text) + "\n")

    def source(self, text: str) -> None:
        """Print a file's content: as it is, but for what could act on a terminal where there is one."""
        if sys.stdout.isatty():
            self.text(text.removesuffix("\n"))
        else:
            self.raw(text.encode())

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            self.is_closed = True
            raise

    def row(self, cells: Sequence[object], widths: Sequence[int]) -> None:
        """Print one of many rows of columns; the last one may be wider.

        :param widths: of the columns, in characters
        """
        shown = [safe_line("" if cell is None else cell, _LONGEST_CELL) for cell in cells]
        self._write("  ".join(cell.ljust(width) for cell, width in zip(shown, widths, strict=True)).rstrip() + "\n")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table of few rows; with rich, where it is installed, on a terminal."""
        shown = [[safe_line("" if cell is None else cell, _LONGEST_CELL) for cell in row] for row in rows]
        if sys.stdout.isatty() and _print_rich(headings, shown):
            return
        widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
        for row in (headings, *shown):
            self._write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")

    def note(self, text: str) -> None:
        """Print a line for people on standard error."""
        self._end_progress()
        self._write_error(safe_text(text) + "\n")

    def error(self, text: str, code: str | None = None) -> None:
        """Print an error on standard error; as JSON where results are."""
        self._end_progress()
        if self.as_json:
            self._write_error(json.dumps({"error": {"code": code, "message": text}}) + "\n")
        else:
            self._write_error(f"jetstream-queue: {safe_text(text)}\n")

    def progress(self, text: str) -> None:
        """Show on a terminal's last line what has been done so far."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._refreshed_at < _REFRESH_SECONDS:
            return
        self._refreshed_at, self._shows_progress = now, True
        self._write_error(_ERASE_LINE + safe_line(text, _LONGEST_CELL))

    def flush(self) -> None:
        """Write what is buffered.

        :raises BrokenPipeError: nobody reads it
        """
        self._end_progress()
        self._write("")

    def discard(self) -> None:
        """Drop buffered and later output: the interpreter would flush it when it ends."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def _write(self, text: str) -> None:
        try:
            if text:
                self._end_progress()
                sys.stdout.write(text)
            else:
                sys.stdout.flush()
        except BrokenPipeError:
            self.is_closed = True
            raise

    def _end_progress(self) -> None:
        if self._shows_progress:
            self._shows_progress = False
            self._write_error(_ERASE_LINE)

    @staticmethod
    def _write_error(text: str) -> None:
        stderr: TextIO = sys.stderr
        with suppress(BrokenPipeError):
            stderr.write(text)
            stderr.flush()


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print a table with rich; return whether it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*headings)
    for row in rows:
        # As text: in a plain string, rich would take brackets for its markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return True
