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
from urllib.parse import quote

from airflow_provider_jetstream.jetstream.contract import DAG_ID, MAP_INDEX, RUN_ID, TASK_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KEY_DIGITS = 32
# Of a message id, and their alphabet in Base64.
DIGEST_BYTES = 16
URL_SAFE = bytes.maketrans(b"+/", b"-_")
_SHORT_DIGEST = re.compile("[0-9A-Za-z_-]{22}")
_KEY = re.compile(f"[0-9a-f]{{{_KEY_DIGITS}}}")


@dataclass(frozen=True, slots=True)
class Origin:
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
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: int = 0
    idempotency_key: str | None = None
    operation: str | None = None
    max_tries: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """The key of the task: one token, the same for all its tries and rounds, and different for every other task."""
        fields = [self.dag_id, self.run_id, self.task_id, self.map_index]
        return sha256(json.dumps(fields).encode()).hexdigest()[:_KEY_DIGITS]

    @property
    def manifest_key(self) -> str:
        """The key of the manifest: one token, the task's unless runs share a manifest or its calls have their own."""
        if self.idempotency_key is None and self.operation is None:
            return self.key
        run = self.run_id if self.idempotency_key is None else {"idempotency_key": self.idempotency_key}
        operation = [] if self.operation is None else [{"operation": self.operation}]
        fields = [self.dag_id, run, self.task_id, self.map_index, *operation]
        return sha256(json.dumps(fields).encode()).hexdigest()[:_KEY_DIGITS]

    def headers(self) -> dict[str, str]:
        """Return the four ``Airflow-*`` headers that name the origin."""
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
        return ShortDigests(self.dag_id, *run, self.task_id, self.map_index, *operation, self.round)

    def long_message_id(self, key: str | int) -> str:
        """Return the ``Nats-Msg-Id`` that earlier versions gave to the job."""
        parts = (self.dag_id, self.run_id, self.task_id, self.map_index)
        rounds = [f"round-{self.round}"] if self.round else []
        # Quoting removes # from ids, so the index of one job never equals the same number as the id of another.
        last = f"#{key}" if isinstance(key, int) else quote(key, safe=":+")
        return "/".join([*(quote(str(part), safe=":+") for part in parts), *rounds, last])


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
