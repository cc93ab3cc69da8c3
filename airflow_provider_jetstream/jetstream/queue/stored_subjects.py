"""Which subjects a stream may store: those it captures, after its transform, and those of its sources or its mirror.

Filters match what is stored, which may differ from what is published.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.subjects import covers, overlaps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ALL: Final = ">"
# A function of a subject transform, ADR-36; its arguments may hold dots.
_FUNCTION: Final = re.compile(r"\{\{\s*([A-Za-z]+)[^{}]*\}\}")
# These may give any number of tokens.
_MANY_TOKENS: Final = frozenset({"split", "slicefromleft", "slicefromright"})
_POSITION: Final = re.compile(r"\$\d+")


def stored_subjects(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return filters that match every subject which a stream may store.

    :param config: its configuration on the server
    """
    arriving = [*(config.get("subjects") or ()), *_taken_over(config)]
    transform = config.get("subject_transform") or {}
    stored = [subject for one in arriving for subject in _transformed(one, transform)] if transform else arriving
    return tuple(dict.fromkeys(stored))


def outside_filters(queue: str, consumer: str, filters: Iterable[str], stored: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each filter of a consumer that matches nothing that its queue stores.

    :param stored: what the queue stores; with nothing, no filter is compared
    """
    for subject in filters:
        if stored and not any(overlaps(one, subject) for one in stored):
            yield (
                f"filter {subject} of consumer {consumer} is outside the subjects that {queue} stores"
                f" ({', '.join(stored)}), so it would never get a job: correct one of them"
            )


def _taken_over(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the subjects that come from other streams, which capture what isn't known here."""
    for source in [*(config.get("sources") or ()), *([config["mirror"]] if config.get("mirror") else ())]:
        transforms = source.get("subject_transforms") or ()
        if not transforms:
            yield source.get("filter_subject") or _ALL
        for transform in transforms:
            yield _destination(transform.get("dest") or transform.get("src") or _ALL)


def _transformed(subject: str, transform: Mapping[str, str]) -> Iterator[str]:
    source = transform.get("src") or _ALL
    if overlaps(source, subject):
        yield _destination(transform.get("dest") or subject)
    if not covers(source, subject):
        # Others keep their subject.
        yield subject


def _destination(dest: str) -> str:
    """Return a filter for what a transform gives."""
    tokens: list[str] = []
    for token in _FUNCTION.sub(lambda function: f"\0{function[1].lower()}\0", dest).split("."):
        if any(name in _MANY_TOKENS for name in token.split("\0")):
            return ".".join([*tokens, _ALL])
        tokens.append("*" if "\0" in token or _POSITION.search(token) else token)
    return ".".join(tokens)
