"""The dead letters of a queue in one table, without their bodies; selections, groups, counts and pages are queries.

The table is an SQLite database in memory, which a thread of its own reads and writes: no question holds the event loop,
however many letters there are, and nothing is written to a temporary file. A query sees all letters as they were
between two changes.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args
from weakref import finalize

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.group import (
    GroupField,
    GroupKey,
    LetterGroup,
    LetterGroups,
    group_of,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, task_key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

Sort: TypeAlias = Literal["sequence", "-sequence", "died_at", "-died_at"]
_Result = TypeVar("_Result")

_EXACT: Final[tuple[GroupField, ...]] = (
    *("error_class", "fingerprint", "traceback_digest", "consumer"),
    *("dag_id", "run_id", "task_id"),
)
_FIELDS: Final[tuple[GroupField, ...]] = tuple(field for field in get_args(GroupField) if field != "subject")
# What alike letters share.
_KIND: Final = ("parked", "stored_for", "map_index", "of_unknown_task", "subject", "is_begun", *_FIELDS)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# SQLite's whole numbers end here; no stream comes as far.
_HIGHEST = 2**63 - 1
_MOST_TEXTS = 5_000
_LONGEST_TEXT = 500
_MOST_IDS = 2**32
_MOST_KNOWN = 2_000
_MOST_ANSWERS = 32
_MOST_SUBJECTS = 500
_SEQUENCES_AT_ONCE = 50_000
_FEW_STALE = 8
# Kinds without letters are forgotten where there are so many of them, and as many as others.
_FEW_UNUSED = 1_000

# Most questions are answered from the counts of the kinds. A kind has a subject: where there are many, its letters' own
# last tokens are in ``rest``, and ``is_begun`` is true. Times are relative to the table's beginning, so that they take
# six bytes; with the index of the entries, a letter on a subject of its own takes some fifty.
_SCHEMA: Final = f"""
PRAGMA journal_mode = OFF;
PRAGMA temp_store = MEMORY;
CREATE TABLE kinds (id INTEGER PRIMARY KEY, digest, {", ".join(_KIND)}, text, count, first, last, example);
CREATE INDEX kinds_by_digest ON kinds (digest);
CREATE TABLE letters (sequence INTEGER PRIMARY KEY, kind_id, rest, died_at, entry, job);
CREATE TABLE matching (id INTEGER PRIMARY KEY, count, first, last, example);
"""
_STORED: Final = "SELECT l.sequence FROM letters l JOIN kinds k ON k.id = l.kind_id AND k.stored_for NOTNULL"


@dataclass(frozen=True, slots=True)
class LetterQuery:
    """Which letters of a table are meant.

    :param selection: its ages count only as :meth:`of` translates them
    :param dags: without the letters of all other DAGs; ``None`` for every letter
    :param job_id: of this job
    :param died_from: died at that time or later
    :param died_to: died before that time
    """

    selection: Selection
    dags: frozenset[str] | None = None
    job_id: str | None = None
    died_from: datetime | None = None
    died_to: datetime | None = None

    @classmethod
    def of(cls, selection: Selection, now: datetime) -> LetterQuery:
        """Return the query of what a selection matches at a time."""
        return cls(
            selection,
            died_from=_just_after(now, selection.younger_than),
            died_to=_just_after(now, selection.older_than),
        )

    def of_all_dags(self) -> LetterQuery:
        """Return the same query without a restriction to DAGs."""
        return replace(self, dags=None)

    def includes(self, letter: DeadLetter) -> bool:
        """Return whether a letter that was proved again is included."""
        dag_id = letter.origin.dag_id if letter.origin else None
        return (
            self.selection.matches(letter, letter.death.died_at)
            and (self.dags is None or dag_id is None or dag_id in self.dags)
            and self.job_id in (None, readable_text(letter.job_id))
            and (self.died_from is None or letter.death.died_at >= self.died_from)
            and (self.died_to is None or letter.death.died_at < self.died_to)
        )


class _Row(NamedTuple):
    sequence: int
    kind: int
    rest: str | None
    died_at: int
    entry: int
    job: int


class LetterTable:
    """Dead letters by the sequences of their jobs.

    :param most_letters: beyond these, and beyond ``most_kinds``, letters are only counted; no limit where absent
    :param most_kinds: how many letters may differ in more than job, times and a subject of many
    :ivar complete: whether all letters that were put are there
    :ivar counted: how many letters there are, parked or not
    :ivar last: the highest sequence; 0 where there is none
    """

    def __init__(self, most_letters: int = _HIGHEST, most_kinds: int = _HIGHEST) -> None:
        self.complete = True
        self.counted = {False: 0, True: 0}
        self.last = 0
        self._began = datetime.now(UTC)
        self._count = self._kinds = 0
        self._most_letters, self._most_kinds = most_letters, most_kinds
        # Of kinds that were looked up: neighbours are alike most often.
        self._known: dict[tuple[object, ...], int] = {}
        self._subjects: set[str] = set()
        # Kinds that have lost their first, last or lowest letter, and the number of kinds without letters.
        self._stale: set[int] = set()
        self._unused = 0
        self._answers: dict[object, Any] = {}
        # The conditions of the letters that ``matching`` counts by kind.
        self._matching: tuple[list[str], list[object]] | None = None
        self._thread = ThreadPoolExecutor(1, "dead-letters")
        # Only the one thread uses it, one question after the other.
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._database.executescript(_SCHEMA)
        finalize(self, self._database.close)
        self._database.create_function("covers", 2, covers, deterministic=True)

    def __len__(self) -> int:
        return self._count

    async def change(self, letters: Sequence[DeadLetter], snapshot: QueueSnapshot, removed: Iterable[int] = ()) -> None:
        """Put letters, each in place of what is known of its job, and forget others.

        :param snapshot: says which consumer has a job that is stored
        """
        if letters or removed:
            await self._run(self._change, letters, snapshot, {*removed})

    async def replace(self, after: int, until: int, letters: Sequence[DeadLetter], snapshot: QueueSnapshot) -> None:
        """Replace the letters between two sequences (the second included) by the given ones."""
        await self._run(self._replace, after, until, letters, snapshot)

    async def known(self, sequences: Iterable[int]) -> set[int]:
        """Return which of some sequences are letters."""
        return {sequence for (sequence,) in await self._among("SELECT l.sequence FROM letters l", sequences)}

    async def died_at(self, sequences: Iterable[int]) -> dict[int, datetime]:
        """Return when letters died, of those sequences that are letters."""
        rows = await self._among("SELECT l.sequence, l.died_at FROM letters l", sequences)
        return {sequence: self._moment(at) for sequence, at in rows}

    async def stored_among(self, sequences: Iterable[int]) -> set[int]:
        """Return which of some sequences are letters whose jobs were stored when they were put."""
        return {sequence for (sequence,) in await self._among(_STORED, sequences)}

    async def stored_below(self, sequence: int) -> set[int]:
        """Return the letters below a sequence whose jobs were stored when they were put."""
        sql = f"{_STORED} WHERE l.sequence < ?"
        return {found for (found,) in await self._read(sql, min(sequence, _HIGHEST))}

    async def stored_for(self) -> dict[str, int]:
        """Count by consumer the letters whose jobs are stored for it."""
        sql = "SELECT stored_for, sum(count) FROM kinds WHERE stored_for NOTNULL AND count GROUP BY 1"
        return {_text(name) or "": count for name, count in await self._read(sql)}

    async def stored_above(self, consumer: str, sequence: int) -> int:
        """Count the letters of higher sequences whose jobs are stored for a consumer."""
        sql = f"SELECT count(*) FROM ({_STORED} WHERE l.sequence > ? AND k.stored_for = ?)"
        count: int = (await self._read(sql, sequence, _blob(consumer)))[0][0]
        return count

    async def entries(self, after: int, until: int) -> dict[int, int]:
        """Return the letters between two sequences, the second one included, each with its last entry."""
        sql = "SELECT sequence, entry FROM letters WHERE sequence > ? AND sequence <= ? ORDER BY 1"
        return dict(await self._read(sql, after, min(until, _HIGHEST)))

    async def count(self, query: LetterQuery) -> int:
        """Count the letters of a query."""
        return sum(group.count for group in (await self.groups(query, ())).values())

    async def groups(self, query: LetterQuery, fields: Sequence[GroupField]) -> LetterGroups:
        """Return the groups of a query's letters that share the values of some fields."""
        found, _, _ = await self.largest_groups(query, fields, most=-1)
        groups = LetterGroups()
        groups.update((key, group) for key, group, _ in found)
        return groups

    async def largest_groups(
        self, query: LetterQuery, fields: Sequence[GroupField], most: int, *, texts: bool | None = None
    ) -> tuple[list[tuple[GroupKey, LetterGroup, str | None]], int, int]:
        """Return the largest groups, the largest first; how many there are, and how many letters they all have.

        :param most: how many groups to return; -1 for all
        :param texts: whether with the error's text of each group's largest part; with ``False`` only where it is known
            which task published the jobs, with ``None`` without
        """
        by = "".join(f", {_columns(field)}" for field in fields)
        with_text = "k.text NOTNULL" if texts else "k.text NOTNULL AND NOT k.of_unknown_task"

        def read() -> tuple[list[tuple[GroupKey, LetterGroup, str | None]], int, int]:
            if self._has_rests and "subject" in fields:
                return self._largest_by_own_subject(query, fields, most, "NULL" if texts is None else with_text)
            self._freshen()
            found, values = self._found(query)
            sql = f"""
                WITH found AS ({found}), grouped AS (
                  SELECT sum(f.count) AS size, min(f.first), max(f.last), min(f.example) AS example,
                    max(CASE WHEN {with_text} THEN f.count * {_MOST_IDS} + k.id END) {by}
                  FROM found f JOIN kinds k ON k.id = f.id {by.replace(",", "GROUP BY", 1)})
                SELECT count(*) OVER (), sum(size) OVER (), * FROM grouped WHERE size NOTNULL
                ORDER BY size DESC, example LIMIT {most}"""
            count = letters = 0
            groups = list[tuple[GroupKey, LetterGroup, str | None]]()
            for count, letters, size, first, last, example, part, *key in self._database.execute(sql, values):  # noqa: B007
                group = LetterGroup(size, self._moment(first), self._moment(last), example)
                groups.append((_key(fields, key), group, self._text_of(part) if texts is not None else None))
            return groups, count, letters

        if most < 0 and (query.died_from or query.died_to):
            # Nobody asks again for an age that refers to this moment.
            return await self._run(read)
        return await self._shared((query, tuple(fields), most, texts), read)

    async def page(
        self, query: LetterQuery, sort: Sort = "sequence", *, after: int = 0, offset: int = 0, limit: int = -1
    ) -> array[int]:
        """Return the sequences of letters in an order.

        :param after: only higher sequences
        """
        way = "DESC" if sort.startswith("-") else "ASC"

        def read() -> array[int]:
            where, values = self._where(query)
            sql = f"SELECT sequence, died_at FROM letters l WHERE {where} AND sequence > ? ORDER BY sequence {way}"
            if sort.endswith("died_at"):
                # Letters die almost in the order of their sequences: read in it, few displace others from the page.
                sql = f"SELECT * FROM ({sql} LIMIT -1) ORDER BY died_at {way}, sequence {way}"
            sql += " LIMIT ? OFFSET ?"
            rows = self._database.execute(sql, (*values, after, limit, offset))
            return array("Q", (sequence for sequence, _ in rows))

        return await self._run(read)

    async def count_until(self, query: LetterQuery, sequence: int) -> int:
        """Count the letters of a query that have no higher sequence than this one."""

        def read() -> int:
            where, values = self._where(query)
            sql = f"SELECT count(*) FROM letters l WHERE {where} AND sequence <= ?"
            return int(self._database.execute(sql, (*values, sequence)).fetchone()[0])

        return await self._run(read)

    async def ranges(self, query: LetterQuery, most: int) -> tuple[list[tuple[int, int]], int]:
        """Return the sequences of a query's letters as ranges of first and last.

        :param most: how many ranges to return
        :return: the first ranges, and how many there are beyond them
        """

        def read() -> tuple[list[tuple[int, int]], int]:
            where, values = self._where(query)
            sql = f"SELECT sequence FROM letters l WHERE {where} ORDER BY sequence"
            ranges, begin, last = list[tuple[int, int]](), 0, -1
            count = 0
            for (sequence,) in self._database.execute(sql, values):
                if sequence != last + 1:
                    if last >= 0 and len(ranges) < most:
                        ranges.append((begin, last))
                    begin, count = sequence, count + 1
                last = sequence
            if count > len(ranges) and len(ranges) < most:
                ranges.append((begin, last))
            return ranges, count - len(ranges)

        return await self._shared(("ranges", query, most), read)

    async def rows(
        self, query: LetterQuery, fields: Sequence[GroupField], after: int, limit: int
    ) -> list[tuple[GroupKey, int, int]]:
        """Return the first letters of a query behind a sequence: the values of fields, the sequence and when it died.

        :return: the times in microseconds since 1970
        """
        keys = ", ".join(map(_columns, fields)) or "NULL"

        def read() -> list[tuple[GroupKey, int, int]]:
            where, values = self._where(query)
            sql = f"""
                SELECT f.sequence, f.died_at, {keys}
                FROM (SELECT * FROM letters l WHERE {where} AND sequence > ? ORDER BY sequence LIMIT ?) f
                JOIN kinds k ON k.id = f.kind_id ORDER BY f.sequence"""
            made: dict[tuple[bytes | str | None, ...], GroupKey] = {}
            found, began = [], (self._began - _EPOCH) // _MICROSECOND
            for sequence, died_at, *found_key in self._database.execute(sql, (*values, after, limit)):
                raw = tuple(found_key)
                key = made.get(raw) or made.setdefault(raw, _key(fields, raw))
                found.append((key, sequence, began + died_at))
            return found

        return await self._run(read)

    async def dags(self) -> frozenset[str]:
        """Return the DAGs that published jobs of these letters."""
        rows = await self._read("SELECT DISTINCT dag_id FROM kinds WHERE dag_id NOTNULL")
        return frozenset(_text(dag_id) or "" for (dag_id,) in rows)

    async def newest(self, fields: Sequence[GroupField], most: int) -> list[tuple[GroupKey, datetime]]:
        """Return the values of fields that the letters in circulation have that died last, and when; the last first."""
        columns = ", ".join(map(_columns, fields))

        def read() -> list[tuple[GroupKey, datetime]]:
            self._freshen()
            sql = f"""
                SELECT max(last), {columns} FROM kinds k WHERE count AND NOT parked
                GROUP BY {columns} ORDER BY 1 DESC LIMIT {most}"""
            return [(_key(fields, key), self._moment(last)) for last, *key in self._database.execute(sql)]

        return await self._run(read)

    async def count_by_task(self, dag_id: str, run_id: str) -> dict[tuple[str | None, int | None], tuple[int, int]]:
        """Count the letters whose jobs a DAG run published.

        :return: letters in circulation and parked ones, by task and map index
        """
        sql = """
            SELECT task_id, map_index, sum(count * NOT parked), sum(count * parked) FROM kinds
            WHERE dag_id = ? AND run_id = ? AND count GROUP BY task_id, map_index"""
        rows = await self._read(sql, _blob(dag_id), _blob(run_id))
        return {(_text(task), map_index): (circulating, parked) for task, map_index, circulating, parked in rows}

    async def deaths(self, since: datetime, seconds: float, steps: int) -> dict[int, int]:
        """Count the deaths since a time, in so many steps of so many seconds."""
        begin, length = self._time(since), max(1, round(seconds * 1e6))
        sql = "SELECT (died_at - ?) / ?, count(*) FROM letters WHERE died_at >= ? AND died_at < ? GROUP BY 1"
        return dict(await self._read(sql, begin, length, begin, begin + steps * length))

    async def _run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _read(self, sql: str, *values: object) -> list[Any]:
        return await self._run(lambda: self._database.execute(sql, values).fetchall())

    async def _among(self, sql: str, sequences: Iterable[int]) -> list[Any]:
        """Read what a statement says of some letters."""
        rows, sql = list[Any](), f"{sql} WHERE l.sequence IN (SELECT value FROM json_each(?))"
        wanted = (sequence for sequence in sequences if sequence <= _HIGHEST)
        while some := list(islice(wanted, _SEQUENCES_AT_ONCE)):
            rows += await self._read(sql, json.dumps(some))
        return rows

    async def _shared(self, key: object, find: Callable[[], _Result]) -> _Result:
        """Return what was found since the letters last changed."""

        def answer() -> _Result:
            result: _Result = self._answers.pop(key) if key in self._answers else find()
            self._answers[key] = result
            if len(self._answers) > _MOST_ANSWERS:
                # That which was asked for longest ago.
                del self._answers[next(iter(self._answers))]
            return result

        return await self._run(answer)

    def _text_of(self, part: int | None) -> str | None:
        """Return the text of the largest part of a group, by its count and the number of its kind."""
        sql = "SELECT text FROM kinds WHERE id = ?"
        text: str | None = None if part is None else self._database.execute(sql, (part % _MOST_IDS,)).fetchone()[0]
        return text

    def _time(self, at: datetime) -> int:
        return (at - self._began) // _MICROSECOND

    def _moment(self, time: int) -> datetime:
        return self._began + time * _MICROSECOND

    def _replace(self, after: int, until: int, letters: Sequence[DeadLetter], snapshot: QueueSnapshot) -> None:
        sql = "SELECT sequence FROM letters WHERE sequence > ? AND sequence <= ?"
        before = {sequence for (sequence,) in self._database.execute(sql, (after, min(until, _HIGHEST)))}
        self._change(letters, snapshot, before - {letter.sequence for letter in letters})

    def _change(self, letters: Sequence[DeadLetter], snapshot: QueueSnapshot, removed: set[int]) -> None:
        database = self._database
        put = {letter.sequence: letter for letter in letters if letter.sequence <= _HIGHEST}
        sql = """
            SELECT l.*, k.parked FROM letters l JOIN kinds k ON k.id = l.kind_id
            WHERE l.sequence IN (SELECT value FROM json_each(?))"""
        wanted = json.dumps([sequence for sequence in {*put, *removed} if sequence <= _HIGHEST])
        before = {row[0]: row for row in database.execute(sql, (wanted,)).fetchall()}
        rows, gone = list[_Row](), {sequence: row for sequence, row in before.items() if sequence not in put}
        room = self._most_letters - self._count + len(gone)
        for sequence, letter in put.items():
            old = before.get(sequence)
            self.counted[letter.parked is not None] += 1
            if old:
                self.counted[bool(old[-1])] -= 1
            row = self._row(letter, snapshot) if old or room > 0 else None
            self.complete &= row is not None
            if old and old[:-1] != row:
                gone[sequence] = old
            if row and (old is None or sequence in gone):
                room -= old is None
                rows.append(row)
        for sequence in gone.keys() - put.keys():
            self.counted[bool(gone[sequence][-1])] -= 1
        if not rows and not gone:
            return
        self._answers.clear()
        self._matching = None
        with closing(database.cursor()) as cursor:
            cursor.execute("BEGIN")
            cursor.executemany("DELETE FROM letters WHERE sequence = ?", [(sequence,) for sequence in gone])
            cursor.executemany("INSERT INTO letters VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._count += len(rows) - len(gone)
            self._add(cursor, rows)
            self._take_off(cursor, [_Row(*row[:-1]) for row in gone.values()])
            cursor.execute("COMMIT")
        self.last = database.execute("SELECT coalesce(max(sequence), 0) FROM letters").fetchone()[0]

    def _row(self, letter: DeadLetter, snapshot: QueueSnapshot) -> _Row | None:
        """Return a letter's row; ``None`` where its kind is one too many."""
        consumer = snapshot.consumer_for(letter.subject) if letter.source == BodySource.QUEUE else None
        subject, rest = self._parts(readable_text(letter.subject))
        kind = (
            letter.parked is not None,
            _blob(consumer.name if consumer else None),
            letter.origin.map_index if letter.origin else None,
            letter.origin is None and task_key_of(letter.headers) is not None,
            subject,
            rest is not None,
            *map(_blob, group_of(letter, _FIELDS)),
        )
        text = letter.death.error_message or letter.death.explanation
        if (number := self._known.get(kind) or self._kind_of(kind, text)) is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[kind] = number
        entry, died_at = max(letter.entries, default=0), self._time(letter.death.died_at)
        return _Row(letter.sequence, number, rest, died_at, entry, _digest(readable_text(letter.job_id)))

    def _parts(self, subject: str) -> tuple[str, str | None]:
        """Return a subject, or where there are many what is before its last token, and this."""
        if subject not in self._subjects and len(self._subjects) >= _MOST_SUBJECTS:
            beginning, point, rest = subject.rpartition(".")
            return beginning + point, rest
        self._subjects.add(subject)
        return subject, None

    def _kind_of(self, kind: tuple[object, ...], text: str | None) -> int | None:
        digest = hash(kind)
        sql = f"SELECT id FROM kinds WHERE digest = ? AND ({', '.join(_KIND)}) IS ({', '.join('?' * len(_KIND))})"
        if known := self._database.execute(sql, (digest, *kind)).fetchone():
            return int(known[0])
        if self._kinds >= self._most_kinds:
            return None
        shown = readable_text(text)[:_LONGEST_TEXT] if text and self._kinds < _MOST_TEXTS else None
        self._kinds += 1
        sql = f"INSERT INTO kinds VALUES (NULL, ?, {', '.join('?' * len(_KIND))}, ?, 0, NULL, NULL, NULL)"
        return self._database.execute(sql, (digest, *kind, shown)).lastrowid

    def _add(self, cursor: sqlite3.Cursor, rows: Sequence[_Row]) -> None:
        """Count letters that were put."""
        added: dict[int, list[_Row]] = {}
        for row in rows:
            added.setdefault(row.kind, []).append(row)
        spans = []
        for kind, letters in added.items():
            times, lowest = [letter.died_at for letter in letters], min(letter.sequence for letter in letters)
            spans.append((len(letters), *[min(times)] * 2, *[max(times)] * 2, *[lowest] * 2, kind))
        sql = """
            UPDATE kinds SET count = count + ?, first = min(coalesce(first, ?), ?), last = max(coalesce(last, ?), ?),
              example = min(coalesce(example, ?), ?) WHERE id = ?"""
        cursor.executemany(sql, spans)

    def _take_off(self, cursor: sqlite3.Cursor, rows: Sequence[_Row]) -> None:
        """Don't count letters any more that were removed."""
        removed: dict[int, list[_Row]] = {}
        for row in rows:
            removed.setdefault(row.kind, []).append(row)
        for kind, letters in removed.items():
            sql = "SELECT count, first, last, example FROM kinds WHERE id = ?"
            count, first, last, example = cursor.execute(sql, (kind,)).fetchone()
            count -= len(letters)
            sql = "UPDATE kinds SET count = ?, first = ?, last = ?, example = ? WHERE id = ?"
            cursor.execute(sql, (count, *((first, last, example) if count else (None, None, None)), kind))
            if not count:
                self._unused += 1
                self._stale.discard(kind)
            elif any(row.died_at in (first, last) or row.sequence == example for row in letters):
                self._stale.add(kind)
        if self._unused > max(_FEW_UNUSED, self._kinds // 2):
            cursor.execute("DELETE FROM kinds WHERE NOT count")
            self._kinds -= cursor.rowcount
            self._unused = 0
            self._known.clear()

    def _freshen(self) -> None:
        """Find the first, last and lowest letter again for each kind that has lost one."""
        what, some = "min(died_at), max(died_at), min(sequence), kind_id", list(self._stale)
        if len(some) <= _FEW_STALE:
            rows = [
                self._database.execute(f"SELECT {what} FROM letters WHERE kind_id = ?", (kind,)).fetchone()
                for kind in some
            ]
        else:
            sql = f"SELECT {what} FROM letters WHERE kind_id IN (SELECT value FROM json_each(?)) GROUP BY kind_id"
            rows = self._database.execute(sql, (json.dumps(some),)).fetchall()
        self._database.executemany("UPDATE kinds SET first = ?, last = ?, example = ? WHERE id = ?", rows)
        self._stale.clear()

    def _largest_by_own_subject(
        self, query: LetterQuery, fields: Sequence[GroupField], most: int, with_text: str
    ) -> tuple[list[tuple[GroupKey, LetterGroup, str | None]], int, int]:
        """Find the largest groups where letters have subjects of their own.

        Little is sorted for each letter: times and texts are those of the groups that are returned.
        """
        of_kinds, values = _of_kinds(query)
        of_each, more = self._of_each(query)
        columns = ", ".join(f"k.{field}" for field in fields)
        places = f"""
            WITH places AS MATERIALIZED (
              SELECT k.id, min(k.id) OVER (PARTITION BY {columns}) AS place, {with_text} AS has_text
              FROM kinds k WHERE k.count AND {of_kinds})"""
        letters = f"FROM letters l JOIN places p ON p.id = l.kind_id WHERE {' AND '.join(['true', *of_each])}"
        sql = f"""{places}, sizes AS MATERIALIZED (
              SELECT p.place, l.rest, count(*) AS size, min(l.sequence) AS example {letters} GROUP BY l.rest, p.place)
            SELECT (SELECT count(*) FROM sizes), (SELECT sum(size) FROM sizes), * FROM sizes
            ORDER BY size DESC, example LIMIT {most}"""
        found = self._database.execute(sql, (*values, *more)).fetchall()
        rests = [] if most < 0 else list({row[3] or "" for row in found})
        of_rests = f" AND coalesce(l.rest, '') IN ({', '.join('?' * len(rests))})" if rests else ""
        sql = f"""{places}
            SELECT p.place, l.rest, min(l.died_at), max(l.died_at), max(CASE WHEN p.has_text THEN p.id END)
            {letters}{of_rests} GROUP BY l.rest, p.place"""
        known = {row[:2]: row[2:] for row in self._database.execute(sql, (*values, *more, *rests))}
        kinds = dict[int, tuple[Any, ...]]()
        groups = list[tuple[GroupKey, LetterGroup, str | None]]()
        for _, _, place, rest, size, example in found:
            if place not in kinds:
                sql = f"SELECT {columns} FROM kinds k WHERE k.id = ?"
                kinds[place] = self._database.execute(sql, (place,)).fetchone()
            key = [
                part
                for field, value in zip(fields, kinds[place], strict=True)
                for part in ((value, rest) if field == "subject" else (value,))
            ]
            first, last, kind = known[place, rest]
            group = LetterGroup(size, self._moment(first), self._moment(last), example)
            groups.append((_key(fields, key), group, self._text_of(kind)))
        return (groups, *found[0][:2]) if found else ([], 0, 0)

    def _found(self, query: LetterQuery) -> tuple[str, list[object]]:
        """Return the statement of a query's letters, counted by kinds."""
        of_each, of_kinds = self._of_each(query), _of_kinds(query)
        counts = "kinds" if not of_each[0] else "matching"
        if of_each[0] and of_each != self._matching:
            self._count_matching(*of_each)
        columns = "k.id, f.count, f.first, f.last, f.example, NULL AS rest"
        return (
            f"SELECT {columns} FROM {counts} f JOIN kinds k ON k.id = f.id WHERE f.count AND {of_kinds[0]}",
            of_kinds[1],
        )

    def _count_matching(self, conditions: list[str], values: list[object]) -> None:
        """Count by kind the letters of a query whose conditions kinds don't decide.

        A row of the result is changed for each letter: SQLite groups by sorting, which takes three times as long.
        """
        self._database.execute("DELETE FROM matching")
        sql = f"""
            INSERT INTO matching SELECT kind_id, 1, died_at, died_at, sequence FROM letters l
            WHERE {" AND ".join(conditions)} ORDER BY sequence
            ON CONFLICT DO UPDATE SET count = count + 1, first = min(first, excluded.first),
              last = max(last, excluded.last)"""
        self._database.execute(sql, values)
        self._matching = conditions, values

    def _where(self, query: LetterQuery) -> tuple[str, list[object]]:
        """Return the condition of a query for single letters ``l``."""
        of_kinds, values = _of_kinds(query)
        of_each, more = self._of_each(query)
        excluded = f"SELECT 1 FROM kinds k WHERE k.count AND ({of_kinds}) IS NOT TRUE LIMIT 1"
        if self._database.execute(excluded, values).fetchone() is None:
            return " AND ".join(["true", *of_each]), more
        of_each.append(f"l.kind_id IN (SELECT k.id FROM kinds k WHERE {of_kinds})")
        return " AND ".join(of_each), [*more, *values]

    @property
    def _has_rests(self) -> bool:
        return len(self._subjects) >= _MOST_SUBJECTS

    def _of_each(self, query: LetterQuery) -> tuple[list[str], list[object]]:
        """Return the conditions of a query that kinds don't decide."""
        conditions, values = list[str](), list[object]()
        if query.selection.sequences is not None:
            conditions.append("l.sequence IN (SELECT value FROM json_each(?))")
            values.append(json.dumps([sequence for sequence in query.selection.sequences if sequence <= _HIGHEST]))
        if self._has_rests and query.selection.subject is not None and (last := _last_token(query.selection.subject)):
            conditions.append("(l.rest IS NULL OR l.rest = ?)")
            values.append(last)
        if query.job_id is not None:
            conditions.append("l.job = ?")
            values.append(_digest(query.job_id))
        for name, moment in ((">=", query.died_from), ("<", query.died_to)):
            if moment is not None:
                conditions.append(f"l.died_at {name} ?")
                values.append(self._time(moment))
        return conditions, values


def _of_kinds(query: LetterQuery) -> tuple[str, list[object]]:
    """Return the condition of a query for kinds ``k``."""
    selection = query.selection
    conditions, values = ["k.parked = ?"], list[object]((selection.parked,))
    if selection.reasons is None:
        conditions.append("k.reason != ?")
        values.append(_blob(Reason.UNDELIVERABLE))
    else:
        conditions.append(f"k.reason IN ({', '.join('?' * len(selection.reasons))})")
        values += map(_blob, selection.reasons)
    for field in _EXACT:
        if (value := getattr(selection, field)) is not None:
            conditions.append(f"k.{field} = ?")
            values.append(_blob(value))
    if selection.subject is not None:
        # Any last token is covered, or the one that single letters are compared with.
        last = _last_token(selection.subject) or "x"
        conditions.append("covers(?, CASE WHEN k.is_begun THEN k.subject || ? ELSE k.subject END)")
        values += [readable_text(selection.subject), last]
    if query.dags is not None:
        conditions.append(f"(k.dag_id IS NULL OR k.dag_id IN ({', '.join('?' * len(query.dags))}))")
        values += map(_blob, query.dags)
    return " AND ".join(conditions), values


def _last_token(subject: str) -> str | None:
    """Return the last token of a subject as people read it; ``None`` for a wildcard."""
    last = readable_text(subject).rpartition(".")[2]
    return None if last in ("*", ">") else last


def _columns(field: GroupField) -> str:
    return "k.subject, f.rest" if field == "subject" else f"k.{field}"


def _key(fields: Sequence[GroupField], columns: Iterable[Any]) -> GroupKey:
    """Return the values of fields from those of their columns."""
    values = iter(columns)
    return tuple(next(values) + (next(values) or "") if field == "subject" else _text(next(values)) for field in fields)


def _digest(text: str) -> int:
    # Four bytes: each letter that is shown is proved, and so compared with the text.
    return (hash(text) & 0xFFFFFFFF) - 0x80000000


def _blob(text: str | None) -> bytes | None:
    # A worker may record text that isn't UTF-8, which SQLite refuses as text.
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _text(blob: bytes | None) -> str | None:
    return None if blob is None else blob.decode("utf-8", "surrogatepass")


def _just_after(now: datetime, age: int | None) -> datetime | None:
    """Return the first moment at which a letter is younger than an age in nanoseconds; ``None`` for no age."""
    return None if age is None else now - timedelta(microseconds=age / 1_000) + _MICROSECOND
