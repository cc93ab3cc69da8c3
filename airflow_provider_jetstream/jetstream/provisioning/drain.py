"""Changes the filters of consumers once nothing of them is pending or in flight: each job is done once, by one of them.

A consumer that is created delivers every stored job that its filters match: what another consumer has in flight, and
what died there. So the switch has an order, observed with nats-server 2.10 to 2.15:

1. Until all the consumers whose filters change are idle, nothing is changed. Workers and publishers go on.
2. Dead letters that another consumer would deliver are parked, while the numbers of the idle consumers prove them.
3. A consumer gives its subjects up: by its new filters, or, where it is to be removed, by a filter that no job matches.
   From then on it delivers nothing more of them. Whatever it delivered between the last reading and this request is
   awaited and parked like the rest: only this consumer delivers such a job again, while no other one has its subject.
4. It is removed where nothing is left for it. Then the others are created.

Every step can be repeated. What a consumer gave up is in its metadata until step 4, so a killed process leaves a queue
that the next call goes on with. A program that creates its consumer when it starts takes the subjects back: then the
consumer is awaited again. Between the last reading and the removal of a consumer the server has no condition to offer:
a program that creates the consumer anew and pulls within that one request has its job delivered again.

Every consumer of a work queue begins with the first stored job: the server refuses one that would start past anything.
So what died while the queue had another consumer, or one of the same name, would be delivered once more, and is parked.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.streams import msg_get, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import DRAINED, handed_over_subject
from airflow_provider_jetstream.jetstream.dead_letters.facts import resolve_origins
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, origin_of, task_key_of
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import EveryLetter, Selection
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    DeadlineError,
    DriftError,
    NotFoundError,
    ProvisioningError,
    TransientError,
    UnsuitableQueueError,
)
from airflow_provider_jetstream.jetstream.provisioning.consumer_steps import given_up
from airflow_provider_jetstream.jetstream.provisioning.plan import Parking, job_count, letter_count, listed
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Drain, Step
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


_NAMED = 5
_NAMED_RANGES = 20
# Seconds: after how long without a change a drain is given up, and for how long jobs may be added once the jobs of its
# beginning have been delivered.
_STALLED_SECONDS = 60.0
_ADDED_SECONDS = 60.0
_MOST_SWITCHES = 20


class StoredLetter(NamedTuple):
    """A dead letter whose job is still stored in the queue; ``absent`` where no consumer takes its subject any more."""

    subject: str
    absent: bool


async def stored_letters(connection: Connection, queue: WorkQueue, filters: Sequence[str]) -> dict[int, StoredLetter]:
    """Return by sequence the dead letters that are stored on subjects which filters match."""
    stored = [subject for one in filters async for subject, _ in subject_counts(connection, queue.name, one)]
    if not queue.dead_letters or not stored:
        return {}
    try:
        scan = await Scan.begin(connection, queue)
    except (NotFoundError, UnsuitableQueueError):
        # There is no dead letter queue yet, or the stream isn't a work queue, which blocks its own step.
        return {}
    return {
        letter.sequence: StoredLetter(letter.subject, letter.consumer_absent)
        async for letter in scan.letters(EveryLetter())
        if letter.source is BodySource.QUEUE and covered_by_any(filters, letter.subject)
    }


async def with_dead_letters(
    connection: Connection, queue: WorkQueue, steps: Sequence[Step], *, park_dead: bool
) -> list[Step]:
    """Block the steps of a plan that create consumers which would run dead letters again.

    :param queue: the work queue, whose stream exists
    :param park_dead: whether these letters are to be parked first instead
    """
    created = {
        step.name: filter_subjects(step.config)
        for step in steps
        if step.action == "create" and step.name == f"{queue.name}/{step.consumer}"
    }
    found: dict[str, list[int]] = defaultdict(list)
    filters = [subject for own in created.values() for subject in own]
    letters = await stored_letters(connection, queue, filters) if created else {}
    for sequence, letter in letters.items():
        for name, own in created.items():
            if letter.absent and covered_by_any(own, letter.subject):
                found[name].append(sequence)
    return [_with_parking(queue, step, found.get(step.name, []), park_dead=park_dead) for step in steps]


def _with_parking(queue: WorkQueue, step: Step, letters: Sequence[int], *, park_dead: bool) -> Step:
    if not letters:
        return step
    if park_dead:
        return replace(step, parking=Parking(queue, tuple(letters)))
    more = " and more" if len(letters) > _NAMED else ""
    reason = (
        f"it would run {letter_count(len(letters))} again ({', '.join(map(str, letters[:_NAMED]))}{more}), whose"
        " consumer is gone: provision with park_dead=True (apply --park-dead) to park them first; or redrive them"
        " first, so that they run as they are redriven"
    )
    return replace(step, blocked=(*step.blocked, reason))


async def park(connection: Connection, queue: WorkQueue, sequences: Sequence[int], why: str, consumer: str) -> str:
    """Park dead letters that a consumer would run again; return a sentence with the command that brings them back.

    :param why: the reason, for the audit and the letters
    :param consumer: the consumer, or several
    :raises ProvisioningError: some of them couldn't be parked
    :raises TransientError: somebody else has changed them since they were found
    """
    request = RedriveRequest(Selection(sequences=frozenset(sequences)), max_redrives=0, why=why)
    try:
        report = await redrive_dead_letters(connection, queue, request)
    except DeadLetterGoneError as error:
        raise TransientError(f"the dead letters were changed after they were found: {error}") from error
    if failed := report.failed:
        first = min(failed)
        raise ProvisioningError(
            f"expected to park {letter_count(len(sequences))} before consumer {consumer} is created,"
            f" found {len(failed)} that couldn't be ({first}: {failed[first]}): see to that, and provision again"
        )
    spans = _spans(sorted(sequences))
    options = " ".join(f"--sequence {span}" for span in spans[:_NAMED_RANGES])
    more = f" (and more: jetstream-queue letters list {queue.name} --parked)" if len(spans) > _NAMED_RANGES else ""
    return (
        f"parked {letter_count(len(sequences))}, redriven by: jetstream-queue redrive start {queue.name} --parked"
        f" {options}{more}"
    )


def _spans(sequences: Sequence[int]) -> list[str]:
    """Return sorted sequences as ranges."""
    firsts = [now for before, now in pairwise([-1, *sequences]) if now > before + 1]
    lasts = [now for now, after in pairwise([*sequences, sequences[-1] + 2]) if after > now + 1]
    return [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]


_SHORTEST_PAUSE, _LONGEST_PAUSE, _FEW = 0.05, 1.0, 10


class Draining:
    """The execution of the steps of a plan that await a consumer's jobs.

    :param steps: the steps of the plan that have a drain
    :param parked: gets a sentence on the dead letters that are parked
    """

    def __init__(self, connection: Connection, steps: Sequence[Step], parked: list[str]) -> None:
        self._connection = connection
        self._steps = steps
        self._parked = parked
        self._stream = steps[0].name.partition("/")[0]
        # By consumer: its number of deliveries when it was idle, before its dead letters were parked.
        self._seen: dict[str, int] = {}

    async def begin(self) -> None:
        """Wait until nothing of the consumers is pending or in flight, and park their dead letters.

        :raises DeadlineError: jobs stay, or are added all the time; nothing was changed
        :raises DriftError: a stored job is neither to be delivered nor known to be dead
        """
        await self._idle([step.consumer for step in self._steps])
        for step in self._steps:
            await self._park(step)

    async def switch(self, step: Step) -> None:
        """Give an idle consumer its new filters, or remove it.

        :raises NotFoundError: it is gone, and isn't to be removed
        :raises ApiError: the server refused
        """
        name, target = step.consumer, filter_subjects(step.config)
        for _ in range(_MOST_SWITCHES):
            if (info := await self._info(name)) is None:
                if step.action == "remove":
                    return
                raise NotFoundError(f"consumer {step.name} was removed after the plan was made: provision again")
            if _open(info):
                await self._idle([name])
                await self._park(step)
                continue
            own = (*given_up(info["config"]), *filter_subjects(info["config"]))
            if step.action != "keep" and sorted(own) != sorted(target):
                await self._narrow(step, own)
            if step.action == "remove":
                last = await self._info(name)
                if last is None:
                    return
                if filter_subjects(last["config"]) != target or last["num_ack_pending"]:
                    # A program that creates its consumer when it starts has taken the subjects back.
                    continue
                await self._connection.api(f"CONSUMER.DELETE.{self._stream}.{name}")
            elif step.action == "update":
                await update_consumer(self._connection, self._stream, step.config)
            return
        raise DeadlineError(
            f"expected consumer {step.name} to keep the filters that it got, found others {_MOST_SWITCHES} times: stop"
            " the program that creates it when it starts, then provision again"
        )

    async def _narrow(self, step: Step, own: Sequence[str]) -> None:
        unused = handed_over_subject(self._stream, step.consumer)
        mark = {DRAINED: " ".join(sorted({*own} - {unused}))}
        marked = {**step.config, "metadata": {**(step.config.get("metadata") or {}), **mark}}
        await update_consumer(self._connection, self._stream, marked)
        after = await self._info(step.consumer)
        if after and after["delivered"]["consumer_seq"] != self._seen.get(step.consumer):
            await self._settled(step.consumer, after["delivered"]["stream_seq"])
            await self._park(step)

    async def _park(self, step: Step) -> None:
        """Park the dead letters of an idle consumer that another consumer would deliver."""
        drain = step.drain
        if drain is None or not drain.filters:
            return
        receivers = listed(drain.receivers) or "another partition"
        letters = await stored_letters(self._connection, drain.queue, drain.filters)
        if letters:
            why = f"{step.consumer} gave its subject up, and {receivers} would have run it again"
            self._parked.append(await park(self._connection, drain.queue, [*letters], why, receivers))
        if left := await self._passed(step.consumer, drain):
            raise DriftError(
                f"expected no stored job that consumer {step.name} has passed, found sequence {left}, which {receivers}"
                " would run again and which can't be parked, since it isn't known to be dead: redrive it by its"
                f" sequence (jetstream-queue redrive start {drain.queue.name} --sequence {left}), or declare a dead"
                " letter queue if there is none, then provision again"
            )

    async def _passed(self, consumer: str, drain: Drain) -> int | None:
        """Return the sequence of a stored job that an idle consumer won't deliver any more."""
        if (info := await self._info(consumer)) is None:
            return None
        for subject in drain.filters:
            message = await next_message(self._connection, self._stream, 1, subject)
            if message is not None and message.sequence <= info["delivered"]["stream_seq"]:
                return message.sequence
        return None

    async def _idle(self, names: Sequence[str]) -> None:
        """Wait until nothing of consumers is pending or in flight."""
        first = last = await self._last_sequence()
        stalled_at, progress, pause, added_at = time.monotonic(), None, _SHORTEST_PAUSE, 0.0
        while True:
            infos = await self._infos(names)
            busy = {name: info for name, info in infos.items() if _open(info)}
            if not busy:
                self._seen |= {name: info["delivered"]["consumer_seq"] for name, info in infos.items()}
                return
            now = time.monotonic()
            if (state := [*map(_progress, busy.values())]) != progress:
                stalled_at, progress = now, state
                pause = _SHORTEST_PAUSE if sum(map(_open, busy.values())) < _FEW else pause
            limit = max(_STALLED_SECONDS, *(2 * _longest_wait(info["config"]) for info in busy.values()))
            if now - stalled_at > limit:
                raise DeadlineError(self._stalled_text(busy, limit))
            if any(info["delivered"]["stream_seq"] > last for info in busy.values()):
                added_at = added_at or now
                if now - added_at > _ADDED_SECONDS:
                    raise DeadlineError(await self._added_text(busy, first, now - added_at))
                last = await self._last_sequence()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _settled(self, name: str, sequence: int) -> None:
        """Wait until every delivery of a consumer up to a stream sequence has ended."""
        began = time.monotonic()
        while info := (await self._infos([name])).get(name):
            if not info["num_ack_pending"] or info["ack_floor"]["stream_seq"] >= sequence:
                return
            limit = max(_STALLED_SECONDS, 2 * _longest_wait(info["config"]))
            if time.monotonic() - began > limit:
                raise DeadlineError(self._stalled_text({name: info}, limit))
            await asyncio.sleep(_SHORTEST_PAUSE)

    async def _infos(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Read consumers; jobs that have used up their deliveries are in flight until a pull request arrives."""
        listed_ = await list_consumers(self._connection, self._stream)
        infos = {name: listed_[name] for name in names if name in listed_}
        if any(info["num_ack_pending"] and not info["num_pending"] for info in infos.values()):
            listed_ = await probe_consumers(self._connection, self._stream)
        return {name: listed_[name] for name in names if name in listed_}

    async def _info(self, name: str) -> dict[str, Any] | None:
        return (await list_consumers(self._connection, self._stream)).get(name)

    async def _last_sequence(self) -> int:
        return int((await stream_info(self._connection, self._stream))["state"]["last_seq"])

    def _stalled_text(self, busy: Mapping[str, Mapping[str, Any]], seconds: float) -> str:
        states = [
            f"{info['num_pending']} pending and {info['num_ack_pending']} in flight of {name}"
            for name, info in busy.items()
        ]
        return (
            f"expected the jobs of {self._stream} to be done before its consumers change, found {listed(states)}"
            f" without any change for {seconds:.0f} s: make sure that workers pull them, or wait for jobs that are to"
            " be tried again later, and provision again"
        )

    async def _added_text(self, busy: Mapping[str, Mapping[str, Any]], first: int, seconds: float) -> str:
        filters = [subject for info in busy.values() for subject in filter_subjects(info["config"])]
        added = await self._last_sequence() - first
        return (
            f"expected no more jobs for consumers that change, found {job_count(added)} added to {self._stream} since"
            f" the drain began, and {job_count(sum(map(_open, busy.values())))} of {listed(list(busy))} to be done"
            f" {seconds:.0f} s after those of before{await self._newest(filters)}: stop the publisher, then provision"
            " again"
        )

    async def _newest(self, filters: Iterable[str]) -> str:
        """Return a clause on the newest stored job and who published it."""
        found = [await msg_get(self._connection, self._stream, {"last_by_subj": one}) for one in filters]
        newest = max((one for one in found if one), key=lambda message: message.sequence, default=None)
        if newest is None:
            return ""
        queue = next(step.drain.queue for step in self._steps if step.drain)
        events = queue.events.name if queue.events else None
        key = task_key_of(newest.headers)
        origins = await resolve_origins(self._connection, queue.name, events, [key] if key else [])
        origin = origin_of(newest.headers, origins)
        by = (
            f"task {origin.task_id} of run {origin.run_id} of DAG {origin.dag_id}"
            if origin
            else "a program that names no Airflow task"
        )
        return f"; {by} added the last one, sequence {newest.sequence} on {newest.subject} at {newest.time}"


async def update_consumer(
    connection: Connection, stream: str, config: Mapping[str, Any], action: str = "update"
) -> None:
    """Create or update a consumer.

    :param config: its whole configuration
    :raises ApiError: the server refused
    """
    # Older servers leave the name out where a consumer was created with a durable name only.
    subject = f"CONSUMER.CREATE.{stream}.{config.get('name') or config['durable_name']}"
    if filter_subject := config.get("filter_subject"):
        subject += f".{filter_subject}"
    await connection.api(subject, {"stream_name": stream, "config": dict(config), "action": action})


def _open(info: Mapping[str, Any]) -> int:
    return int(info["num_pending"] + info["num_ack_pending"])


def _progress(info: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        *(info["num_pending"], info["num_ack_pending"]),
        *(info["delivered"]["consumer_seq"], info["ack_floor"]["consumer_seq"]),
    )


def _longest_wait(config: Mapping[str, Any]) -> float:
    return float(max([config.get("ack_wait", 0), *(config.get("backoff") or [])])) / NANOSECONDS
