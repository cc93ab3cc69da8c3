"""Groups of a queue's letters, from the index: which are shown, and which selection has exactly their letters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupKey, LetterGroup, LetterGroups
from airflow_provider_jetstream.plugins.monitor.letter_columns import in_steps, moment
from airflow_provider_jetstream.plugins.monitor.models.letters import Group
from airflow_provider_jetstream.plugins.monitor.subject_groups import SubjectGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.plugins.monitor.letter_index import LetterIndex
    from airflow_provider_jetstream.plugins.monitor.letter_query import LetterKind, LetterQuery

_SHOWN_GROUPS = 500
_KINDS_AT_ONCE = 1_000
# The fingerprint is made of these, so it selects a letter that lacks one of them too.
_IN_FINGERPRINT = frozenset({"error_class", "consumer"})


@dataclass(slots=True)
class _Found:
    """The largest groups, and what the others sum up to.

    :param groups: by their values, the largest first
    :param left_out: how many others there are
    :param total: how many letters all of them have
    :param texts: the error's text of the largest part of each
    """

    groups: list[tuple[GroupKey, LetterGroup]]
    left_out: int
    total: int
    texts: dict[GroupKey, str] = field(default_factory=dict)


async def group_letters(
    index: LetterIndex, query: LetterQuery, group_by: Sequence[GroupField], *, hidden: bool, hidden_of_unknown: bool
) -> tuple[list[Group], int]:
    """Group the letters that a query includes; return the largest groups, and the number of the others.

    :param hidden: whether texts that may quote bodies are left out
    :param hidden_of_unknown: the same for jobs of tasks that aren't known
    """

    def text_of(number: int) -> str | None:
        is_hidden = hidden or (hidden_of_unknown and index.kind(number).of_unknown_task)
        return None if is_hidden else index.text_of(number)

    found = await (_of_letters if "subject" in group_by else _of_kinds)(index, query, group_by, text_of)
    base = query.selection.model_dump(mode="json", exclude_defaults=True)
    return [
        Group(
            key=dict(zip(group_by, key, strict=True)),
            count=group.count,
            first_seen=group.first,
            last_seen=group.last,
            example=group.example,
            share=round(group.count / found.total, 4),
            error_message=found.texts.get(key),
            select=_group_selection(base, group_by, key),
        )
        for key, group in found.groups
    ], found.left_out


async def _of_kinds(
    index: LetterIndex, query: LetterQuery, group_by: Sequence[GroupField], text_of: Callable[[int], str | None]
) -> _Found:
    """Group by kinds: no look at each letter, or one at its kind and time of death."""
    merged, texts, largest = LetterGroups(), dict[GroupKey, str](), Counter[GroupKey]()
    total, columns = 0, index.columns
    numbers = await index.kinds(query, columns)
    kinds = await index.kind_counts(query, columns)
    async for part in in_steps(numbers, _KINDS_AT_ONCE):
        for number in part:
            if number >= len(kinds) or not kinds.count[number]:
                continue
            key, group = _key(index.kind(number), "", group_by), kinds.group(number)
            total += group.count
            if group.count > largest[key] and (text := text_of(number)):
                largest[key], texts[key] = group.count, text
            merged.merge(key, group)
    groups = merged.largest()
    return _Found(groups[:_SHOWN_GROUPS], len(groups[_SHOWN_GROUPS:]), total, texts)


async def _of_letters(
    index: LetterIndex, query: LetterQuery, group_by: Sequence[GroupField], text_of: Callable[[int], str | None]
) -> _Found:
    """Group by subjects, and perhaps by kinds."""
    columns, subjects = index.columns, len(index.subjects)
    positions = await index.positions(query, columns)
    # Of each kind, where the numbers of its groups begin: one for each subject.
    keys, begins = dict[GroupKey, int](), dict[int, int]()
    async for part in in_steps(await index.kinds(query, columns), _KINDS_AT_ONCE):
        for number in part:
            begins[number] = keys.setdefault(_key(index.kind(number), "", group_by), len(keys)) * subjects
    grouped = SubjectGroups(columns, positions, begins, len(keys) * subjects)
    key_of_all = (columns, "groups", query, tuple(group_by))
    largest, left_out = await index.shared(key_of_all, lambda: grouped.largest(_SHOWN_GROUPS))
    found = _Found([], left_out, len(positions))
    for part_of in largest:
        subject = index.subjects[columns.subject[part_of.position]]
        key = _key(index.kind(columns.kind[part_of.position]), subject, group_by)
        first, last = moment(part_of.first), moment(part_of.last)
        found.groups.append((key, LetterGroup(part_of.count, first, last, columns.sequence[part_of.position])))
        if text := next(filter(None, (text_of(kind) for kind, _ in part_of.kinds.most_common())), None):
            found.texts[key] = text
    return found


def _key(kind: LetterKind, subject: str, group_by: Sequence[GroupField]) -> GroupKey:
    return tuple(subject if name == "subject" else kind.value(name) for name in group_by)


def _group_selection(
    base: dict[str, object], group_by: Sequence[GroupField], key: GroupKey
) -> dict[str, object] | None:
    """Return the selection of exactly one group's letters; ``None`` where a field can't be selected by its value."""
    select = dict(base)
    for name, value in zip(group_by, key, strict=True):
        if name == "reason":
            select["reasons"] = [value]
        elif name == "error_place" or (value is None and not (name in _IN_FINGERPRINT and "fingerprint" in group_by)):
            return None
        elif value is not None and readable_text(value) != value:
            # JSON can't hold it.
            return None
        elif value is not None:
            select[name] = value
    return select
