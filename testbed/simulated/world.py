"""Worlds: actors that use one queue of a simulated server at once, and an independent account that judges them.

The actors run the package's own code: publishers with retries, workers, scans, accounts, waits and redrives. A world is
drawn from its seed. What really happened is noted where it happens: by the handlers, and by the server where it removes
a message for an acknowledgement.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from airflow_provider_jetstream.jetstream import (
    Job,
    JobAccount,
    PublishIncompleteError,
    Reason,
    RedriveRequest,
    Selection,
    Status,
    WorkQueue,
    account_for_jobs,
    connection_settings,
    find_dead_letters,
    provision,
    publish_with_handle,
)
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.simulated import faults
from testbed.simulated.actors import ERRORS, Actors, PublishingTask, pull_one
from testbed.simulated.connection import MOST_DELAY, OWNER, SimulatedConnection, connecting_by_settings
from testbed.simulated.loop import run_simulated, simulated_loop
from testbed.simulated.plan import CLOCK, Plan
from testbed.simulated.server import SimulatedServer
from testbed.simulated.stage import QUEUE, SUBJECTS, Stage
from testbed.simulated.streams import header

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Iterable

    from airflow_provider_jetstream.jetstream import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from testbed.simulated.consumers import Consumer

CONSUMER = "worker"
_WAITS_END_WITHIN = 120.0
_SETTLED_WITHIN = 300.0
_SETTLING_PACE = 10
# Of a world's time: jobs come before and after what goes wrong.
_PUBLISHED_WITHIN = 0.9
# In seconds, the answer to the last look before a reset, the renewal of the lease, and the reset.
_UNSEEN = 4 * MOST_DELAY
# After so many redrives without a change a person looks at what is left.
_PATIENCE = 4
# Of the discards, at the end.
_UNDONE = 0.5


@dataclass
class World(Stage):
    """One world."""

    actors: Actors = field(init=False)

    def __post_init__(self) -> None:
        self.actors = Actors(self)
        self.server.on_reset = self._check_reset
        self.server.on_late_termination = partial(faults.excuse_later_delivery, self)

    # Actors.

    async def publisher(self, name: str, count: int) -> None:
        """Publish a task's jobs, try by try, in another order each time; the task may be cleared, or made again."""
        task = self.actors.tasks.setdefault(name, PublishingTask(name, [f"{name}-{number}" for number in range(count)]))
        if not task.tries:
            await asyncio.sleep(self.draws.of(name, "begins").uniform(0.0, self.plan.seconds * _PUBLISHED_WITHIN))
        await self._publish(task)
        if self.plan.later and not task.is_later:
            await asyncio.sleep(self.draws.of(name, "goes on").uniform(0.0, 5.0))
            task.go_on(self.plan.later)
            self.tell(f"{name} goes on: {self.plan.later}")
            await self._publish(task)

    async def _publish(self, task: PublishingTask) -> None:
        subject = f"{QUEUE}.jobs.{SUBJECTS[int(task.name[1:]) % len(SUBJECTS)]}"
        failed, rng = 0, self.draws.of(task.name, "publishes")
        while True:
            task.tries += 1
            self.account.in_doubt.update(task.bodies)
            jobs = [Job(body.encode(), id=body) for body in rng.sample(task.bodies, len(task.bodies))]
            try:
                async with self.connected() as connection:
                    report = await publish_with_handle(
                        connection, self.queue, jobs, subject=subject, origin=task.origin()
                    )
            except PublishIncompleteError as error:
                failed += not any(failure.certain for failure in error.report.failures)
                if failed and task.is_stored:
                    # What was stored and isn't known any more isn't stored again.
                    return
                if failed == _PATIENCE:
                    # Nobody knows whether they are stored: a person clears the task.
                    self.account.excuse(set(task.bodies))
                    task.clears += 1
            except ERRORS:
                pass
            else:
                stored = dict(zip([job.id or "" for job in jobs], report.sequences, strict=True))
                self.tell(f"{task.name} stored {stored}")
                self._note_stored(task, {body: sequence or 0 for body, sequence in stored.items()}, report.handle)
                return
            await asyncio.sleep(0.2)

    def _note_stored(self, task: PublishingTask, stored: dict[str, int], handle: dict[str, Any] | None) -> None:
        self.account.stored.update(stored)
        self.account.in_doubt.difference_update(stored)
        self.touch(*stored)
        again = {body for body, sequence in stored.items() if sequence not in task.stored[body]}
        forgets = self.plan.full == "events" or "power" in self.plan.kinds
        if task.is_stored and again:
            # The events stream or the queue has forgotten what the task had published.
            self.account.excuse(again)
            if not forgets:
                self.problem(f"a retry of {task.name} stored {sorted(again)} again")
        elif not task.is_stored:
            self.account.rounds.update(again)
            if len(again) < len(stored) and not forgets:
                self.problem(f"{task.name} was to store jobs of its own, and stored only {sorted(again)}")
        for body, sequence in stored.items():
            task.stored[body].add(sequence)
        task.is_stored = True
        self.actors.note_published(
            task.name, handle, {sequence: body for body, sequence in stored.items() if body and sequence}
        )

    async def worker(self, name: str) -> None:
        """Run the package's worker."""

        async def handle(delivery: Delivery) -> None:
            await self._handle(name, delivery)

        settings = connection_settings({"servers": ("nats://simulated:4222",), "timeout": 5})
        consumer, slots = self._consumer_of(name), self.draws.of(name).randint(1, 3)
        await Worker(self.queue, consumer, handle, settings, concurrency=slots, name=name).run()

    def _check_start(self, sequence: int, body: str) -> None:
        if body not in self.account.again:
            self.check_discarded([sequence], self.discarded, "delivered")
        self.account.running[body] += 1
        self.touch(body)

    def _consumer_of(self, name: str) -> str:
        return self.queue.consumers[int(name.partition(" ")[2]) % len(self.queue.consumers)].name

    async def _handle(self, worker: str, delivery: Delivery) -> None:
        body = delivery.body.decode()
        self._check_start(delivery.sequence, body)
        rng = self.draws.of("attempt", body)
        chance = 1.0 if self.settling else rng.random()
        try:
            await asyncio.sleep(rng.uniform(0.0, self.plan.pace))
            if chance < self.plan.terminates + self.plan.fails:
                self.actors.note_failed(body)
            if chance < self.plan.terminates:
                self.account.given_up.add(delivery.sequence)
                self.tell(f"{worker} gives {body} up, {delivery.sequence}, attempt {delivery.attempt}")
                raise GiveUpError("broken")
            if chance < self.plan.terminates + self.plan.fails:
                self.tell(f"{worker} fails with {body}, {delivery.sequence}, attempt {delivery.attempt}")
                raise ValueError("failed")
            self.account.done[body] += 1
            self.actors.note_done(body)
            self.account.ends[delivery.sequence] = body
            self.touch(body)
            self.tell(f"{worker} does {body}, {delivery.sequence}, attempt {delivery.attempt}")
        finally:
            self.account.running[body] -= 1

    async def foreign(self, name: str) -> None:
        """Do jobs as a program in another language does: without completions, and at times longer than it may."""
        while True:
            async with self.connected() as connection:
                while True:
                    reply, body = await pull_one(connection, QUEUE, self._consumer_of(name))
                    if reply:
                        await self._do_as_foreign(connection, name, reply, body)

    async def _do_as_foreign(self, connection: SimulatedConnection, name: str, reply: str, body: str) -> None:
        self._check_start(int(reply.split(".")[5]), body)
        try:
            rng = self.draws.of("attempt", body)
            outlasts = not self.settling and rng.random() < self.plan.outlasts
            late = self.plan.ack_wait * rng.uniform(1.0, 3.0) if outlasts else 0.0
            await asyncio.sleep(rng.uniform(0.0, 0.2) + late)
            answer = self._foreign_answer(rng, outlasts=outlasts)
            if outlasts or answer != b"+ACK":
                self.actors.note_failed(body)
            if answer.startswith(b"+TERM"):
                self.account.given_up.add(int(reply.split(".")[5]))
            elif answer == b"+ACK":
                self.account.done[body] += 1
                self.actors.note_done(body)
                self.account.ends[int(reply.split(".")[5])] = body
                # What the server publishes for a stream without a leader is dropped.
                if outlasts or self.account.without_metrics or not self.server.streams[f"{QUEUE}-events"].led:
                    self.account.unproved.add(body)
            if outlasts and (answer == b"+ACK" or self.account.running[body] > 1 or self.plan.full == "events"):
                # Whoever has it meanwhile does it, too, or can't say that it is done; or the events drop that it is.
                self.account.excuse({body})
            self.touch(body)
            self.tell(f"{name} answers {answer.decode()} to {body}, {reply}{', too late' if outlasts else ''}")
            if (other := self.server.streams[QUEUE].messages.get(int(reply.split(".")[5]))) and answer == b"+ACK":
                # After a loss of power it may be another job that this ends.
                self.account.removed |= {other.data.decode()} - {body}
            await connection.request(reply, answer)
            if answer.startswith(b"+TERM"):
                self.account.terminated[body] = int(reply.split(".")[5])
        finally:
            self.account.running[body] -= 1

    def _foreign_answer(self, rng: random.Random, *, outlasts: bool) -> bytes:
        """Draw how an attempt ends: one that took too long in any way."""
        chance, answers = rng.random(), (b"+TERM broken", b"-NAK", b"+ACK")
        if outlasts:
            return rng.choice(answers)
        if self.settling or chance >= self.plan.terminates + self.plan.fails:
            return b"+ACK"
        return answers[chance >= self.plan.terminates]

    async def scanner(self, name: str) -> None:
        """Look for dead letters again and again: none of them is done."""
        rng = self.draws.of(name)
        while True:
            await self._pause(rng)
            done, died, handled = self._surely_done(), self.died, frozenset(self.account.handled)
            discarded = self.discarded
            with suppress(*ERRORS):
                async with self.connected() as connection:
                    found = await find_dead_letters(connection, self.queue)
                self.account.counts["scans"] += 1
                self.tell(f"{name} finds {[letter.sequence for letter in found.letters]}, {found.uncertain} uncertain")
                self.check_discarded([letter.sequence for letter in found.letters], discarded, "called dead")
                for letter in found.letters:
                    body = letter.body.decode()
                    if done.get(letter.sequence) == body == self._surely_done().get(letter.sequence):
                        self.problem(f"{letter.sequence} ({body}) is called dead, and was done")
                    if letter.sequence in handled and body not in self.account.unproved:
                        self.problem(f"{letter.sequence} ({body}) is called dead, and was handled")
                    self.check_death(letter.sequence, "called dead", died, letter.body)
                # A full dead letter queue stores no advisory: then jobs in flight leave open which ones died.
                if found.uncertain and self.is_calm and not self.plan.clocks and self.plan.full != "dead_letters":
                    self.problem(f"{found.uncertain} jobs are uncertain in a calm world")

    async def _pause(self, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0.1, 2.0) * (_SETTLING_PACE if self.settling else 1))

    async def accountant(self, name: str) -> None:
        """Make accounts again and again: no job is gone without evidence."""
        rng = self.draws.of(name)
        while True:
            await self._pause(rng)
            await self.make_account(name)

    async def make_account(self, name: str) -> JobAccount | None:
        """Make an account, and compare it with what really happened."""
        done, discarded = self._surely_done(), self.discarded
        with suppress(*ERRORS):
            async with self.connected() as connection:
                account = await account_for_jobs(connection, self.queue)
            self.account.counts["accounts"] += 1
            self.tell(f"{name} accounts {account.unaccounted} {account.unknown}")
            if (account.unaccounted or account.unknown) and self.is_calm and not self.plan.full:
                self.problem(f"{account.unaccounted} {account.unknown} are unaccounted in a calm world")
            self.check_discarded(account.unaccounted_jobs, discarded, "called unaccounted")
            for first, last in account.unaccounted:
                for sequence in range(first, last + 1):
                    if sequence in done and sequence in self._surely_done():
                        self.problem(f"{sequence} ({done[sequence]}) is called unaccounted, and was done")
            return account
        return None

    async def redriver(self, name: str) -> None:
        """Redrive again and again."""
        rng = self.draws.of(name)
        while True:
            await asyncio.sleep(rng.uniform(0.1, self.plan.seconds / 2))
            with suppress(*ERRORS):
                await self.redrive(name, self.actors.redrive_request(rng))

    @override
    def kill(self, name: str) -> None:
        """Kill an actor and run it anew: what it was about to send is never sent."""
        self.excuse_running()
        # Its connections die with it, before anything that it does when it is cancelled.
        for connection in list(self.connections):
            if connection.owner == name:
                connection.close()
        self.tasks.pop(name).cancel()
        self._start(name)

    def _start(self, name: str) -> None:
        kind, _, number = name.partition(" ")
        publishers = [f"p{index}" for index, count in enumerate(self.plan.jobs) if count]
        actors: dict[str, Callable[[], Awaitable[None]]] = {
            "worker": lambda: self.worker(name),
            "foreign": lambda: self.foreign(name),
            "scanner": lambda: self.scanner(name),
            "accountant": lambda: self.accountant(name),
            "redriver": lambda: self.redriver(name),
            "waiter": lambda: self.actors.waiter(name, publishers[int(number) % len(publishers)]),
            "watcher": lambda: self.actors.watcher(name),
            "operator": lambda: self.actors.operator(name),
            "tidier": lambda: self.actors.tidier(name),
            "handler": lambda: self.actors.handler(name),
            "publisher": lambda: self.publisher(f"p{number}", self.plan.jobs[int(number)]),
        }

        async def run() -> None:
            OWNER.set(name)
            while True:
                with suppress(*ERRORS):
                    await actors[kind]()
                    if kind in ("publisher", "waiter"):
                        return
                await asyncio.sleep(0.5)

        self.tasks[name] = self.server.loop.create_task(run(), name=name)

    # The judge.

    def _surely_done(self) -> dict[int, str]:
        """Return the jobs that are done and gone, and of whose end the server has evidence."""
        stored, unproved = self.server.streams[QUEUE].messages, self.account.unproved
        return {job: body for job, body in self.account.ends.items() if job not in stored and body not in unproved}

    def _check_reset(self, consumer: Consumer, sequences: list[int]) -> None:
        """Check that what a reset delivers again is recorded before.

        Nobody sees an edit that the server makes between the last look at the consumer and the reset.
        """
        if self.server.loop.time() - self.account.edited.get(consumer.name, -_UNSEEN) < _UNSEEN:
            return
        audit = self.server.streams[f"{QUEUE}-audit"]
        for sequence in sequences:
            record = audit.last_of(f"audit.{QUEUE}.letters.{sequence}")
            if record is None or b'"action":"requeue' not in record.data:
                self.problem(f"{sequence} is delivered again by a reset, which no record says")

    async def live(self) -> None:
        """Run the actors, then settle, and judge."""
        names = [f"worker {number}" for number in range(max(self.plan.workers, self.plan.consumers))]
        names += [f"foreign {number}" for number in range(self.plan.foreign)]
        names += ["scanner", "accountant", "redriver", "redriver 2"]
        names += [f"publisher {number}" for number, count in enumerate(self.plan.jobs) if count]
        waits = [f"waiter {number}" for number in range(self.plan.waits)]
        names += [*waits, *(f"watcher {number}" for number in range(self.plan.watchers))]
        names += [f"operator {number}" for number in range(self.plan.people)]
        names += [f"tidier {number}" for number in range(self.plan.tidiers)]
        names += [f"handler {number}" for number in range(self.plan.handlers)]
        for name in names:
            self._start(name)
        breaking = asyncio.create_task(faults.play_faults(self))
        await asyncio.sleep(self.plan.seconds)
        await self._end(breaking)
        await self._repair()
        for name in [name for name in names if name.startswith("publisher")]:
            if name in self.tasks:
                await self.tasks[name]
        await self._end(
            *[self.tasks.pop(name) for name in names if name.startswith(("redriver", "operator", "tidier"))]
        )
        await self._settle()
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAITS_END_WITHIN):
                await asyncio.gather(*[self.tasks[name] for name in waits])
        await self._end(*self.tasks.values())
        self._judge()
        self.actors.judge(waits)

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _repair(self) -> None:
        """End what is broken, and give each stream room: a queue that is full of dead letters takes no job."""
        if not self.server.is_up:
            self.server.start()
        for stream in self.server.streams.values():
            stream.led = True
        for connection in self.connections:
            self.restore(connection)
        self.queue = _declared(self.plan, is_full=False)
        if self.plan.full:
            # Where another tool has changed the queue, provisioning asks for more than that first.
            async with self.connected() as connection:
                name = f"{QUEUE}-{self.plan.full.replace('dead_letters', 'dead')}".removesuffix("-queue")
                config = (await connection.api(f"STREAM.INFO.{name}", {}))["config"]
                await connection.api(f"STREAM.UPDATE.{name}", config | {"max_msgs": -1})

    async def _settle(self) -> None:
        """Let everything end: redrive, and have a person bring back what nobody else may."""
        self.settling = True
        self.tell("settling")
        await self.actors.compare_watchers()
        rng = self.draws.of("undone")
        discards = [discard for discard in self.actors.discards() if rng.random() < _UNDONE]
        account: JobAccount | None = None
        until, left, rounds = self.server.loop.time() + _SETTLED_WITHIN, frozenset[str](), 0
        while self.server.loop.time() < until:
            with suppress(*ERRORS):
                async with self.connected() as connection:
                    await provision(connection, self.queue)
            with suppress(*ERRORS):
                await self.redrive("settling")
            for discard in discards:
                with suppress(*ERRORS):
                    await self.redrive("settling", RedriveRequest(undo=discard))
            if self.plan.people or self.plan.tidiers:
                with suppress(*ERRORS):
                    await self.redrive("settling", RedriveRequest(Selection(parked=True)))
            await asyncio.sleep(2 * self.plan.ack_wait)
            now = frozenset((*map(str, self._jobs_left()), *self._missing()))
            rounds = rounds + 1 if now == left else 0
            left = now
            if not left:
                break
            if rounds >= _PATIENCE and not any(self.account.running.values()):
                account = await self.make_account("a person") or account
                with suppress(*ERRORS):
                    await self._bring_back(account)
        for _ in range(_PATIENCE):
            if account := await self.make_account("settled"):
                break
        self._check_deleted(account)
        await self._check_lost(account)
        if self.plan.tidiers:
            self.actors.check_discards(account)
            await self.actors.check_waits()

    async def _bring_back(self, account: JobAccount | None) -> None:
        """Redrive what is left by its sequences, as a person does who has looked at it."""
        named, missing = set(self._jobs_left()), self._missing()
        with suppress(*ERRORS):
            async with self.connected() as connection:
                found = await find_dead_letters(connection, self.queue)
            undecided = {job.sequence: job.status for job in found.dismissed if self._is_undecided(job, missing)}
            named |= {sequence for sequence, status in undecided.items() if status is Status.UNCERTAIN}
            # Redrives set those aside whose new job may have run.
            named |= await self._redrive_foreign([one for one in found.letters if one.body.decode() in missing])
            if unaccounted := {sequence for sequence, status in undecided.items() if status is Status.UNACCOUNTED}:
                self.tell(f"a person names {sorted(unaccounted)}, which are unaccounted for")
                self.excuse_running()
                selection = Selection(sequences=sorted(unaccounted), unaccounted=True)
                await self.redrive("a person", RedriveRequest(selection))
            for sequence in undecided:
                missing -= self.actors.bodies_of(sequence)
            if found.undeliverable:
                await self._redrive_undeliverable()
        if account:
            copies = self.server.streams[f"{QUEUE}-archive"].messages.values()
            of_bodies = {int(header(copy.headers, "Nats-Sequence") or 0): copy for copy in copies}
            for sequence, copy in of_bodies.items():
                body = copy.data.decode()
                if body not in missing:
                    continue
                if sequence in account.unaccounted_jobs:
                    named.add(sequence)
                elif _names(account.unknown, sequence):
                    self.tell(f"a person publishes {body} again")
                    missing.discard(body)
                    async with self.connected() as connection:
                        await connection.publish_acknowledged(self.subjects[0], copy.data)
        if named:
            self.tell(f"a person names {sorted(named)}")
            self.account.counts["named by a person"] += len(named)
            self.excuse_running()
            await self._redrive_named(sorted(named))

    async def _redrive_foreign(self, letters: list[DeadLetter]) -> set[int]:
        """Give the subject of letters that another tool has moved, where only records are left; return the others."""
        for letter in letters:
            if letter.foreign_subject:
                selection = Selection(sequences=[letter.sequence])
                await self.redrive("a person", RedriveRequest(selection, subject=letter.subject))
        return {letter.sequence for letter in letters if not letter.foreign_subject}

    async def _redrive_undeliverable(self) -> None:
        """Another tool has moved their subject, and no consumer may get it back while they are there.

        Where every subject is such a one, they are parked until provisioning has given it back.
        """
        undeliverable = Selection(reasons=[Reason.UNDELIVERABLE])
        filters = [one.config.get("filter_subjects", ()) for one in self.server.streams[QUEUE].consumers.values()]
        taken = [subject for subject in self.subjects if any(subject in of for of in filters)]
        if taken:
            await self.redrive("a person", RedriveRequest(undeliverable, subject=taken[0]))
            return
        await self.redrive("a person", RedriveRequest(undeliverable, max_redrives=0))
        async with self.connected() as connection:
            await provision(connection, self.queue)
        await self.redrive("a person", RedriveRequest(Selection(parked=True, reasons=[Reason.UNDELIVERABLE])))

    async def _redrive_named(self, sequences: list[int]) -> None:
        try:
            await self.redrive("a person", RedriveRequest(Selection(sequences=sequences)))
        except DeadLetterGoneError:
            # Some of them are to be left out.
            for sequence in sequences:
                with suppress(*ERRORS):
                    await self.redrive("a person", RedriveRequest(Selection(sequences=[sequence])))

    def _is_undecided(self, job: NotDead, missing: set[str]) -> bool:
        """Return whether a job that the scan can't decide about is one that is to be done yet."""
        return job.status in (Status.UNCERTAIN, Status.UNACCOUNTED) and bool(
            self.actors.bodies_of(job.sequence) & missing
        )

    def _missing(self, *, even_lost: bool = False) -> set[str]:
        """Return the bodies that are to be done yet, but for those of which every copy was removed.

        The archive has the limits of its queue, and no copies of what is published while the queue doesn't republish,
        or just before a loss of power.

        :param even_lost: whether to return those too that a scan or an account is to name
        """
        missing = {body for body in self.account.stored if self.account.done[body] < self.account.rounds[body]}
        missing -= self.account.removed | self.actors.cancelled
        for sequence in self.discarded:
            missing -= self.actors.bodies_of(sequence)
        if self.account.without_copies:
            missing -= self.account.terminated.keys()
        if self.plan.full == "queue":
            missing -= (self.account.terminated.keys() | self.account.again) - self.bodies_stored()
        return missing if even_lost else missing - self._lost().keys()

    def _lost(self) -> dict[str, int]:
        """Return the bodies of whose last jobs a loss of power has taken the only copy, and these jobs' sequences."""
        if "power" not in self.plan.kinds:
            return {}
        queue = self.server.streams[QUEUE]
        last = {body.decode(): sequence for sequence, body in queue.history.items()}
        return {
            body: last[body]
            for body in sorted(self._missing(even_lost=True) & last.keys())
            if last[body] not in queue.messages and body not in self.actors.bodies_of(last[body])
        }

    async def _check_lost(self, account: JobAccount | None) -> None:
        """Check that a scan names them, or an account where their entries are lost, too."""
        if lost := self._lost():
            async with self.connected() as connection:
                found = await find_dead_letters(connection, self.queue)
            named = {job.sequence for job in found.dismissed if job.status in (Status.LOST, Status.UNCERTAIN)}
            ranges = (*account.unaccounted, *account.unknown) if account else ()
            for body, sequence in lost.items():
                if sequence not in named and not _names(ranges, sequence):
                    self.problem(f"{sequence} ({body}) has no copy any more, and neither scan nor account names it")

    def _check_deleted(self, account: JobAccount | None) -> None:
        if account is None:
            return
        for sequence in sorted(self.account.deleted):
            if not _names((*account.unaccounted, *account.unknown), sequence):
                self.problem(f"{sequence} was removed by hand, and the account doesn't name it")

    def _judge(self) -> None:
        for body in sorted(self._missing()):
            self.problem(f"{body} was lost")
        for body in sorted(self.account.stored - self.actors.cancelled):
            count = self.account.done[body]
            if count > self.account.rounds[body] and body not in self.account.again:
                self.problem(f"{body} was done {count} times")
        if left := self._jobs_left():
            self.problem(f"{left} are still stored")

    def _jobs_left(self) -> list[int]:
        messages = self.server.streams[QUEUE].messages.values()
        left = [message.sequence for message in messages if message.subject.startswith(f"{QUEUE}.jobs.")]
        # A handled job stays where nothing but an acknowledged entry says that it is handled.
        return [sequence for sequence in left if sequence not in self.account.handled]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    seed: int
    plan: Plan
    problems: tuple[str, ...]
    counts: Counter[str]
    story: tuple[str, ...]


def _names(ranges: Iterable[tuple[int, int]], sequence: int) -> bool:
    return any(first <= sequence <= last for first, last in ranges)


def _declared(plan: Plan, *, is_full: bool) -> WorkQueue:
    """Return the world's queue.

    :param is_full: whether one of its streams takes few messages
    """
    subjects = [f"{QUEUE}.jobs.{token}" for token in SUBJECTS]
    names = [CONSUMER, "other"][: plan.consumers]
    shares = [subjects[:2], subjects[2:]] if plan.consumers > 1 else [[]]
    few = {"max_msgs": plan.room if is_full else -1, "discard": "old" if plan.full == "events" else "new"}
    limits: dict[str, dict[str, Any]] = {plan.full: few} if plan.full else {}
    return WorkQueue(
        name=QUEUE,
        subjects=[f"{QUEUE}.jobs.>"],
        consumers=[
            {
                "name": name,
                "filter_subjects": filters,
                "max_deliver": plan.max_deliver,
                "ack_wait": f"{plan.ack_wait:g}s",
                "sample_freq": "100%",
            }
            for name, filters in zip(names, shares, strict=True)
        ],
        dead_letters={
            "name": f"{QUEUE}-dead",
            **({"retention": "workqueue"} if plan.handlers else {}),
            **({"keep": {name: f"{age:g}s" for name, age in plan.keep.items()}} if plan.keep else {}),
            **limits.get("dead_letters", {}),
        },
        events={"name": f"{QUEUE}-events", **limits.get("events", {})},
        archive=True,
        audit=limits.get("audit") or True,
        **limits.get("queue", {}),
    )


def drawn_plan(seed: int, *, calm: bool = False) -> Plan:
    """Return the plan that a seed makes."""
    return Plan.draw(random.Random(f"plan {seed}"), calm=calm)  # noqa: S311


def play_world(seed: int, *, calm: bool = False, plan: Plan | None = None) -> Outcome:
    """Play one world.

    :param plan: the one that the seed makes where absent
    """
    plan = plan or drawn_plan(seed, calm=calm)

    async def play() -> Outcome:
        server = SimulatedServer(plan.version, plan.clocks)
        queue = _declared(plan, is_full=True)
        world = World(plan, simulated_loop().draws, server, queue)
        world.filters = {consumer.name: set(consumer.filter_subjects) for consumer in queue.consumers}
        async with world.connected() as connection:
            await provision(connection, queue)
        if plan.clocks:
            # What another server's clock dates before the queue's creation is about an earlier queue.
            await asyncio.sleep(2 * CLOCK)
        with connecting_by_settings(world.connected):
            await world.live()
        counts = world.account.counts
        counts["jobs"] = len(world.account.stored)
        return Outcome(seed, plan, tuple(world.account.problems), counts, (str(plan), *world.story))

    return run_simulated(play, seed)
