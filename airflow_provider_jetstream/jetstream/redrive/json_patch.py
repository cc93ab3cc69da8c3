"""A change of many letters, declared as a JSON Patch (RFC 6902), which the library ``jsonpatch`` applies.

Numbers keep their text: ``1.10``, ``1E400`` and numbers of any length are as they were. White space isn't kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Final

from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.task_values import TaskValue

MOST_OPERATIONS: Final = 100
# The record of a redrive, which is stored again and again, holds the patch.
LONGEST_PATCH: Final = 16 * 1024
# A larger one may take more than a second, and a hundred times its memory.
LARGEST_BODY: Final = 1024 * 1024
# What a patch may make of it. What an operation adds counts even where a later one removes it again.
LARGEST_RESULT: Final = 2 * LARGEST_BODY
# Deeper ones are refused: what writes them calls itself for each level.
MOST_LEVELS: Final = 100
# What each operation needs beside its path.
_NEEDED: Final = {
    **dict.fromkeys(("add", "replace", "test"), "value"),
    **dict.fromkeys(("move", "copy"), "from"),
    "remove": None,
}
_UNTOUCHED = "the letter is untouched"


class _Number:
    """A number of JSON, as it is written: equal to another one of the same value."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and (self.text == other.text or self._value() == other._value())

    __hash__ = None  # type: ignore[assignment]

    def _value(self) -> Decimal | str:
        try:
            return Decimal(self.text)
        except InvalidOperation:
            # Its exponent is beyond what decimals have.
            return self.text


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; each number in it has its text.

    :raises ValueError: it isn't JSON, an object has two members of one name, or it has too many levels
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=_Number, parse_float=_Number, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, found something else at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in members:
        if name in found:
            # Programs differ in which of the two they read.
            raise ValueError(f"expected each name of an object once, found {json.dumps(name)[:100]} twice")
        found[name] = value
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"expected JSON, found {name}")


def json_text(value: Any, indent: str | None = None) -> str:
    """Return a parsed value as JSON.

    :param indent: of a level, where each value has a line of its own
    :raises ValueError: it has too many levels
    """
    parts: list[str] = []
    _write(value, parts, 0, indent)
    return "".join(parts)


def _write(value: Any, parts: list[str], level: int, indent: str | None) -> None:
    if isinstance(value, _Number):
        parts.append(value.text)
        return
    if not isinstance(value, dict | list):
        parts.append(_scalar(value))
        return
    if level >= MOST_LEVELS:
        raise _too_deep()
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    line = "" if indent is None else f"\n{indent * (level + 1)}"
    colon = ":" if indent is None else ": "
    before = f"{opening}{line}"
    for item in value:
        parts.append(before)
        if isinstance(value, dict):
            parts.append(f"{_scalar(item)}{colon}")
        _write(value[item] if isinstance(value, dict) else item, parts, level + 1, indent)
        before = f",{line}"
    if not value:
        parts.append(opening)
    elif indent is not None:
        parts.append(f"\n{indent * level}")
    parts.append(closing)


def _scalar(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half a character can only be escaped.
        return json.dumps(value)
    return text


def _too_deep() -> ValueError:
    return ValueError(f"expected at most {MOST_LEVELS} levels of objects and arrays, found more")


@dataclass(frozen=True, slots=True)
class JsonPatch(TaskValue):
    """Operations on JSON bodies by RFC 6902: ``add``, ``remove``, ``replace``, ``move``, ``copy`` and ``test``.

    Values that no operation addresses stay as they are. A body that lacks an addressed place, or fails a ``test``,
    isn't changed at all, nor is one that isn't UTF-8 or JSON, or has an object with two members of one name.

    :param text: the operations as a JSON array, without white space
    :raises RedriveRequestError: it is none, or too long
    """

    text: str

    def __post_init__(self) -> None:
        _check(self.text)

    @classmethod
    def of(cls, source: object) -> JsonPatch:
        """Build a patch from any form that requests and operators accept.

        :param source: a patch, its JSON text, whose numbers stay as they are written, or a list of operations
        :raises RedriveRequestError: it is none of these
        """
        if isinstance(source, JsonPatch):
            return source
        if not isinstance(source, str):
            try:
                source = json.dumps(source, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RedriveRequestError(f"expected a JSON Patch as JSON values, found otherwise: {error}") from None
        # White space isn't part of what is limited, but reading it takes time, too.
        if len(source) > 4 * LONGEST_PATCH:
            raise _too_long(len(source))
        try:
            return cls(json_text(parse_json(source)))
        except ValueError as error:
            raise _no_patch(error) from None

    def patched(self, body: bytes) -> bytes:
        """Return a body with the changes; the same bytes where they change no value.

        :raises RedriveError: it can't be changed as the patch says, or only with more than that
        """
        if len(body) > LARGEST_BODY:
            raise RedriveError(
                f"expected a body of at most {LARGEST_BODY} bytes for the patch, found {len(body)}; {_UNTOUCHED}"
            )
        try:
            value = parse_json(body.decode())
            before, room = json_text(value), LARGEST_RESULT - len(body)
            # Parsed for each body: what an operation adds becomes a part of it, and later ones change that.
            for number, operation in enumerate(parse_json(self.text), 1):
                value, room = _applied(operation, number, value, room)
            after = json_text(value)
        except UnicodeDecodeError:
            raise RedriveError(
                f"expected a body of JSON for the patch, found bytes that aren't UTF-8; {_UNTOUCHED}"
            ) from None
        except ValueError as error:
            raise RedriveError(f"the patch can't be applied to the body: {error}; {_UNTOUCHED}") from None
        return body if after == before else after.encode()


def _applied(operation: dict[str, Any], number: int, value: Any, room: int) -> tuple[Any, int]:
    """Return a body with one change, and how many bytes later ones may add; what is copied is measured before."""
    from jsonpatch import JsonPatch as LibraryPatch
    from jsonpatch import JsonPatchException, JsonPatchTestFailed
    from jsonpointer import JsonPointer, JsonPointerException

    kind, path = operation["op"], operation["path"]
    where = f"operation {number} of the patch, {kind} {path or 'the whole body'}"
    try:
        added = JsonPointer(operation["from"]).resolve(value) if kind == "copy" else operation.get("value", "")
        room -= len(json.dumps([path, added], default=_text_of))
        if room < 0:
            raise RedriveError(f"{where}: the patched body would have more than {LARGEST_RESULT} bytes; {_UNTOUCHED}")
        return LibraryPatch([operation]).apply(value, in_place=True), room
    except JsonPatchTestFailed:
        # Without the value: letters are counted by this text, and it is stored where bodies aren't shown.
        raise RedriveError(f"{where}: the body has another value there, or none; {_UNTOUCHED}") from None
    except (JsonPatchException, JsonPointerException):
        raise RedriveError(f"{where}: the body has no such place; {_UNTOUCHED}") from None
    except RecursionError:
        raise RedriveError(f"{where}: {_too_deep()}; {_UNTOUCHED}") from None


def _text_of(number: Any) -> str:
    return str(number.text)


@lru_cache(maxsize=16)
def _check(text: str) -> None:
    """Refuse what is no patch.

    :raises RedriveRequestError: it is none, or too long
    """
    if len(text.encode("utf-8", "replace")) > LONGEST_PATCH:
        raise _too_long(len(text))
    try:
        value = parse_json(text)
    except ValueError as error:
        raise _no_patch(error) from None
    if not isinstance(value, list) or not 0 < len(value) <= MOST_OPERATIONS:
        found = f"{len(value)} operations" if isinstance(value, list) else f"{text[:100]!r}"
        raise RedriveRequestError(
            f"expected a JSON Patch, an array of 1 to {MOST_OPERATIONS} operations such as"
            f' {{"op": "replace", "path": "/currency", "value": "EUR"}}, found {found}'
        )
    for number, operation in enumerate(value, 1):
        _check_operation(operation, number)


def _check_operation(operation: Any, number: int) -> None:
    try:
        from jsonpatch import JsonPatch as LibraryPatch
        from jsonpatch import JsonPatchException
        from jsonpointer import JsonPointer, JsonPointerException
    except ImportError as error:
        raise RedriveRequestError(
            f"expected jsonpatch for a JSON Patch, found none ({error}): install it, or this package with its extra"
            " patch"
        ) from None
    fields = operation if isinstance(operation, dict) else {}
    kind, path = fields.get("op"), fields.get("path")
    if not isinstance(kind, str) or kind not in _NEEDED or not isinstance(path, str):
        raise RedriveRequestError(
            f"expected an op ({', '.join(sorted(_NEEDED))}) and a path in operation {number} of the JSON Patch, found"
            f" {json_text(operation)[:100]}"
        )
    needed = _NEEDED[kind]
    if (needed and needed not in fields) or (needed == "from" and not isinstance(fields[needed], str)):
        raise RedriveRequestError(
            f"expected {needed} in operation {number} of the JSON Patch, {kind} {path}, found none"
        )
    if kind == "remove" and not path:
        raise RedriveRequestError(f"expected a path in operation {number} of the JSON Patch: a body can't be removed")
    source = fields["from"] if needed == "from" else ""
    if kind == "move" and path.startswith(f"{source}/"):
        raise RedriveRequestError(
            f"expected another place in operation {number} of the JSON Patch, found {path} in {source}"
        )
    try:
        JsonPointer(source)
        LibraryPatch([fields])
    except (JsonPatchException, JsonPointerException, TypeError) as error:
        raise RedriveRequestError(f"expected a JSON Patch, found otherwise in operation {number}: {error}") from None


def _no_patch(error: ValueError) -> RedriveRequestError:
    return RedriveRequestError(f"expected a JSON Patch, a JSON array of operations: {error}")


def _too_long(found: int) -> RedriveRequestError:
    return RedriveRequestError(f"expected a JSON Patch of at most {LONGEST_PATCH} bytes, found {found} characters")
