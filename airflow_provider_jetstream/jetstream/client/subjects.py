"""The algebra of NATS subjects: what is valid, what overlaps, what covers what.

Protocol: "Subject-Based Messaging" in the NATS documentation. Tokens are separated by dots; ``*`` stands for exactly
one token, ``>`` for one or more at the end.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def subject_problem(subject: str, *, wildcards: bool = True) -> str | None:
    """Say what is wrong with a subject.

    :param subject: the subject, or a filter with wildcards
    :param wildcards: whether ``*`` and ``>`` are allowed
    :return: one clause, or ``None`` for a good subject
    """
    if not subject:
        return "it is empty"
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


def overlaps(left: str, right: str) -> bool:
    """Tell whether some subject matches both filters.

    :param left: a subject or filter
    :param right: another
    :return: whether they share a subject
    """
    ours, theirs = left.split("."), right.split(".")
    for our, their in zip(ours, theirs, strict=False):
        if ">" in (our, their):
            return True
        if our != their and "*" not in (our, their):
            return False
    return len(ours) == len(theirs)


@lru_cache(maxsize=4096)
def covers(outer: str, inner: str) -> bool:
    """Tell whether every subject that matches ``inner`` matches ``outer``.

    :param outer: the wider filter
    :param inner: a subject or narrower filter
    :return: whether ``outer`` contains it
    """
    wide, narrow = outer.split("."), inner.split(".")
    for position, part in enumerate(wide):
        if part == ">":
            return len(narrow) > position
        if position >= len(narrow) or narrow[position] == ">":
            return False
        if part not in ("*", narrow[position]):
            return False
    return len(wide) == len(narrow)


def covered_by_any(outers: Iterable[str], inner: str) -> bool:
    """Tell whether one of several filters covers a subject.

    :param outers: the wider filters
    :param inner: a subject or narrower filter
    :return: whether any contains it
    """
    return any(covers(outer, inner) for outer in outers)


def first_overlap(filters: Iterable[str]) -> tuple[str, str] | None:
    """Find two filters that overlap.

    :param filters: subjects or filters
    :return: the first such pair
    """
    return next((pair for pair in combinations(filters, 2) if overlaps(*pair)), None)
