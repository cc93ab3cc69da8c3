"""Filters for what a consumer keeps when others take a part of its subjects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def remaining_filters(filters: Sequence[str], taken: Sequence[str], subjects: Iterable[str]) -> tuple[str, ...]:
    """Return disjoint filters, none wider than a consumer's, that overlap none of those that others take.

    They are the filters of which nobody takes a part, and filters for the stored jobs that nobody takes, with wildcards
    for as many of the last tokens as possible: ``tasks.*`` for a job on ``tasks.email`` where others take
    ``tasks.0.>``.

    :param filters: the consumer's filters now
    :param taken: the filters of the others
    :param subjects: the subjects of its stored jobs
    """
    kept = [subject for subject in filters if not _overlaps_any(subject, taken)]
    for subject in sorted(subjects):
        if covered_by_any(filters, subject) and not covered_by_any((*taken, *kept), subject):
            wider = (shape for shape in _generalised(subject) if covered_by_any(filters, shape))
            kept.append(next(shape for shape in wider if not _overlaps_any(shape, (*taken, *kept))))
    return tuple(kept)


def _overlaps_any(subject: str, others: Iterable[str]) -> bool:
    return any(overlaps(subject, other) for other in others)


def _generalised(subject: str) -> Iterator[str]:
    """Yield a subject with ever fewer of its last tokens replaced by wildcards, and at last the subject itself."""
    tokens = subject.split(".")
    for kept in range(len(tokens)):
        yield ".".join([*tokens[:kept], *("*" for _ in tokens[kept:])])
    yield subject
