"""A queue on a real server beside its model: each step is done on the server, and the model checks what comes of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from modelled_looks import ModelledLooks, sequences_of
from nats.aio.msg import Msg
from nats.js.errors import APIError
from queue_model import GONE_OR_DEAD, ModelError, QueueModel, State

from airflow_provider_jetstream.jetstream import (
    Selection,
    WorkQueue,
    account_for_jobs,
    find_dead_letters,
    get_message,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.dead_letters import change_stream
from testbed.face import NatsPyConnection, summarise_dead_letters
from testbed.foreign_programs import attempt_of, pull, sequence_of
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, small_queue, stored_count
from testbed.redrivers import RedriveOutcome, Redrivers, redrive_request
from testbed.tcp_proxy import TcpProxy

ACK_WAIT = 1.0
KINDS = ("a", "b")
_ANSWERS = {"ack": b"+ACK", "nak": b"-NAK", "term": b"+TERM poison"}
_REQUESTS: Mapping[str, dict[str, Any]] = {
    "auto": {},
    "copy": {"protocol": "copy"},
    "in place": {"protocol": "in_place"},
    "park": {"max_redrives": 0},
    "unpark": {"selection": {"parked": True}},
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the queues of one test share.

    :param connection: that of workers and of people who change streams
    :param product: that of scans and redrives, through the proxy
    """

    server: NatsServer
    connection: NatsPyConnection
    product: NatsPyConnection
    proxy: TcpProxy
    forking: Redrivers


@dataclass(slots=True)
class ModelledQueue:
    """One queue and its model; make it with :meth:`create`.

    :param held: the deliveries that a worker has, by body
    :param limited: the configurations of streams that are full, before they were
    :param evidence_lost: whether there may be no evidence of how some jobs ended: then people have to decide
    """

    environment: Environment
    queue: WorkQueue
    model: QueueModel
    held: dict[str, Msg] = field(default_factory=dict)
    limited: dict[str, dict[str, Any]] = field(default_factory=dict)
    sourced: bool = False
    evidence_lost: bool = False
    deleted: bool = False
    looks: ModelledLooks = field(default_factory=ModelledLooks)
    _published: int = 0

    @classmethod
    async def create(cls, environment: Environment, name: str, *, max_deliver: int) -> "ModelledQueue":
        """Provision a queue."""
        consumer = {"ack_wait": f"{ACK_WAIT:g}s", "max_deliver": max_deliver, "sample_freq": "100%"}
        queue = small_queue(name, consumer=consumer)
        await provision(environment.connection, queue)
        return cls(environment, queue, QueueModel(max_deliver, ACK_WAIT))

    async def publish(self, count: int, kind: str) -> None:
        """Publish jobs; a full queue refuses them."""
        jetstream = self.environment.connection.client.jetstream()
        for _ in range(count):
            self._published += 1
            body = f"{kind}{self._published}"
            with suppress(APIError):
                ack = await jetstream.publish(f"{self.queue.name}.jobs.{kind}", body.encode())
                self.model.published(body, ack.seq)

    async def work(self, count: int, answer: str) -> None:
        """Pull jobs, and answer each: ``ack``, ``nak``, ``term``, or ``hold`` for no answer yet."""
        self.model.lapse()
        client = self.environment.connection.client
        async for message in pull(client, self.queue.name, CONSUMER, batch=count, expires=0.1):
            body = message.data.decode()
            self.model.delivered(body, sequence_of(message))
            self.held[body] = message
            await self.answer(body, answer)

    async def answer(self, body: str, answer: str) -> None:
        """Answer a delivery that a worker has."""
        if answer == "hold":
            return
        message = self.held.pop(body)
        await self.environment.connection.request(message.reply, _ANSWERS[answer])
        if answer == "ack":
            self.model.acknowledged(body)
        elif answer == "nak":
            self.model.failed(body, attempt_of(message))
        else:
            self.model.terminated(body)

    async def keep_held(self) -> None:
        """Prolong the ack wait of all that a worker has, for ever."""
        prolonged_at = time.monotonic()
        while True:
            if time.monotonic() - prolonged_at > 0.6 * ACK_WAIT:
                # On a machine that is too busy the ack wait may have passed.
                self.kill_worker()
            prolonged_at = time.monotonic()
            for message in list(self.held.values()):
                await self.environment.connection.client.publish(message.reply, b"+WPI")
            await asyncio.sleep(ACK_WAIT / 5)

    def kill_worker(self) -> None:
        """End the worker that has jobs, without an answer."""
        for body, message in self.held.items():
            self.model.abandoned(body, attempt_of(message))
        self.held.clear()

    async def find(self) -> None:
        """Scan for letters, and check them."""
        queue, product = self.queue, self.environment.product
        if self.evidence_lost:
            await self.summarise()
        self.model.lapse()
        parked = None
        if self.model.in_state(State.PARKED) or self.model.cut_off_bodies():
            parked = (await find_dead_letters(product, queue, Selection(parked=True))).letters
        found = await find_dead_letters(product, queue)
        listed = {letter.sequence for letter in found.letters}
        out_of_circulation = None if parked is None else {letter.sequence for letter in parked}
        gone = await self._gone_without_evidence()
        self.model.scanned(listed, found.uncertain + gone, out_of_circulation)
        await self.looks.compare(product, queue, self.model, gone)

    async def summarise(self) -> None:
        """Count letters, copy their bodies, and check the counts."""
        self.model.lapse()
        summary = await summarise_dead_letters(self.environment.product, self.queue)
        self.model.scanned(sequences_of(summary), summary.uncertain + await self._gone_without_evidence())

    async def _gone_without_evidence(self) -> int:
        """Count the jobs that only an account names, where there may be any."""
        if not self.evidence_lost:
            return 0
        account = await account_for_jobs(self.environment.product, self.queue)
        return account.unaccounted_count + account.unknown_count

    async def redrive(self, how: str, kind: str | None = None, kill_at: int | None = None) -> None:
        """Redrive in this process, or in one that is killed in place of one of its changes."""
        request, bodies = self._request(how, kind)
        if kill_at is not None:
            outcome = await self.environment.forking.redrive(self.queue, request, kill_at=kill_at)
        else:
            outcome = await self._redrive_here(request)
        self._note(outcome, how, kind, bodies)

    async def redrive_at_once(self, hows: Collection[str], kills: Mapping[str, int]) -> None:
        """Redrive in several processes at once, some of which are killed."""
        requests = {how: self._request(how, None) for how in hows}
        redrive = self.environment.forking.redrive
        outcomes = await asyncio.gather(
            *(redrive(self.queue, requests[how][0], kill_at=kills.get(how)) for how in requests)
        )
        # The reports first: what a killed one may have done, another may have finished.
        for (how, (_, bodies)), outcome in sorted(
            zip(requests.items(), outcomes, strict=True), key=lambda pair: bool(pair[1].report)
        ):
            self._note(outcome, how, None, bodies, alone=False)

    async def redrive_cut(self, how: str, after: float, seconds: float) -> None:
        """Redrive while the connection is cut for a while."""
        request, bodies = self._request(how, None)
        task = asyncio.create_task(self._redrive_here(request))
        await asyncio.sleep(after)
        self.environment.proxy.pause()
        await asyncio.sleep(seconds)
        self.environment.proxy.resume()
        self._note(await task, how, None, bodies)

    async def delete_job(self) -> None:
        """Delete a job that waits, if there is one."""
        waiting = [job.body for job in self.model.jobs.values() if job.possible == {State.WAITING} and not job.cut_off]
        sequence = self.model.last_sequence(waiting[0]) if waiting else 0
        # A redrive that was killed doesn't say which sequence the copy has.
        if sequence and await get_message(self.environment.connection, self.queue.name, sequence):
            await self.environment.connection.api(f"STREAM.MSG.DELETE.{self.queue.name}", {"seq": sequence})
            self.model.deleted(waiting[0])
            self.evidence_lost = self.deleted = True

    async def recreate_consumer(self) -> None:
        """Delete the consumer and create it anew, unless it would deliver done jobs that a source waits for."""
        connection = self.environment.connection
        if not await self._is_sourced():
            return
        self.held.clear()
        await connection.api(f"CONSUMER.DELETE.{self.queue.name}.{CONSUMER}")
        await provision(connection, self.queue)
        self.model.redelivered_from_the_start()

    async def pause(self, *, paused: bool) -> None:
        """Pause or resume the consumer."""
        until = (datetime.now(UTC) + timedelta(minutes=10)).isoformat().replace("+00:00", "Z")
        body = {"pause_until": until} if paused else {}
        await self.environment.connection.api(f"CONSUMER.PAUSE.{self.queue.name}.{CONSUMER}", body)

    async def fill(self, stream: str) -> None:
        """Make a stream refuse messages from now on."""
        connection = self.environment.connection
        count = await stored_count(connection, stream)
        if stream not in self.limited and count:
            limited = await change_stream(connection, stream, max_msgs=count, discard="new")
            self.evidence_lost |= stream == f"{self.queue.name}-dead"
            self.limited[stream] = {"max_msgs": limited["max_msgs"], "discard": limited["discard"]}

    async def make_room(self) -> None:
        """Make all streams take messages again."""
        for stream, before in self.limited.items():
            await change_stream(self.environment.connection, stream, **before)
        self.limited.clear()

    async def source(self, *, sourced: bool) -> None:
        """Create a stream that sources the queue, or delete it unless jobs that are done wait for it."""
        stream = f"{self.queue.name}-sourced"
        if sourced and not self.sourced:
            config = {"name": stream, "sources": [{"name": self.queue.name}]}
            await self.environment.connection.api(f"STREAM.CREATE.{stream}", config)
            await eventually(self._has_source)
        elif self.sourced and not sourced:
            if not await self._is_sourced():
                return
            await self.environment.connection.api(f"STREAM.DELETE.{stream}")
        self.sourced = sourced

    async def _has_source(self) -> bool:
        return bool(await self._sourcing())

    async def _sourcing(self) -> list[dict[str, Any]]:
        """Return the consumers of streams that source the queue."""
        listed = (await self.environment.connection.api(f"CONSUMER.LIST.{self.queue.name}"))["consumers"] or ()
        return [info for info in listed if info["config"].get("sourcing") or info["config"].get("direct")]

    async def _is_sourced(self) -> bool:
        """Return whether a stream that sources the queue has all that it stores, or there is none."""
        sourcing = await self._sourcing()
        behind = [info for info in sourcing if info["num_pending"] or info["num_ack_pending"]]
        return not self.sourced or bool(sourcing and not behind)

    async def restart_server(self, *, kill: bool) -> None:
        """Restart the server in order, or kill it; the workers end."""
        environment = self.environment
        # The ack wait of what a worker has may pass while no server takes its signals.
        self.kill_worker()
        if kill:
            environment.server.kill()
            self.evidence_lost = True
            self.model.server_killed()
        await asyncio.to_thread(environment.server.restart)
        await eventually(lambda: environment.connection.client.is_connected, within=20)
        await eventually(lambda: environment.product.client.is_connected, within=20)

    async def settle(self) -> None:
        """End all that is out of order, then redrive and work until every job is done."""
        await self.pause(paused=False)
        await self.make_room()
        self.kill_worker()
        await asyncio.sleep(1.3 * ACK_WAIT)

        decided_from = time.monotonic() + 4

        async def settled() -> bool:
            await self.find()
            for how in ("auto", "unpark"):
                await self.redrive(how)
            await self.work(100, "ack")
            found = await find_dead_letters(self.environment.product, self.queue)
            if self.evidence_lost and time.monotonic() > decided_from and await self._unaccounted():
                await self._decide()
            await asyncio.sleep(0.2)
            return not (self.model.problems() or found.letters or found.uncertain)

        with suppress(TimeoutError):
            await eventually(settled, within=90)
        found = await find_dead_letters(self.environment.product, self.queue)
        problems = [*self.model.problems(), *(f"dead letter {letter.sequence}" for letter in found.letters)]
        if problems or found.uncertain:
            raise ModelError(
                f"in the end {found.uncertain} uncertain ({await self._unaccounted()}), {'; '.join(problems)};"
                f" {'; '.join(map(str, found.risks))}; {', '.join(map(str, self.model.jobs.values()))}"
            )

    async def _unaccounted(self) -> tuple[tuple[int, int], ...]:
        return (await account_for_jobs(self.environment.product, self.queue)).unaccounted

    async def _decide(self) -> None:
        """Do what people do about unaccounted jobs, who know from the workers which are done."""
        undone = [job for job in self.model.jobs.values() if not job.done and job.possible & GONE_OR_DEAD]
        for job in undone:
            sequence = self.model.last_sequence(job.body)
            outcome = await self._redrive_here({"selection": {"sequences": [sequence]}})
            self._note(outcome, "copy", job.body[0], [job.body])
        for job in self.model.jobs.values():
            if job.done:
                subject = f"handled.{self.queue.name}.{self.model.last_sequence(job.body)}"
                await self.environment.connection.client.jetstream().publish(subject, b"{}")

    def _request(self, how: str, kind: str | None) -> tuple[dict[str, Any], list[str]]:
        """Return a request, and the bodies of the jobs that it may be about."""
        request = dict(_REQUESTS[how])
        dead = (State.PARKED,) if how == "unpark" else (State.DEAD, State.TERMINATED, State.DELETED)
        self.model.lapse()
        bodies = {*self.model.in_state(*dead), *self.model.cut_off_bodies()}
        if kind and how not in ("in place", "unpark"):
            request["selection"] = {"subject": f"{self.queue.name}.jobs.{kind}"}
            bodies = {body for body in bodies if body.startswith(kind)}
        return request, sorted(bodies)

    async def _redrive_here(self, request: Mapping[str, Any]) -> RedriveOutcome:
        try:
            report = await redrive_dead_letters(self.environment.product, self.queue, redrive_request(request))
        except JetStreamProviderError as error:
            return RedriveOutcome(error=str(error))
        return RedriveOutcome(report=report.as_json(), redriven=report.redriven, parked=report.parked)

    def _note(
        self, outcome: RedriveOutcome, how: str, kind: str | None, bodies: Collection[str], *, alone: bool = True
    ) -> None:
        if outcome.report:
            bodies = self.model.bodies(map(int, outcome.report["failures"]))
        self.model.cut_off(bodies, State.PARKED if how == "park" else State.WAITING)
        if outcome.report:
            self.model.redriven(outcome.redriven, outcome.parked)
        if outcome.complete and alone and not kind and how != "unpark" and not outcome.report["uncertain"]:
            self.model.finished(evidence_lost=self.evidence_lost)


@asynccontextmanager
async def modelled_queue(environment: Environment, name: str, *, max_deliver: int) -> AsyncIterator[ModelledQueue]:
    """Provision a queue whose worker keeps what it has."""
    modelled = await ModelledQueue.create(environment, name, max_deliver=max_deliver)
    keeping = asyncio.create_task(modelled.keep_held())
    try:
        yield modelled
    finally:
        keeping.cancel()
