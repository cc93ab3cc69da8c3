"""Actors of worlds beside publishers, workers and redrives: waits, watchers of dead letters, and people.

What each of them is told is compared with what really happened.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream import (
    JobsHandle,
    Origin,
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    WaitPolicy,
    WaitReport,
    cancel,
    find_dead_letters,
    wait,
    wait_by_handle,
)
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import (
    LetterCriteria,
    ReportedLetters,
    watch_arrivals,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.origin import TaskTry
from testbed.simulated.streams import header

if TYPE_CHECKING:
    import random

    from airflow_provider_jetstream.jetstream import JobAccount
    from testbed.simulated.connection import SimulatedConnection
    from testbed.simulated.stage import Stage

ERRORS: Final = (JetStreamProviderError, TimeoutError)
_ALL: Final = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)
_RESET_LEVEL: Final = 4
# Seconds: how often a watcher looks by itself, and how late it may be.
_LOOKS: Final = 5.0
_LATE: Final = 15.0
# A wait that is over may say what was so some moments before.
_MOMENT: Final = 5.0
_CANCELS: Final = 0.5
_WAVES: Final = 0.3
_UNDOES: Final = 0.4
_BY_POLICY: Final = 0.6
_KILLED: Final = 0.5
_MOST_CHANGES: Final = 6
_TIDIED: Final = (
    Selection(),
    Selection(),
    Selection(reasons=[Reason.TERMINATED]),
    Selection(reasons=[Reason.MAX_DELIVERIES]),
    Selection(parked=True),
)


Published: TypeAlias = tuple[dict[str, Any], dict[int, str]]


@dataclass
class PublishingTask:
    """A task that publishes, try by try.

    :ivar stored: by body the sequences of its jobs
    :ivar tries: how often it was tried in this run
    :ivar clears: how often it was cleared
    :ivar run: which of the runs of its name it is in
    :ivar is_later: whether it was cleared or its run made again, as the world's plan says
    :ivar is_stored: whether it has stored all its jobs since it was cleared, or its run was made again
    """

    name: str
    bodies: list[str]
    stored: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    tries: int = 0
    clears: int = 0
    run: int = 0
    is_later: bool = False
    is_stored: bool = False

    def go_on(self, how: str) -> None:
        """Have it cleared, or its run deleted and made again."""
        self.is_later, self.is_stored = True, False
        if how == "clear":
            self.clears += 1
        else:
            self.run, self.tries, self.clears = self.run + 1, 0, 0

    def origin(self) -> Origin:
        """Return what Airflow tells its present try about itself."""
        attempt = TaskTry(run_started=f"start {self.run}", clear_number=self.clears, number=self.tries)
        return Origin("dag", "run", self.name, max_tries=9 + self.clears, attempt=attempt)


async def pull_one(connection: SimulatedConnection, stream: str, consumer: str) -> tuple[str, str]:
    """Pull one message as a program does without the package: its reply subject, empty for a status, and its body."""
    arrived: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def receive(_subject: bytes, reply: bytes, _headers: bytes | None, body: bytes) -> None:
        arrived.put_nowait((reply.decode(), body.decode()))

    inbox = connection.new_inbox()
    subscription = await connection.subscribe_raw(inbox, receive)
    try:
        request = b'{"batch":1,"expires":1000000000}'
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, reply=inbox)
        async with asyncio.timeout(2):
            return await arrived.get()
    finally:
        await subscription.unsubscribe()


@dataclass
class Actors:
    """The actors of a world, and what they were told.

    :ivar tasks: the tasks that publish, by name
    :ivar published: by publisher, the handle on its jobs and their bodies by sequence
    :ivar finished: the waits that have ended
    :ivar reported: by watcher, the sequences of the letters that it has reported
    :ivar kept: by watcher, what it knows to be reported when it begins anew
    :ivar done_at: when each body was first done, in seconds
    :ivar failed: the bodies of which an attempt has failed, was given up or was lost, or may have been
    :ivar cancelled: the bodies that somebody has cancelled
    """

    world: Stage
    tasks: dict[str, PublishingTask] = field(default_factory=dict)
    published: dict[str, asyncio.Future[Published]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    reported: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    kept: dict[str, ReportedLetters] = field(default_factory=dict)
    done_at: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)

    @property
    def _now(self) -> float:
        return self.world.server.loop.time()

    def note_done(self, body: str) -> None:
        """Note that a handler has done a job."""
        self.done_at.setdefault(body, self._now)

    def note_published(self, publisher: str, handle: dict[str, Any] | None, jobs: dict[int, str]) -> None:
        """Note the handle on the jobs of a publisher, and their bodies by sequence."""
        if handle and not self._published(publisher).done():
            self._published(publisher).set_result((handle, jobs))

    def _published(self, publisher: str) -> asyncio.Future[Published]:
        if publisher not in self.published:
            self.published[publisher] = asyncio.get_running_loop().create_future()
        return self.published[publisher]

    def note_failed(self, body: str) -> None:
        """Note that an attempt has failed."""
        self.failed.add(body)

    # Waits.

    async def waiter(self, name: str, publisher: str) -> None:
        """Wait for a publisher's jobs, as a trigger does that is moved and begun anew now and then."""
        world, rng = self.world, self.world.draws.of(name)
        await asyncio.sleep(rng.uniform(0.0, world.plan.seconds))
        handle, jobs = await asyncio.shield(self._published(publisher))
        report: WaitReport | None = None
        advised: dict[str, int] = {}
        by_handle = rng.choice([True, False])
        while True:
            try:
                async with world.connected() as connection, asyncio.timeout(rng.choice([None, 2.0, 10.0])):
                    parsed = JobsHandle.of(handle)
                    if by_handle:
                        report = await wait_by_handle(connection, handle, policy=_ALL, on_stall="wait")
                        break
                    if report is None:
                        report, advised = await parsed.report(connection)
                    cursor = await parsed.cursor_now(connection)
                    await wait(connection, cursor, report, policy=_ALL, advised=advised, on_stall="wait")
                    break
            except ERRORS as error:
                world.tell(f"{name} is interrupted: {type(error).__name__}")
                if rng.choice([True, False]):
                    report = None
                await asyncio.sleep(rng.uniform(0.0, 1.0))
        world.account.counts["waits"] += 1
        world.tell(
            f"{name} ends: completed {sorted(report.completed)}, dead {dict(report.dead)}, cancelled"
            f" {sorted(report.cancelled)}, unaccounted {sorted(report.unaccounted)}, copies {dict(report.copies)}"
        )
        self.finished.add(name)
        self._check_report(name, report, jobs)

    def _check_report(self, name: str, report: WaitReport, jobs: dict[int, str]) -> None:
        told = [*report.completed, *report.dead, *report.cancelled, *report.unaccounted, *report.awaited]
        if sorted(told) != sorted(jobs):
            self.world.problem(f"{name} waited for {sorted(jobs)} and was told of {sorted(told)}")
            return
        account = self.world.account
        for sequence, body in sorted(jobs.items()):
            if sequence in report.completed:
                if not account.done[body]:
                    self.world.problem(f"{name} is told that {sequence} ({body}) is completed, and nobody has done it")
            elif sequence in report.cancelled:
                if body not in self.cancelled:
                    self.world.problem(f"{name} is told that {sequence} ({body}) is cancelled, and nobody has done so")
            elif sequence in report.dead:
                if self.world.is_calm and body not in self.failed:
                    self.world.problem(f"{name} is told that {sequence} ({body}) is dead, and no attempt has failed")
            elif sequence in report.unaccounted and self.world.is_calm and body not in account.unproved:
                self.world.problem(f"{name} is told that {sequence} ({body}) is unaccounted for")

    # Watchers of dead letters.

    async def watcher(self, name: str) -> None:
        """Report the dead letters that arrive, as the watcher of an asset does."""
        world = self.world
        async with (
            world.connected() as connection,
            watch_arrivals(
                connection,
                world.queue,
                LetterCriteria(Selection()),
                _LOOKS,
                self.kept.get(name, ReportedLetters()),
            ) as watch,
        ):
            while True:
                arrivals = await watch.next()
                self.kept[name] = watch.reported
                found = [sequence for group in arrivals.groups.values() for sequence in group.sequences]
                world.account.counts["arrivals"] += len(found)
                world.tell(f"{name} reports {found}")
                self.reported[name].update(found)
                for sequence in found:
                    body = self.body_of(sequence)
                    if body is not None and self._was_done(body, sequence):
                        world.problem(f"{name} reports {sequence} ({body}), which was done")

    def _was_done(self, body: str, sequence: int) -> bool:
        world = self.world
        at = self.done_at.get(body)
        return (
            at is not None
            and world.account.ends.get(sequence) == body
            and self._now - at > _MOMENT
            and body not in world.account.unproved
            and sequence not in world.server.streams[world.queue.name].messages
        )

    def body_of(self, sequence: int) -> str | None:
        """Return the body of a job, from the queue or the archive."""
        if message := self.world.server.streams[self.world.queue.name].messages.get(sequence):
            return message.data.decode()
        return next(iter(sorted(self.bodies_of(sequence))), None)

    def bodies_of(self, sequence: int) -> set[str]:
        """Return the bodies of the jobs that had a sequence, from the archive and from records of dead letters."""
        streams, name = self.world.server.streams, self.world.queue.name
        named = (("archive", "Nats-Sequence"), ("dead", "Dead-Letter-Sequence"))
        return {
            copy.data.decode()
            for stream, label in named
            for copy in streams[f"{name}-{stream}"].messages.values()
            if header(copy.headers, label) == str(sequence)
        }

    async def compare_watchers(self) -> None:
        """Compare what watchers have reported with the letters that have been dead for some time."""
        world = self.world
        names = [name for name in world.tasks if name.startswith("watcher")]
        if not names:
            return
        await asyncio.sleep(2 * _LATE)
        until = datetime.now(UTC) - timedelta(seconds=_LATE)
        with suppress(*ERRORS):
            async with world.connected() as connection:
                found = await find_dead_letters(connection, world.queue)
            for name in names:
                for letter in found.letters:
                    if letter.death.died_at < until and letter.sequence not in self.reported[name]:
                        world.problem(f"{name} has not reported {letter.sequence}, dead since {letter.death.died_at}")

    # A handler of the dead letter queue.

    async def handler(self, _name: str) -> None:
        """Handle entries as a program does that knows nothing of the package: get the job, do it, acknowledge."""
        world = self.world
        letters, queue = f"{world.queue.name}-dead", world.queue.name
        config = {
            "durable_name": "handler",
            "ack_policy": "explicit",
            "ack_wait": 5 * 10**9,
            "filter_subject": f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{queue}.*",
        }
        async with world.connected() as connection:
            await connection.api(f"CONSUMER.CREATE.{letters}.handler", {"stream_name": letters, "config": config})
            while True:
                try:
                    reply, body = await pull_one(connection, letters, "handler")
                except TimeoutError:
                    continue
                if reply:
                    await self._handle_entry(connection, reply, json.loads(body)["stream_seq"])

    async def _handle_entry(self, connection: SimulatedConnection, reply: str, sequence: int) -> None:
        world = self.world
        message = await get_message(connection, world.queue.name, sequence)
        if message is not None:
            body = message.data.decode()
            world.check_discarded([sequence], world.discarded, "given to a handler")
            world.account.running[body] += 1
            done = world.account.done[body]
            try:
                await asyncio.sleep(world.draws.of("handler", body).uniform(0.0, 0.3))
                is_twice = sequence in world.account.handled or world.account.running[body] > 1
                if "server" in world.plan.kinds and (is_twice or world.account.done[body] > done):
                    # A server that was killed has forgotten the death, and announces it again, or delivers the job.
                    world.account.excuse({body})
                world.account.done[body] += 1
                self.note_done(body)
                world.account.handled.add(sequence)
                world.touch(body)
                world.tell(f"a handler does {body}, {sequence}")
                await connection.request(reply, b"+ACK")
            finally:
                world.account.running[body] -= 1
            world.account.counts["handled"] += 1
        else:
            await connection.request(reply, b"+ACK")

    # People.

    async def operator(self, name: str) -> None:
        """Cancel jobs and park letters now and then."""
        world, rng = self.world, self.world.draws.of(name)
        while True:
            await asyncio.sleep(rng.uniform(0.5, world.plan.seconds))
            stored = sorted(world.account.stored)
            with suppress(*ERRORS):
                if stored and rng.random() < _CANCELS:
                    body = rng.choice(stored)
                    self.cancelled.add(body)
                    async with world.connected() as connection:
                        await cancel(connection, world.queue, body, "by hand")
                    world.account.counts["cancelled"] += 1
                    world.tell(f"{body} is cancelled")
                else:
                    await world.redrive("parking", RedriveRequest(max_redrives=0))

    def redrive_request(self, rng: random.Random) -> RedriveRequest:
        """Draw a redrive: by any protocol that the server has."""
        world = self.world
        protocols = [Protocol.AUTO, Protocol.AUTO, Protocol.COPY]
        if world.server.level >= _RESET_LEVEL:
            protocols.append(Protocol.IN_PLACE)
        protocol = rng.choice(protocols)
        if protocol is not Protocol.IN_PLACE and rng.random() < _WAVES:
            return RedriveRequest(protocol=protocol, waves=[2, "rest"], stop_when=1.0)
        return RedriveRequest(protocol=protocol)

    async def tidier(self, name: str) -> None:
        """Discard letters by a selection, and undo that now and then; at times it is killed between two changes."""
        world, rng = self.world, self.world.draws.of(name)
        while True:
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            if not (world.server.streams[f"{world.queue.name}-dead"].messages or rng.random() < _UNDOES):
                continue
            request = RedriveRequest(rng.choice(_TIDIED), discard=True, why="nobody wants it")
            if rng.random() < _UNDOES and (discards := self.discards()):
                request = RedriveRequest(undo=rng.choice(discards))
            elif world.plan.keep and rng.random() < _BY_POLICY:
                request = RedriveRequest(discard="by_policy")
            changes = rng.randint(1, _MOST_CHANGES) if world.plan.faults and rng.random() < _KILLED else None
            with suppress(*ERRORS):
                await world.redrive(name, request, changes)
                world.account.counts["undone" if request.undo else "discards"] += 1

    def discards(self) -> list[str]:
        """Return the ids of the redrives that have discarded letters."""
        audit, prefix = self.world.server.streams[f"{self.world.queue.name}-audit"], f"audit.{self.world.queue.name}."
        return sorted(
            {
                message.subject.removeprefix(f"{prefix}redrives.")
                for message in audit.messages.values()
                if message.subject.startswith(f"{prefix}redrives.") and b'"discard":' in message.data
            }
        )

    def check_discards(self, account: JobAccount | None) -> None:
        """Check at the end that nobody has redriven a discarded letter, and that an account counts all of them."""
        for sequence, actions in self.world.letter_actions().items():
            for action, after in pairwise(actions):
                if action == "discarded" and after in ("redriven", "requeued"):
                    self.world.problem(f"{sequence} was {after}, though it was discarded: {actions}")
        self._check_ages()
        count = len(self.world.discarded)
        self.world.account.counts["stay discarded"] += count
        if account and account.discarded != count:
            self.world.problem(f"{account.discarded} letters are accounted as discarded, and {count} are")

    def _check_ages(self) -> None:
        """Check that no letter that a policy has discarded was younger than it keeps such letters.

        The server says when each died. A parked one is younger than that, and its policy another.
        """
        world, prefix, parked = self.world, f"audit.{self.world.queue.name}.letters.", set[str]()
        died = {sequence: at for (sequence, _), at in sorted(world.server.streams[world.queue.name].died.items())}
        for message in world.server.streams[f"{world.queue.name}-audit"].messages.values():
            if not message.subject.startswith(prefix):
                continue
            record = json.loads(message.data)
            if record["action"] == "discarded" and record.get("why", "").startswith("kept "):
                reason = "parked" if message.subject in parked else record["reason"]
                keep = world.plan.keep.get(reason, None if reason == "parked" else world.plan.keep.get("default"))
                age = (message.time - died[record["sequence"]]) / 1e9
                world.account.counts["kept no longer"] += 1
                if keep is None or age < keep:
                    world.problem(f"{record['sequence']} ({reason}) was discarded {age} s after its death, kept {keep}")
            (parked.add if record["action"] == "parked" else parked.discard)(message.subject)

    async def check_waits(self) -> None:
        """Check that a wait that begins now tells of discarded jobs that they are."""
        for name, published in self.published.items():
            if not (published.done() and (told := self.world.discarded & published.result()[1].keys())):
                continue
            with suppress(*ERRORS):
                async with self.world.connected() as connection, asyncio.timeout(_LATE):
                    report = await wait_by_handle(connection, published.result()[0], policy=_ALL)
                wrong = {one: report.dead.get(one) for one in told if "discarded" not in report.dead.get(one, "")}
                if wrong:
                    self.world.problem(f"a wait for {name} is told {wrong}, which are discarded")

    # The judge.

    def judge(self, waits: list[str]) -> None:
        """Judge at the end of the world."""
        for name in waits:
            if name not in self.finished:
                self.world.problem(f"{name} has not ended")
