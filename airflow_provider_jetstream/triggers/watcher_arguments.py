"""Dicts among the arguments of a watcher's trigger, as JSON texts.

Airflow 3.2 writes the keys of its own encoding of a dict as ``Encoding.TYPE`` and ``Encoding.VAR`` when it stores the
trigger of an ``AssetWatcher``, and hands that to the trigger in place of the dict (seen with 3.2.2; 3.1.8 and 3.3.2
hand the dict on). A triggerer whose trigger refuses it ends. Texts, numbers and lists of texts aren't encoded.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def dicts_as_texts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with their dicts as JSON texts."""
    return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in arguments.items()}


def dict_of_text(argument: Any) -> Any:
    """Return the dict that an argument is the JSON text of, or the argument itself where it is none."""
    # A path doesn't begin like that.
    if not isinstance(argument, str) or not argument.startswith("{"):
        return argument
    try:
        return json.loads(argument)
    except (ValueError, RecursionError):
        return argument
