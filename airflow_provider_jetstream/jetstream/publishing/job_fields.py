"""The fields of a job: what they can't be, found where the job is made rather than where it is published."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

# Numbers are common as ids and keys, and mean their text.
_TYPES: dict[str, tuple[type, ...]] = {"id": (str, int, UUID), "partition_key": (str, int)}


def field_problem(headers: object, subject: object, job_id: object, advisory: object, key: object) -> str | None:
    """Return what is wrong with the fields of a job, and what to do; ``None`` where nothing is.

    What a template or another program gives later, an object with a method ``resolve``, is left to it.
    """
    for value in (subject, job_id, advisory, key):
        if value is not None and (type(value) is not str or not value.strip()):
            texts = {"subject": subject, "id": job_id, "advisory": advisory, "partition_key": key}
            if problem := _text_problem(texts):
                return problem
            break
    if isinstance(job_id, str) and (problem := blank_problem(job_id)):
        return problem
    if not isinstance(headers, Mapping) and not hasattr(headers, "resolve"):
        return f"expected headers of a job as a dict of names and texts, found {headers!r}: make a dict of it"
    return None


def blank_problem(job_id: str) -> str | None:
    """Return what is wrong with an id that begins or ends with white space, which no header holds."""
    if job_id == job_id.strip():
        return None
    return f"expected the id of a job without white space at its ends, found {job_id!r}: strip it"


def _text_problem(texts: Mapping[str, object]) -> str | None:
    for name, value in texts.items():
        if value is None or hasattr(value, "resolve"):
            continue
        if isinstance(value, bool) or not isinstance(value, _TYPES.get(name, (str,))):
            return f"expected text as {name} of a job, found {value!r}: convert it"
        if not str(value).strip():
            return f"expected text as {name} of a job, found {value!r}: leave {name} out where there is none"
    return None
