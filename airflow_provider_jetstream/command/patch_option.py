"""The JSON Patch that an option gives, or its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import ArgumentError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch

_STANDARD_INPUT = "-"
# What is longer is refused anyway.
_MOST_BYTES = 1 << 20


def read_patch(option: str) -> JsonPatch:
    """Return the patch that an option gives: the JSON itself, the path of its file, or ``-``.

    :raises ArgumentError: the file can't be read
    :raises RedriveRequestError: it is no JSON Patch
    """
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch

    if option.lstrip().startswith("["):
        return JsonPatch.of(option)
    try:
        if option == _STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MOST_BYTES)
        else:
            with Path(option).open("rb") as file:
                content = file.read(_MOST_BYTES)
        return JsonPatch.of(content.decode())
    except OSError as error:
        raise ArgumentError(
            f"expected a JSON Patch, a JSON array, or its file, found {error.strerror} for {option[:200]!r}"
        ) from None
    except UnicodeDecodeError:
        raise ArgumentError(f"expected a JSON Patch in {option!r}, found bytes that aren't UTF-8") from None
