"""Showing a job's body as text: indented where it is JSON, as it is where it is text, else in hexadecimal."""

from __future__ import annotations

import json

from airflow_provider_jetstream.plugins.monitor.models import Payload

_LINE = 16
_PRINTABLE = range(0x20, 0x7F)


def payload_of(body: bytes, most: int) -> Payload:
    """Show a body, or the beginning of it.

    :param body: the body
    :param most: how many bytes of it at most; indented JSON may have four times as many
    :return: what the page shows, as text
    """
    cut, truncated = body[:most], len(body) > most
    text = _text(cut, truncated=truncated)
    if text is None:
        return Payload(kind="hex", text=_dump(cut), size=len(body), truncated=truncated)
    if not truncated and (indented := _indented(text)) is not None and len(indented) <= 4 * most:
        return Payload(kind="json", text=indented, size=len(body), truncated=False)
    return Payload(kind="text", text=text, size=len(body), truncated=truncated)


def shown(text: str) -> str:
    """Make a text fit for JSON: headers may hold bytes that aren't UTF-8.

    :param text: the text
    :return: the same with a mark in place of what can't be shown
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _text(cut: bytes, *, truncated: bool) -> str | None:
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        # The cut may go through the middle of a character.
        if not truncated or error.start < len(cut) - 3:
            return None
        text = cut[: error.start].decode()
    return None if "\0" in text else text


def _indented(text: str) -> str | None:
    try:
        value = json.loads(text)
        # Else every text of digits would be called JSON.
        return json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, (dict, list)) else None
    except (ValueError, RecursionError):
        return None


def _dump(cut: bytes) -> str:
    lines = (cut[start : start + _LINE] for start in range(0, len(cut), _LINE))
    return "\n".join(
        f"{number * _LINE:08x}  {line.hex(' '):<{3 * _LINE}} "
        f"{''.join(chr(byte) if byte in _PRINTABLE else '.' for byte in line)}"
        for number, line in enumerate(lines)
    )
