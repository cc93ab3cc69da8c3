"""Random steps of publishers, workers, redrives and faults on a real server, compared with a plain model of each job.

No scan lists a job as a dead letter that is alive, done or parked, and each dead one is listed or counted as uncertain.
At the end all letters are redriven, and each job was done once: none was lost, none was done twice.

What the model allows beyond that, since a queue can't prevent it:

- A server that is killed forgets what its consumers did just before: a death may be undone, a job that waited may be
  dead again. What a worker has finished stays finished.
- While a redrive that was cut off isn't followed by one that finished, a job of it may be listed as a dead letter
  though its copy waits or is done.
- Where evidence may be lost (a server that was killed, a full dead letter queue, a job that was deleted), people decide
  about uncertain jobs in the end: they name those to redrive, and report the others as handled.
- Whoever deletes a stream that sources the queue, or creates the queue's consumer anew, waits until the source has what
  is done: until then the server keeps it, and delivers it to a new consumer.

The short form has fixed examples, ``FAULTS=full`` new ones for ten minutes. No example is shrunk, since times differ.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from modelled_queue import KINDS, Environment, ModelledQueue, modelled_queue

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.nats_server import NatsServer
from testbed.redrivers import redrivers
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

FULL = os.environ.get("FAULTS") == "full"
FULL_SECONDS = float(os.environ.get("FAULTS_SECONDS", "600"))
EXAMPLES, STEPS = 4, 20

REDRIVES = ("auto", "copy", "in place", "park")
answers = st.sampled_from(["ack", "nak", "nak", "term", "hold"])
kinds = st.sampled_from([None, None, *KINDS])
redrives = st.sampled_from(REDRIVES)


class QueueMachine(RuleBasedStateMachine):
    """Steps on one queue.

    :param runner: runs the steps, and between them nothing
    :param numbers: names the queues
    :param errors: what steps have raised
    """

    def __init__(
        self, runner: asyncio.Runner, environment: Environment, numbers: list[int], errors: list[BaseException]
    ) -> None:
        super().__init__()
        self._runner = runner
        self._environment = environment
        self._numbers = numbers
        self._exits = AsyncExitStack()
        self._queue: ModelledQueue
        self._errors = errors
        self._kills = self._cuts = 0
        self._steps: list[str] = []

    def _run(self, *steps: Coroutine[Any, Any, None]) -> None:
        self._steps += map(_described, steps)

        async def run_all() -> None:
            for step in steps:
                await step

        try:
            self._runner.run(run_all())
        except BaseException as error:
            error.add_note("\n".join(self._steps))
            self._errors.append(error)
            raise

    @initialize(max_deliver=st.sampled_from([1, 2]))
    def create(self, max_deliver: int) -> None:
        async def begin() -> None:
            self._numbers.append(len(self._numbers))
            entered = modelled_queue(self._environment, f"q{len(self._numbers)}", max_deliver=max_deliver)
            self._queue = await self._exits.enter_async_context(entered)
            await self._queue.publish(6, "a")
            await self._queue.work(4, "nak")

        self._run(begin())

    @rule(count=st.integers(1, 5), kind=st.sampled_from(KINDS), answer=answers)
    def publish(self, count: int, kind: str, answer: str) -> None:
        self._run(self._queue.publish(count, kind), self._queue.work(3, answer))

    @rule(count=st.integers(1, 6), answer=answers)
    def work(self, count: int, answer: str) -> None:
        self._run(self._queue.work(count, answer))

    @precondition(lambda self: self._queue.held)
    @rule(answer=st.sampled_from(["ack", "nak", "term"]), data=st.data())
    def answer(self, answer: str, data: st.DataObject) -> None:
        self._run(self._queue.answer(data.draw(st.sampled_from(sorted(self._queue.held))), answer))

    @precondition(lambda self: self._queue.held)
    @rule()
    def kill_worker(self) -> None:
        self._queue.kill_worker()

    @precondition(lambda self: self._queue.model.has_lapsing)
    @rule()
    def wait(self) -> None:
        self._run(asyncio.sleep(0.7))

    @rule()
    def find(self) -> None:
        self._run(self._queue.find())

    @rule()
    def summarise(self) -> None:
        self._run(self._queue.summarise())

    @rule(how=redrives, kind=kinds, answer=answers)
    def redrive(self, how: str, kind: str | None, answer: str) -> None:
        self._run(self._queue.redrive(how, kind), self._queue.find(), self._queue.work(4, answer))

    @rule()
    def unpark(self) -> None:
        self._run(self._queue.redrive("unpark"))

    @rule(how=st.sampled_from([*REDRIVES, "unpark"]), kind=kinds, kill_at=st.integers(1, 25))
    def redrive_killed(self, how: str, kind: str | None, kill_at: int) -> None:
        self._run(self._queue.redrive(how, kind, kill_at))

    @rule(hows=st.sets(redrives, min_size=2, max_size=3), kills=st.dictionaries(redrives, st.integers(1, 25)))
    def redrive_at_once(self, hows: set[str], kills: dict[str, int]) -> None:
        self._run(self._queue.redrive_at_once(sorted(hows), kills), self._queue.find())

    @precondition(lambda self: self._cuts < (2 if FULL else 1))
    @rule(how=redrives, after=st.floats(0, 0.15), seconds=st.sampled_from([0.2, 2.5]))
    def redrive_cut(self, how: str, after: float, seconds: float) -> None:
        self._cuts += 1
        self._run(self._queue.redrive_cut(how, after, seconds))

    # Each scan that finds a job gone without evidence looks for two seconds whether there is some.
    @precondition(lambda self: not self._queue.deleted)
    @rule()
    def delete_job(self) -> None:
        self._run(self._queue.delete_job(), self._queue.find())

    @precondition(lambda self: not self._queue.model.cut_off_bodies())
    @rule()
    def recreate_consumer(self) -> None:
        self._run(self._queue.recreate_consumer())

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:  # noqa: FBT001 - Hypothesis names its arguments
        self._run(self._queue.pause(paused=paused))

    @rule(which=st.sampled_from(["", "-dead", "-audit"]))
    def fill(self, which: str) -> None:
        self._run(self._queue.fill(f"{self._queue.queue.name}{which}"))

    @precondition(lambda self: self._queue.limited)
    @rule()
    def make_room(self) -> None:
        self._run(self._queue.make_room())

    # After a restart of the server it takes ten seconds until a source goes on.
    @precondition(lambda self: FULL or not self._kills)
    @rule(sourced=st.booleans())
    def source(self, sourced: bool) -> None:  # noqa: FBT001 - Hypothesis names its arguments
        self._run(self._queue.source(sourced=sourced))

    @precondition(lambda self: self._kills < 2 and (FULL or not self._queue.sourced))
    @rule(kill=st.booleans())
    def restart_server(self, kill: bool) -> None:  # noqa: FBT001 - Hypothesis names its arguments
        self._kills += 1
        self._run(self._queue.restart_server(kill=kill))

    def teardown(self) -> None:
        async def end() -> None:
            async with self._exits:
                if not self._errors and hasattr(self, "_queue"):
                    await self._queue.settle()

        self._run(end())


def _described(step: Coroutine[Any, Any, None]) -> str:
    """Return a step with its arguments, as far as they are plain values."""
    frame = getattr(step, "cr_frame", None)
    values = {name: value for name, value in frame.f_locals.items() if name != "self"} if frame else {}
    return f"{getattr(step, '__name__', step)}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def test_each_job_ends_once_whatever_is_done(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer())
        runner = stack.enter_context(asyncio.Runner())
        exits = AsyncExitStack()

        async def begin() -> Environment:
            proxy = await exits.enter_async_context(tcp_proxy(server.port))
            direct = connection_settings({"servers": (server.url,), "timeout": 5})
            through_proxy = connection_settings({"servers": (proxy.url,), "timeout": 2})
            connection = await exits.enter_async_context(connect(direct))
            product = await exits.enter_async_context(connect(through_proxy))
            forking = await exits.enter_async_context(redrivers([server.url], tmp_path))
            return Environment(server, connection, product, proxy, forking)

        environment = runner.run(begin())
        numbers: list[int] = []
        errors: list[BaseException] = []

        class Machine(QueueMachine):
            def __init__(self) -> None:
                super().__init__(runner, environment, numbers, errors)

        def run(examples: int, steps: int, *, derandomize: bool) -> None:
            # Which steps are possible depends on the server, so that an example may be cut short.
            with suppress(FlakyStrategyDefinition):
                run_state_machine_as_test(Machine, settings=_settings(examples, steps, derandomize=derandomize))
            if errors:
                raise errors[0]

        try:
            began = time.monotonic()
            while FULL and time.monotonic() - began < FULL_SECONDS:
                run(10, 40, derandomize=False)
            if not FULL:
                run(EXAMPLES, STEPS, derandomize=True)
        finally:
            runner.run(exits.aclose())
            # The proxy's own tasks end a moment after its connections.
            runner.run(asyncio.sleep(0.1))
        print(f"{len(numbers)} queues in {time.monotonic() - began:.0f} s")


def _settings(examples: int, steps: int, *, derandomize: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
