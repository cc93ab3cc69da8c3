"""Groups of a queue's letters: which are shown, and which selection has exactly their letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.models.letters import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, LetterTable

_SHOWN_GROUPS = 500
# The fingerprint is made of these, so it selects a letter that lacks one of them too.
_IN_FINGERPRINT = frozenset({"error_class", "consumer"})


async def group_letters(
    table: LetterTable, query: LetterQuery, group_by: Sequence[GroupField], *, hidden: bool, hidden_of_unknown: bool
) -> tuple[list[Group], int]:
    """Group the letters that a query includes; return the largest groups, and the number of the others.

    :param hidden: whether texts that may quote bodies are left out
    :param hidden_of_unknown: the same for jobs of tasks that aren't known
    """
    texts = None if hidden else not hidden_of_unknown
    groups, count, total = await table.largest_groups(query, group_by, _SHOWN_GROUPS, texts=texts)
    base = query.selection.model_dump(mode="json", exclude_defaults=True)
    return [
        Group(
            key=dict(zip(group_by, key, strict=True)),
            count=group.count,
            first_seen=group.first,
            last_seen=group.last,
            example=group.example,
            share=round(group.count / total, 4),
            error_message=text,
            select=_group_selection(base, group_by, key),
        )
        for key, group, text in groups
    ], count - len(groups)


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
