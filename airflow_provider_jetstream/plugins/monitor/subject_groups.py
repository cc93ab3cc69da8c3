"""Groups letters by subject: there may be as many groups as letters, so that only the largest are looked at."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.plugins.monitor.letter_columns import in_steps, values_at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from airflow_provider_jetstream.plugins.monitor.letter_columns import IndexedColumns

# With so few possible groups, each has a place of its own.
_MAX_PLACES = 4_000_000


@dataclass(slots=True)
class SubjectGroup:
    """One group.

    :param position: of its first letter
    :param first: when the first of its letters died, in microseconds since 1970
    :param last: when the last one died
    :param kinds: how many letters of each kind it has
    """

    position: int
    first: int
    last: int
    count: int = 0
    kinds: Counter[int] = field(default_factory=Counter)


class SubjectGroups:
    """Groups by subject and by kinds' values.

    Each group has a code: the number of its subject, behind the codes of the kinds before. First all are counted, then
    the largest are chosen, and then only their letters are looked at.

    :param positions: of the letters, in order
    :param begins: of each kind, where the codes of its groups begin
    :param codes: how many there may be
    """

    def __init__(
        self, columns: IndexedColumns, positions: Sequence[int], begins: Mapping[int, int], codes: int
    ) -> None:
        self._columns = columns
        self._positions = positions
        self._begins = begins
        self._places = codes
        self._counts: array[int] | Counter[int] = array("I")

    async def largest(self, most: int) -> tuple[list[SubjectGroup], int]:
        """Return the largest groups, the largest first, and how many others there are."""
        places, sizes = self._places, Counter[int]()
        self._counts = counts = array("I", bytes(4 * places)) if places <= _MAX_PLACES else Counter[int]()
        async for part in in_steps(self._positions):
            for code in self._codes(part):
                counts[code] += 1
        async for _, some in self._counted():
            sizes.update(some)
        del sizes[0]
        least, room = 0, most
        for size in sorted(sizes, reverse=True):
            least = size
            if sizes[size] >= room:
                break
            room -= sizes[size]
        else:
            # There is room for all.
            least = 0
        chosen = set[int]()
        async for codes, some in self._counted():
            chosen.update(compress(codes, [count > least for count in some]))
        chosen |= await self._first_codes(least, min(room, sizes[least]))
        groups = await self._read_groups(chosen)
        return sorted(groups, key=lambda group: (-group.count, group.position)), sizes.total() - len(groups)

    def _codes(self, positions: Sequence[int]) -> list[int]:
        subjects = values_at(self._columns.subject, positions)
        if len(self._begins) == 1:
            # A kind alone has the first codes.
            return subjects
        begins, kinds = self._begins, values_at(self._columns.kind, positions)
        return [begins[kind] + subject for kind, subject in zip(kinds, subjects, strict=True)]

    async def _counted(self) -> AsyncIterator[tuple[Sequence[int], Sequence[int]]]:
        """Return codes and their counts, in parts."""
        if isinstance(self._counts, Counter):
            async for part in in_steps(list(self._counts)):
                yield part, [self._counts[code] for code in part]
        else:
            async for part in in_steps(range(len(self._counts))):
                yield part, self._counts[part[0] : part[-1] + 1]

    async def _first_codes(self, count: int, most: int) -> set[int]:
        """Return the groups of so many letters whose first letters come first."""
        found = set[int]()
        async for part in in_steps(self._positions):
            if len(found) == most:
                break
            for code in self._codes(part):
                if self._counts[code] == count and len(found) < most:
                    found.add(code)
        return found

    async def _read_groups(self, chosen: set[int]) -> list[SubjectGroup]:
        """Return the groups that were chosen, from their letters."""
        groups = dict[int, SubjectGroup]()
        async for part in in_steps(self._positions):
            codes = self._codes(part)
            hits = [at for at, code in enumerate(codes) if code in chosen]
            if not hits:
                continue
            times, kinds = values_at(self._columns.died_at, part), values_at(self._columns.kind, part)
            for at in hits:
                died_at, code = times[at], codes[at]
                group = groups.get(code)
                if group is None:
                    group = groups[code] = SubjectGroup(part[at], died_at, died_at)
                group.count += 1
                group.kinds[kinds[at]] += 1
                if died_at < group.first:
                    group.first = died_at
                elif died_at > group.last:
                    group.last = died_at
        return list(groups.values())
