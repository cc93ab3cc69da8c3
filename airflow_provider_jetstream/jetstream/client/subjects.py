"""NATS subjects and filters: which are valid, which overlap, which covers which.

Protocol: "Subject-Based Messaging" in the NATS documentation. Tokens are separated by dots; ``*`` stands for exactly
one token, ``>`` for one or more at the end.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.limits import ADVISORY_SUBJECT, PUBLISHED_SUBJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# How subjects begin that are never a job's: the server's own, and those on which clients await answers, unless they
# have a prefix of their own.
PRIVATE_SUBJECTS = ("$", "_INBOX.")


@lru_cache(maxsize=4096)
def subject_problem(subject: str, *, wildcards: bool = True) -> str | None:
    """Return what is wrong with a subject or filter, as one clause; ``None`` where it is valid.

    :param wildcards: whether ``*`` and ``>`` are allowed
    """
    size = len(subject.encode(errors="replace"))
    if not 0 < size <= PUBLISHED_SUBJECT:
        return f"it has {size} bytes, more than {PUBLISHED_SUBJECT}" if size else "it is empty"
    if any(character.isspace() or not character.isprintable() for character in subject):
        return "it contains white space or control characters"
    tokens = subject.split(".")
    if "" in tokens:
        return "it has an empty token (two dots together, or a dot at an end)"
    if ">" in tokens[:-1]:
        return "> may only be the last token"
    if not wildcards and {"*", ">"} & set(tokens):
        return "a job's subject can't have wildcards"
    return None


def advisory_problem(advisory: str, declared: Sequence[str]) -> str | None:
    """Return what keeps a worker from reporting a job on the subject that the job names; ``None`` where nothing does.

    Whoever publishes a job must not choose where a worker, with its own rights, publishes.

    :param declared: the queue's advisory subjects, which only its events stream captures
    """
    if (size := len(advisory.encode(errors="replace"))) > ADVISORY_SUBJECT:
        return f"it has {size} bytes, more than {ADVISORY_SUBJECT}"
    if problem := subject_problem(advisory, wildcards=False):
        return problem
    if "\ufffd" in advisory:
        return "it isn't UTF-8, of which clients show different parts"
    if advisory.startswith(PRIVATE_SUBJECTS):
        return "subjects that begin with $ or _INBOX are never a job's"
    if not covered_by_any(declared, advisory):
        return f"it is outside of the queue's advisory_subjects ({', '.join(declared) or 'none are declared'})"
    return None


def overlaps(left: str, right: str) -> bool:
    """Return whether some subject matches both filters."""
    left_tokens, right_tokens = left.split("."), right.split(".")
    for tokens in zip(left_tokens, right_tokens, strict=False):
        if ">" in tokens:
            return True
        if tokens[0] != tokens[1] and "*" not in tokens:
            return False
    return len(left_tokens) == len(right_tokens)


@lru_cache(maxsize=4096)
def covers(outer: str, inner: str) -> bool:
    """Return whether every subject that matches ``inner`` matches ``outer``."""
    outer_tokens, inner_tokens = outer.split("."), inner.split(".")
    for index, wide in enumerate(outer_tokens):
        if wide == ">":
            return len(inner_tokens) > index
        if index >= len(inner_tokens) or inner_tokens[index] == ">":
            return False
        if wide not in ("*", inner_tokens[index]):
            return False
    return len(outer_tokens) == len(inner_tokens)


def covered_by_any(outers: Iterable[str], inner: str) -> bool:
    """Return whether one of several filters covers a subject or filter."""
    return any(covers(outer, inner) for outer in outers)


def subject_matcher(filters: Iterable[str]) -> Callable[[str], object]:
    """Return a function that tells whether one of several filters matches a subject, for comparing very many.

    :func:`covers` keeps its last answers, which are of no use for subjects that are seen once: this is 4 times faster.
    """
    kinds = {"*": r"[^.]+", ">": r".+"}
    patterns = [r"\.".join(kinds.get(token) or re.escape(token) for token in filter_.split(".")) for filter_ in filters]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)", re.DOTALL).fullmatch


def first_overlap(filters: Iterable[str]) -> tuple[str, str] | None:
    """Return the first pair of filters that overlap, if any do."""
    return next((pair for pair in combinations(filters, 2) if overlaps(*pair)), None)


def overlapping_pairs(lefts: Iterable[str], rights: Sequence[str]) -> list[tuple[str, str]]:
    """Return each filter of one list with each of another that it overlaps."""
    return [(left, right) for left in lefts for right in rights if overlaps(left, right)]
