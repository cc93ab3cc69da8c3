"""The body of a job for people: the bytes as they are stored, and beside them a form that is easier to read."""

from __future__ import annotations

import json
import re
from collections import Counter
from hashlib import sha256
from itertools import pairwise
from typing import Any

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.models.letters import Payload

_DUMP_WIDTH = 16
_PRINTABLE = range(0x20, 0x7F)
_INDENT = "  "
# Of a text that is known to be JSON: texts, signs, and all that stands between them.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_NAMED_TWICE = 5


def payload_of(body: bytes, max_bytes: int) -> Payload:
    """Return a body for people.

    :param max_bytes: how many bytes of it are shown; indented JSON may have four times as many
    """
    cut, truncated = body[:max_bytes], len(body) > max_bytes
    raw = _text(cut, truncated=truncated)
    found: dict[str, Any] = {"size": len(body), "sha256": sha256(body).hexdigest(), "truncated": truncated}
    if raw is None:
        dump = _hex_dump(cut)
        return Payload(kind="binary", hex=dump, text=dump, **found)
    repeated = None if truncated else _repeated_names(raw)
    if repeated is None:
        return Payload(kind="text", raw=raw, text=raw, **found)
    indented = _indented(raw, 4 * max_bytes)
    notes = [
        f"the name {json.dumps(name, ensure_ascii=False)} comes {count} times in one object: most readers take the last"
        for name, count in repeated.most_common(_NAMED_TWICE)
    ]
    return Payload(kind="json", raw=raw, parsed=indented, notes=notes, text=indented or raw, **found)


def _text(cut: bytes, *, truncated: bool) -> str | None:
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        # The cut may go through the middle of a character.
        if not truncated or error.start < len(cut) - 3:
            return None
        text = cut[: error.start].decode()
    return None if "\0" in text else text


def _repeated_names(text: str) -> Counter[str] | None:
    """Return the names that come more than once in an object of a JSON text, and how often; ``None`` for other text."""
    repeated: Counter[str] = Counter()

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(names := Counter(name for name, _ in pairs)) < len(pairs):
            repeated.update({readable_text(name): times for name, times in names.items() if times > 1})
        return {}

    try:
        # Only objects and lists: otherwise every text of digits would be called JSON.
        return repeated if isinstance(json.loads(text, object_pairs_hook=count), (dict, list)) else None
    except (ValueError, RecursionError):
        return None


def _indented(text: str, longest: int) -> str | None:
    """Indent a JSON text and change nothing else of it; ``None`` where it would grow beyond ``longest``.

    Written from its tokens rather than from its values: those of ``{"a":1,"a":2,"f":1.10}`` are others.
    """
    parts: list[str] = []
    depth = length = 0
    for found, following in pairwise([*_TOKEN.findall(text), ""]):
        if found in "{[":
            depth += 1
            part = found if following in "}]" else f"{found}\n{_INDENT * depth}"
        elif found in "}]":
            depth -= 1
            part = found if parts[-1] in ("{", "[") else f"\n{_INDENT * depth}{found}"
        else:
            part = {",": f",\n{_INDENT * depth}", ":": ": "}.get(found, found)
        parts.append(part)
        length += len(part)
        if length > longest:
            return None
    return "".join(parts)


def _hex_dump(cut: bytes) -> str:
    lines = (cut[start : start + _DUMP_WIDTH] for start in range(0, len(cut), _DUMP_WIDTH))
    return "\n".join(
        f"{number * _DUMP_WIDTH:08x}  {line.hex(' '):<{3 * _DUMP_WIDTH}} "
        f"{''.join(chr(byte) if byte in _PRINTABLE else '.' for byte in line)}"
        for number, line in enumerate(lines)
    )
