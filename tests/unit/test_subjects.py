from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.subjects import (
    covered_by_any,
    covers,
    first_overlap,
    overlaps,
    subject_problem,
)

_ALPHABET = ("a", "b")
_LONGEST = 4
_SUBJECTS = [".".join(tokens) for length in range(1, _LONGEST + 1) for tokens in product(_ALPHABET, repeat=length)]


def _matches(pattern: list[str], subject: list[str]) -> bool:
    """Match by recursion, as the protocol describes it and independent of the package."""
    if not pattern:
        return not subject
    if not subject:
        return False
    head, *rest = pattern
    if head == ">":
        return True
    return head in ("*", subject[0]) and _matches(rest, subject[1:])


def _matched_by(pattern: str) -> frozenset[str]:
    return frozenset(subject for subject in _SUBJECTS if _matches(pattern.split("."), subject.split(".")))


# One token shorter than the longest subject, so that ">" matches more tokens than a filter has.
_HEADS = ("a", "b", "*")
_FILTERS = [
    ".".join((*tokens, last))
    for length in range(_LONGEST - 1)
    for tokens in product(_HEADS, repeat=length)
    for last in (*_HEADS, ">")
]
_filters = st.sampled_from(_FILTERS)


def test_overlaps_and_covers_agree_with_brute_force_on_every_pair_of_filters() -> None:
    matched = {pattern: _matched_by(pattern) for pattern in _FILTERS}
    wrong = [
        (left, right)
        for left, right in product(_FILTERS, repeat=2)
        if overlaps(left, right) != bool(matched[left] & matched[right])
        or covers(left, right) != (matched[right] <= matched[left])
    ]
    assert len(_FILTERS) == 52
    assert wrong == []


@given(st.lists(_filters, max_size=4))
def test_the_first_overlap_is_a_pair_that_overlaps_or_none_where_all_are_disjoint(filters: list[str]) -> None:
    pair = first_overlap(filters)
    disjoint = all(
        not _matched_by(filters[one]) & _matched_by(filters[other])
        for one in range(len(filters))
        for other in range(one)
    )
    assert (pair is None) == disjoint
    assert pair is None or _matched_by(pair[0]) & _matched_by(pair[1])


def test_several_filters_together_do_not_cover_what_none_of_them_covers() -> None:
    assert covered_by_any(["x", "jobs.>"], "jobs.high.*")
    assert not covered_by_any(["jobs.high", "jobs.low"], "jobs.*")
    assert not covered_by_any([], "jobs")


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("", "it is empty"),
        ("a b", "white space"),
        ("a\tb", "white space"),
        ("a\x00b", "control characters"),
        ("a\r\nPUB x 0", "white space or control characters"),
        ("a..b", "empty token"),
        (".a", "empty token"),
        ("a.", "empty token"),
        ("a.>.b", "> may only be the last token"),
        (">.a", "> may only be the last token"),
    ],
)
def test_an_invalid_subject_has_a_problem(subject: str, problem: str) -> None:
    assert problem in (subject_problem(subject) or "")


@pytest.mark.parametrize("subject", ["jobs.*", "jobs.>", "*", ">"])
def test_a_jobs_own_subject_cannot_have_wildcards(subject: str) -> None:
    assert subject_problem(subject, wildcards=False) == "a job's subject can't have wildcards"


def test_a_star_within_a_token_is_no_wildcard() -> None:
    assert subject_problem("jobs.a*b", wildcards=False) is None
    assert not overlaps("jobs.a*b", "jobs.axb")
