"""The origin of a job: the Airflow task that published it."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from binascii import b2a_base64, hexlify
from dataclasses import dataclass, field
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING
from uuid import UUID

from airflow_provider_jetstream.jetstream.contract import DAG_ID, MAP_INDEX, RUN_ID, TASK_ID
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.task_values import TaskValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KEY_DIGITS = 32
# The version of UUIDs that begin with the time.
_ORDERED = 7
# The first message of a task's manifest has the key in it.
_LONGEST_KEY = 1_024
# Of a message id, and their alphabet in Base64.
DIGEST_BYTES = 16
URL_SAFE = bytes.maketrans(b"+/", b"-_")
_SHORT_DIGEST = re.compile("[0-9A-Za-z_-]{22}")
_KEY = re.compile(f"[0-9a-f]{{{_KEY_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class TaskTry(TaskValue):
    """What Airflow tells a try of a task about itself, which tells runs of one name apart.

    A run has no id of its own: a run that was deleted and made again, and the run of another Airflow deployment with
    the same DAG, have the same names.

    :param run_started: when its DAG run was started, as text; clearing a run that has ended starts it anew
    :param clear_number: how often the run was cleared
    :param number: the number of the try, which only grows within a run
    :param try_id: Airflow's id of the try
    :param dag_version: Airflow's id of the version of the DAG, another one in each deployment
    """

    run_started: str | None = None
    clear_number: int | None = None
    number: int | None = None
    try_id: str | None = None
    dag_version: str | None = None

    def follows(self, earlier: TaskTry, *, raised_tries: bool) -> int:
        """Return how surely this try is of the same run as an earlier one: 0 for another run, at most 3.

        :param raised_tries: whether this try has a higher ``max_tries``, as after a clear
        """
        if self.try_id is not None and self.try_id == earlier.try_id:
            return 3
        if self.run_started == earlier.run_started:
            # ``dag.test()`` starts each run at its logical date.
            return 0 if self._begins_anew(earlier) else 2
        if None in (self.clear_number, earlier.clear_number):
            was_cleared = raised_tries
        else:
            was_cleared = (self.clear_number or 0) > (earlier.clear_number or 0)
        return int(was_cleared and (self.number or 0) >= (earlier.number or 0) and not self._begins_anew(earlier))

    def _begins_anew(self, earlier: TaskTry) -> bool:
        """Return whether it has no higher number than an earlier try, and was made after that one."""
        if None in (self.number, earlier.number, self.try_id, earlier.try_id):
            return False
        ids = [UUID(str(try_id)) for try_id in (self.try_id, earlier.try_id)]
        # Ids of version 7 begin with the time. The process of a try that Airflow has given up may still go on.
        is_later = any(given.version != _ORDERED for given in ids) or ids[0].int > ids[1].int
        return is_later and (self.number or 0) <= (earlier.number or 0)


@dataclass(frozen=True, slots=True)
class Origin(TaskValue):
    """The Airflow task that publishes.

    :param dag_id: the id of its DAG
    :param run_id: the id of the DAG's run
    :param task_id: its id
    :param map_index: its index in a mapped task, ``-1`` otherwise
    :param round: how often all its jobs have ended before; a task that is cleared then publishes new jobs
    :param idempotency_key: stands for the run in the ids of the task's jobs: all runs with this key publish the same
        jobs
    :param operation: one of several calls of the task that publish; each has its own jobs
    :param max_tries: Airflow's number of the task's tries, which a clear raises and a retry doesn't; absent where no
        Airflow tells them apart
    :param attempt: what tells the run from others of its name
    :param run: what stands for the run in the ids of its jobs besides its name; that of ``attempt`` where absent
    :param is_further_run: whether a run of the same name has the manifest of that name
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: int = 0
    idempotency_key: str | None = None
    operation: str | None = None
    max_tries: int | None = field(default=None, compare=False)
    attempt: TaskTry | None = field(default=None, compare=False)
    run: str | None = field(default=None, compare=False)
    is_further_run: bool = field(default=False, compare=False)

    @classmethod
    def of_key(cls, idempotency_key: str) -> Origin:
        """Return the origin of what a program publishes once for a key: no task, so the jobs name none."""
        return cls("", "", "", idempotency_key=idempotency_key)

    @property
    def is_task(self) -> bool:
        """Whether it is a task; else a program publishes for its idempotency key."""
        return bool(self.dag_id)

    @property
    def tells_tries_apart(self) -> bool:
        """Whether it is known which publications are tries of one another, so that a manifest can be theirs."""
        return self.max_tries is not None or self.idempotency_key is not None

    @property
    def key(self) -> str:
        """The key of the task: one token, the same for all its tries and rounds, and different for every other task."""
        fields = [self.dag_id, self.run_id, self.task_id, self.map_index]
        return sha256(json.dumps(fields).encode()).hexdigest()[:_KEY_DIGITS]

    @property
    def manifest_key(self) -> str:
        """The key of the manifest: one token, the task's unless runs share a manifest or its calls have their own."""
        if self.is_key_of_manifest:
            return self.key
        run = self.run_id if self.idempotency_key is None else {"idempotency_key": self.idempotency_key}
        operation = [] if self.operation is None else [{"operation": self.operation}]
        further = [{"run": self.run}] if self.is_further_run else []
        fields = [self.dag_id, run, self.task_id, self.map_index, *operation, *further]
        return sha256(json.dumps(fields).encode()).hexdigest()[:_KEY_DIGITS]

    @property
    def is_key_of_manifest(self) -> bool:
        """Whether the manifest has the key of the task."""
        return self.idempotency_key is None and self.operation is None and not self.is_further_run

    @property
    def run_mark(self) -> str | None:
        """What stands for the run in the ids of its jobs besides its name; ``None`` where nothing does."""
        if self.idempotency_key is not None:
            return None
        return self.run if self.run is not None or self.attempt is None else self.attempt.run_started

    def headers(self) -> dict[str, str]:
        """Return the four ``Airflow-*`` headers that name the task."""
        if not self.is_task:
            return {}
        return {
            DAG_ID: self.dag_id,
            RUN_ID: self.run_id,
            TASK_ID: self.task_id,
            MAP_INDEX: str(self.map_index),
        }

    def message_id(self, *key: str | int) -> str:
        """Return a ``Nats-Msg-Id`` of 22 characters that stays the same when Airflow retries the task.

        :param key: the job's given id; or the digest of its content and the number of equal jobs before it
        """
        return self.message_ids().of(*key)

    def message_ids(self) -> ShortDigests:
        """Return the message ids of the task's jobs; see :meth:`message_id`."""
        # One part more than with a key that happens to be a run's id.
        run = (self.run_id,) if self.idempotency_key is None else ("idempotency_key", self.idempotency_key)
        operation = () if self.operation is None else ("operation", self.operation)
        mark = () if self.run_mark is None else ("run", self.run_mark)
        return ShortDigests(self.dag_id, *run, self.task_id, self.map_index, *operation, *mark, self.round)


def is_task_key(text: str) -> bool:
    """Return whether a text may be the key of a task; anybody may publish a job that holds another text."""
    return _KEY.fullmatch(text) is not None


def digest_of(message_id: str) -> bytes | None:
    """Return the 16 bytes of a message id that :func:`short_digest` has made; ``None`` for any other text."""
    if not _SHORT_DIGEST.fullmatch(message_id):
        return None
    return urlsafe_b64decode(f"{message_id}==")


class ShortDigests:
    """Digests whose first parts are the same.

    :param first: the first parts, at least one
    """

    __slots__ = ("_begun", "_first")

    def __init__(self, *first: str | int) -> None:
        self._first = json.dumps(first)[:-1].encode()
        self._begun = sha256(self._first)

    def of_contents(self, contents: Sequence[bytes], counts: Iterable[int]) -> list[bytes]:
        """Return the bytes of what :meth:`of` returns for the digest and the number of each of many contents."""
        first = self._first
        texts = [b'%b, "%b", %d]' % (first, *row) for row in zip(map(hexlify, contents), counts, strict=False)]
        return [sha256(text).digest()[:DIGEST_BYTES] for text in texts]

    def of_texts(self, texts: Iterable[str]) -> list[bytes]:
        """Return the bytes of what :meth:`of` returns for each of many texts."""
        first = self._first
        encoded = [encode_basestring_ascii(text).encode() for text in texts]
        return [sha256(b"%b, %b]" % (first, text)).digest()[:DIGEST_BYTES] for text in encoded]

    def of(self, *rest: str | int) -> str:
        """Return 22 characters, letters, digits, ``-`` and ``_``, that only these parts in this order give."""
        digest = self._begun.copy()
        # The same text as that of json.dumps, which takes three times as long.
        texts = [encode_basestring_ascii(part) if isinstance(part, str) else str(part) for part in rest]
        digest.update("".join([f", {text}" for text in texts] + ["]"]).encode())
        return b2a_base64(digest.digest()[:DIGEST_BYTES], newline=False)[:22].translate(URL_SAFE).decode()


def short_digest(*parts: str | int) -> str:
    """Return 22 characters, letters, digits, ``-`` and ``_``, that only these parts in this order give."""
    return ShortDigests(*parts).of()


def checked_key(key: object) -> str | None:
    """Return an idempotency key, if there is one.

    :raises ArgumentError: it can't be one
    """
    if key is None:
        return None
    found = repr(key)[:100]
    if not isinstance(key, str) or not key.strip():
        raise ArgumentError(f"expected text as idempotency_key, found {found}: name what the jobs are published for")
    if len(key.encode(errors="replace")) > _LONGEST_KEY or not key.isprintable():
        raise ArgumentError(
            f"expected at most {_LONGEST_KEY:,} bytes of printable text as idempotency_key, found {found}: shorten it,"
            " or give its digest"
        )
    return key
