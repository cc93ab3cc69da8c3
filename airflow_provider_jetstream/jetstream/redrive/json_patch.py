"""A change of many letters, declared as a JSON Patch (RFC 6902)."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.json_text import (
    Array,
    Node,
    Object,
    Scalar,
    compacted,
    json_text,
    parse_json,
)
from airflow_provider_jetstream.jetstream.task_values import TaskValue

if TYPE_CHECKING:
    from jsonpatch import JsonPatch as LibraryPatch

MOST_OPERATIONS: Final = 100
# The record of a redrive, which is stored again and again, holds the patch.
LONGEST_PATCH: Final = 16 * 1024
# A larger one may take more than a second, and a hundred times its memory.
LARGEST_BODY: Final = 1024 * 1024
# What a patch may make of it. What an operation adds counts even where a later one removes it again.
LARGEST_RESULT: Final = 2 * LARGEST_BODY
_MOST_VALUES: Final = 100_000
# What each operation needs beside its path.
_NEEDED: Final = {
    **dict.fromkeys(("add", "replace", "test"), "value"),
    **dict.fromkeys(("move", "copy"), "from"),
    "remove": None,
}
_UNTOUCHED = "the letter is untouched"
_TOO_LARGE = f"the patched body would have more than {LARGEST_RESULT} bytes"


@dataclass(frozen=True, slots=True)
class JsonPatch(TaskValue):
    """Operations on JSON bodies by RFC 6902: ``add``, ``remove``, ``replace``, ``move``, ``copy`` and ``test``.

    What no operation addresses stays byte for byte. A body that lacks an addressed place, or fails a ``test``, isn't
    changed at all, nor is one that isn't UTF-8 or JSON, or has an object with two members of one name.

    :param text: the operations as a JSON array, without white space
    :raises RedriveRequestError: it is none, or too long
    """

    text: str

    def __post_init__(self) -> None:
        _operations(self.text)

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
            return cls(json_text(compacted(parse_json(source)[1])))
        except ValueError as error:
            raise RedriveRequestError(f"expected a JSON Patch, a JSON array of operations: {error}") from None

    def patched(self, body: bytes) -> bytes:
        """Return a body with the changes.

        :raises RedriveError: it can't be changed as the patch says, or only with more than that
        """
        if len(body) > LARGEST_BODY:
            raise RedriveError(
                f"expected a body of at most {LARGEST_BODY} bytes for the patch, found {len(body)}; {_UNTOUCHED}"
            )
        try:
            before, value, after = parse_json(body.decode())
            room = _Room(LARGEST_RESULT - len(body))
            for number, operation in enumerate(_operations(self.text), 1):
                value = _applied(operation, number, value, room)
            return f"{before}{json_text(value, LARGEST_RESULT)}{after}".encode()
        except OverflowError:
            # White space around one value is repeated for each that is added beside it.
            raise RedriveError(f"{_TOO_LARGE}; {_UNTOUCHED}") from None
        except UnicodeDecodeError:
            raise RedriveError(
                f"expected a body of JSON for the patch, found bytes that aren't UTF-8; {_UNTOUCHED}"
            ) from None
        except ValueError as error:
            raise RedriveError(f"the patch can't be applied to the body: {error}; {_UNTOUCHED}") from None
        except RecursionError:
            # Copied into itself again and again, a body is deeper than what copies it can be.
            raise RedriveError(f"the patched body would have too many levels; {_UNTOUCHED}") from None


@dataclass(slots=True)
class _Room:
    """What operations may still add to a body.

    :param size: in bytes
    :param values: by copies, in values
    """

    size: int
    values: int = _MOST_VALUES


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation.

    :param patch: with this operation only, so that an error is known to be about it
    """

    name: str
    path: str
    fields: dict[str, Any]
    patch: LibraryPatch

    def take_room(self, value: Node, room: _Room) -> None:
        """Take the room of what the operation is about to add; what is copied is measured, and not copied.

        :param value: the body that it is applied to
        :raises OverflowError: there is less
        :raises ValueError: a copy has too many values or levels
        """
        added = self.fields.get("value") if self.name in ("add", "replace") else None
        if self.name == "copy":
            from jsonpointer import JsonPointer

            added = JsonPointer(self.fields["from"]).resolve(value)
            room.values -= _count(added, room.values + 1)
            if room.values < 0:
                raise ValueError(f"the body would have more than {_MOST_VALUES} values")
        if added is not None:
            text = json_text(added, max(room.size - len(self.path), 0))
            room.size -= len(text.encode("utf-8", "surrogatepass")) + len(self.path)

    def applied(self, value: Node) -> Node:
        """Return a body with the change."""
        patch, added = self.patch, self.fields.get("value")
        if isinstance(added, Object | Array):
            # Some versions of jsonpatch add it without a copy: later operations would change it for all letters.
            patch = type(patch)([self.fields | {"value": copy.deepcopy(added)}])
        changed: Node = patch.apply(value, in_place=True)
        return changed


def _applied(operation: _Operation, number: int, value: Node, room: _Room) -> Node:
    from jsonpatch import JsonPatchException, JsonPatchTestFailed
    from jsonpointer import JsonPointerException

    where = f"operation {number} of the patch, {operation.name} {operation.path or 'the whole body'}"
    try:
        operation.take_room(value, room)
        return operation.applied(value)
    except JsonPatchTestFailed:
        # Without the value: letters are counted by this text, and it is stored where bodies aren't shown.
        raise RedriveError(f"{where}: the body has another value there, or none; {_UNTOUCHED}") from None
    except (JsonPatchException, JsonPointerException):
        raise RedriveError(f"{where}: the body has no such place; {_UNTOUCHED}") from None
    except OverflowError:
        raise RedriveError(f"{where}: {_TOO_LARGE}; {_UNTOUCHED}") from None
    except ValueError as error:
        raise RedriveError(f"{where}: {error}; {_UNTOUCHED}") from None


def _count(value: Node, most: int) -> int:
    """Return how many values there are in one, at most so many."""
    count, waiting = 0, [value]
    while waiting and count < most:
        count += 1
        item = waiting.pop()
        if isinstance(item, Object):
            waiting += item.values()
        elif isinstance(item, Array):
            waiting += item
    return count


@lru_cache(maxsize=16)
def _operations(text: str) -> tuple[_Operation, ...]:
    if len(text.encode("utf-8", "replace")) > LONGEST_PATCH:
        raise _too_long(len(text))
    try:
        text.encode()
        _, value, _ = parse_json(text)
    except UnicodeEncodeError:
        raise RedriveRequestError("expected a JSON Patch that is UTF-8, found half a character") from None
    except ValueError as error:
        raise RedriveRequestError(f"expected a JSON Patch, a JSON array of operations: {error}") from None
    if not isinstance(value, Array) or not 0 < len(value) <= MOST_OPERATIONS:
        found = f"{len(value)} operations" if isinstance(value, Array) else f"{text[:100]!r}"
        raise RedriveRequestError(
            f"expected a JSON Patch, an array of 1 to {MOST_OPERATIONS} operations such as"
            f' {{"op": "replace", "path": "/currency", "value": "EUR"}}, found {found}'
        )
    return tuple(_operation(item, number) for number, item in enumerate(value, 1))


def _operation(item: Node, number: int) -> _Operation:
    try:
        from jsonpatch import JsonPatch as LibraryPatch
        from jsonpatch import JsonPatchException
        from jsonpointer import JsonPointer, JsonPointerException
    except ImportError as error:
        raise RedriveRequestError(
            f"expected jsonpatch for a JSON Patch, found none ({error}): install it, or this package with its extra"
            " patch"
        ) from None
    fields: dict[str, Any] = {}
    for name, field in item.items() if isinstance(item, Object) else ():
        fields[name] = field
        # The library reads these itself; the value stays its text.
        if name in ("op", "path", "from") and isinstance(field, Scalar) and field.text.startswith('"'):
            fields[name] = json.loads(field.text)
    kind, path = fields.get("op"), fields.get("path")
    if not isinstance(kind, str) or kind not in _NEEDED or not isinstance(path, str):
        raise RedriveRequestError(
            f"expected an op ({', '.join(sorted(_NEEDED))}) and a path in operation {number} of the JSON Patch, found"
            f" {json_text(item)[:100]}"
        )
    needed = _NEEDED[kind]
    if (needed and needed not in fields) or (needed == "from" and not isinstance(fields[needed], str)):
        raise RedriveRequestError(
            f"expected {needed} in operation {number} of the JSON Patch, {kind} {path}, found none"
        )
    if kind == "remove" and not path:
        raise RedriveRequestError(f"expected a path in operation {number} of the JSON Patch: a body can't be removed")
    source = str(fields["from"]) if needed == "from" else ""
    if kind == "move" and path.startswith(f"{source}/"):
        raise RedriveRequestError(
            f"expected another place in operation {number} of the JSON Patch, found {path} in {source}"
        )
    try:
        JsonPointer(source)
        return _Operation(kind, path, fields, LibraryPatch([fields]))
    except (JsonPatchException, JsonPointerException, TypeError) as error:
        raise RedriveRequestError(f"expected a JSON Patch, found otherwise in operation {number}: {error}") from None


def _too_long(found: int) -> RedriveRequestError:
    return RedriveRequestError(f"expected a JSON Patch of at most {LONGEST_PATCH} bytes, found {found} characters")
