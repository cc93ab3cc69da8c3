"""What the messages of a key-value bucket say: which key, and whether it was put, deleted or purged.

Protocol: ADR-8 "JetStream based Key-Value Stores"; ADR-43 for the markers that the server stores.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BUCKET_STREAM: Final = "KV_"
# A bucket that mirrors another one has the subjects of that one.
_BEFORE_KEY = r"^\$KV\.[^.]*\."
_OPERATION, _MARKER = "KV-Operation", "Nats-Marker-Reason"
_KINDS = {
    (_OPERATION, "DEL"): "delete",
    (_OPERATION, "PURGE"): "purge",
    (_MARKER, "Remove"): "delete",
    (_MARKER, "MaxAge"): "purge",
    (_MARKER, "Purge"): "purge",
}


def key_column(subjects: pa.StringArray) -> pa.StringArray:
    """Return the keys of subjects."""
    return pc.replace_substring_regex(subjects, _BEFORE_KEY, "")


def row_kind_column(headers: pa.ListArray) -> pa.StringArray:
    """Return ``put``, ``delete`` or ``purge`` for the headers of each message."""
    kinds = np.full(len(headers), "put", object)
    pairs, rows = headers.flatten(), np.asarray(pc.list_parent_indices(headers))
    names = pairs.field("key")
    for index in np.flatnonzero(np.asarray(pc.is_in(names, pa.array([_OPERATION, _MARKER])))).tolist():
        kind = _KINDS.get((names[index].as_py(), pairs.field("value")[index].as_py()))
        if kind:
            kinds[rows[index]] = kind
    return pa.array(kinds, pa.string())
