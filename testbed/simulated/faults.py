"""What goes wrong in a world: kills, losses of power, changes of leaders, and other tools that edit the queue.

Each fault excuses in the account only what ``docs/guarantees.md`` says about it: which jobs may run twice, of which the
end may not be known, and which are gone since the server, or a person, has removed every copy.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError
from testbed.simulated.plan import NAMES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from testbed.simulated.consumers import Consumer
    from testbed.simulated.stage import Stage
    from testbed.simulated.streams import Message

# Of one server; in seconds.
_FORGOTTEN: Final = 1.0
_UNSYNCED: Final = (3.0, 10.0)
# Of a cluster.
_UNREPLICATED: Final = 0.3


async def play_faults(world: Stage) -> None:
    """Play a world's faults, one after the other, until the task is cancelled."""
    plays: dict[str, Callable[[Stage, random.Random], Awaitable[None]]] = {
        "actor": _kill_actor,
        "connection": _cut_connection,
        "server": _kill_server,
        "power": _lose_power,
        "leader": _change_leader,
        "filters": _move_filter,
        "max_deliver": _change_deliveries,
        "sample_freq": _stop_metrics,
        "republish": _stop_copies,
        "purge": _purge,
        "delete": _delete,
        "recreate": _recreate,
    }
    began = world.server.loop.time()
    world.server.on_update = partial(_excuse_jobs_of_two, world)
    for fault in world.plan.faults:
        await asyncio.sleep(max(0.0, began + fault.at - world.server.loop.time()))
        world.account.counts[f"fault {fault.kind}"] += 1
        # An edit may be refused, or have no answer.
        with suppress(JetStreamProviderError, ApiError, TimeoutError):
            await plays[fault.kind](world, random.Random(fault.pick))  # noqa: S311


# Of programs and connections.


async def _kill_actor(world: Stage, rng: random.Random) -> None:
    name = rng.choice(sorted(world.tasks))
    world.tell(f"{name} is killed")
    world.kill(name)


async def _cut_connection(world: Stage, rng: random.Random) -> None:
    if not world.connections:
        return
    connection = rng.choice(world.connections)
    world.tell("a connection is lost")
    world.excuse_running()
    connection.lose()
    world.server.loop.call_later(rng.uniform(0.01, 3.0), world.restore, connection)


# Of the server.


async def _kill_server(world: Stage, rng: random.Random) -> None:
    """Kill the server: it forgets the last moments of its consumers, and what clients had asked for."""
    server = world.server
    states = {name: _consumer_states(world, name) for name in server.streams}
    before = world.bodies_done_twice_if_back()
    await asyncio.sleep(rng.uniform(0.0, _FORGOTTEN))
    world.tell("the server is killed")
    world.account.excuse(before)

    def go_back() -> None:
        for name, state in states.items():
            _go_back(world, name, state)

    await _restart(world, rng, go_back)


async def _lose_power(world: Stage, rng: random.Random) -> None:
    """Turn the server off: each stream has what it stored up to a moment of its own."""
    server, began = world.server, world.server.now()
    copies: dict[str, Any] = {}
    longest = rng.choice(_UNSYNCED)
    moments = sorted((rng.uniform(0.0, longest), name) for name in server.streams)
    now = 0.0
    before = world.bodies_done_twice_if_back()
    for moment, name in moments:
        await asyncio.sleep(moment - now)
        now, copies[name] = moment, server.streams[name].copied()
    world.tell(
        f"the server loses its power, and the tails after {[(name, f'{moment:.2f}') for moment, name in moments]}"
    )
    touched = before | {body for body, at in world.account.touched.items() if at >= began}
    touched |= {body for stream in server.streams.values() for body in _bodies(stream.messages.values(), began)}
    world.account.excuse(touched)
    was = _bodies(server.streams[world.queue.name].messages.values())
    archive, since = server.streams[f"{world.queue.name}-archive"], copies[world.queue.name]["last_time"]

    def go_back() -> None:
        tail = _bodies(archive.messages.values(), since)
        for name, copy in copies.items():
            server.streams[name].restore(copy)
        # Its limits had removed others, which are back.
        tail |= _bodies(archive.messages.values(), since)
        # Other jobs get the sequences of the tail, or those of it are stored again.
        queue = server.streams[world.queue.name]
        for sequence in list(world.account.ends):
            if sequence > queue.last or sequence in queue.messages:
                del world.account.ends[sequence]
        world.account.deleted -= {sequence for sequence in world.account.deleted if sequence > queue.last}
        # What is stored nowhere any more, or was lost with the queue's tail, is lost by the server.
        left, now = world.bodies_stored(), _bodies(queue.messages.values())
        gone = {body for body in was | touched if body not in left} | ((was | tail) - now)
        world.account.removed |= {body for body in gone if not world.account.done[body]}
        world.account.excuse(now - was)

    await _restart(world, rng, go_back)


async def _restart(world: Stage, rng: random.Random, go_back: Callable[[], object]) -> None:
    world.excuse_running()
    # It forgets the ids of jobs that are gone: whoever has no answer yet stores them again.
    history = world.server.streams[world.queue.name].history
    given_up = {history[sequence].decode() for sequence in world.account.given_up & history.keys()}
    world.account.excuse({body for body in world.account.in_doubt if world.account.done[body] or body in given_up})
    world.server.kill()
    for connection in world.connections:
        connection.lose()
    go_back()
    await asyncio.sleep(rng.uniform(0.1, 2.0))
    world.server.start()
    for connection in world.connections:
        world.restore(connection)


async def _change_leader(world: Stage, rng: random.Random) -> None:
    """Have a stream without a leader for a while; the next one lacks the last moments of its consumers."""
    name = rng.choice(sorted(world.server.streams))
    stream, states = world.server.streams[name], _consumer_states(world, name)
    before = world.bodies_done_twice_if_back()
    await asyncio.sleep(rng.uniform(0.0, _UNREPLICATED))
    world.tell(f"{name} has no leader")
    stream.led = False
    if name == f"{world.queue.name}-archive":
        # What the server copies to a stream without a leader is dropped.
        world.account.without_copies = True
    world.excuse_running()
    if name == world.queue.name:
        world.account.excuse(before)
    await asyncio.sleep(rng.uniform(0.1, 3.0))
    if stream.led:
        return
    leader = rng.choice([other for other in NAMES if other != stream.leader[0]])
    stream.ahead = world.server.clocks[leader]
    stream.leader = leader, stream.now()
    world.excuse_running()
    _go_back(world, name, states)
    stream.led = True
    world.tell(f"{leader} leads {name}")


def _consumer_states(world: Stage, stream: str) -> dict[str, Any]:
    return {name: consumer.copied() for name, consumer in world.server.streams[stream].consumers.items()}


def _go_back(world: Stage, stream: str, states: dict[str, Any]) -> None:
    for name, consumer in world.server.streams[stream].consumers.items():
        if name in states:
            consumer.restore(states[name])


def _bodies(messages: Iterable[Message], since: int = 0) -> set[str]:
    return {message.data.decode("utf-8", "replace") for message in messages if message.time >= since}


def excuse_later_delivery(world: Stage, terminated: Message) -> None:
    """Excuse a job that a slow worker terminates when the server has delivered it once more: both may do it."""
    world.account.excuse(_bodies([terminated]))


# Another tool.


async def _move_filter(world: Stage, rng: random.Random) -> None:
    """Move a consumer's subject to the other one, as somebody does who doesn't know what that means."""
    if len(world.queue.consumers) == 1:
        return
    (one, filters), (other, others) = rng.sample(sorted(world.filters.items()), 2)
    if not filters:
        return
    moved = rng.choice(sorted(filters))
    world.tell(f"another tool moves {moved} from {one} to {other}")
    world.filters |= {one: filters - {moved}, other: others | {moved}}
    if all(set(consumer.filter_subjects) == world.filters[consumer.name] for consumer in world.queue.consumers):
        # Nothing shows any more that consumers have passed jobs.
        world.account.passed |= set(world.server.streams[world.queue.name].messages)
    for consumer in (one, other):
        # A consumer without a filter would take every subject.
        wanted = sorted(world.filters[consumer]) or [f"{world.queue.name}.jobs.nothing"]
        await _edit_consumer(world, consumer, filter_subjects=wanted)


def _excuse_jobs_of_two(world: Stage, updated: Consumer) -> None:
    """Excuse the jobs in flight at one consumer that another one, updated by a tool, gets from now on, too."""
    if updated.stream.name != world.queue.name or world.settling:
        # Provisioning gives no job to two consumers.
        return
    world.account.edited[updated.name] = world.server.loop.time()
    others = [other for other in updated.stream.consumers.values() if other is not updated]
    world.account.excuse(
        _bodies(
            message
            for sequence, message in updated.stream.messages.items()
            if sequence >= updated.next
            and updated.matches(message.subject)
            and any(sequence in other.pending for other in others)
        )
    )


async def _change_deliveries(world: Stage, rng: random.Random) -> None:
    consumer, most = rng.choice(world.queue.consumers).name, rng.randint(1, 4)
    world.tell(f"another tool sets max_deliver of {consumer} to {most}")
    await _edit_consumer(world, consumer, max_deliver=most)


async def _stop_metrics(world: Stage, rng: random.Random) -> None:
    consumer = rng.choice(world.queue.consumers).name
    world.tell(f"another tool sets sample_freq of {consumer} to 0%")
    world.account.without_metrics = True
    world.excuse_running()
    await _edit_consumer(world, consumer, sample_freq="0%")


async def _edit_consumer(world: Stage, consumer: str, **changes: Any) -> None:
    name = world.queue.name
    async with world.connected() as connection:
        info = await connection.api(f"CONSUMER.INFO.{name}.{consumer}", {})
        config = {key: value for key, value in info["config"].items() if not key.startswith("filter_subject")}
        config["filter_subjects"] = info["config"].get("filter_subjects") or [
            info["config"].get("filter_subject") or f"{name}.jobs.>"
        ]
        request = {"stream_name": name, "config": config | changes, "action": "update"}
        await connection.api(f"CONSUMER.CREATE.{name}.{consumer}", request)


async def _stop_copies(world: Stage, _rng: random.Random) -> None:
    name = world.queue.name
    world.tell("another tool takes the republishing back")
    world.account.without_copies = True
    async with world.connected() as connection:
        config = (await connection.api(f"STREAM.INFO.{name}", {}))["config"]
        config.pop("republish", None)
        await connection.api(f"STREAM.UPDATE.{name}", config)


async def _purge(world: Stage, rng: random.Random) -> None:
    name = world.queue.name
    subject = rng.choice([f"{name}.jobs.>", *world.subjects])
    await _remove_by_hand(world, f"STREAM.PURGE.{name}", {"filter": subject}, subject)


async def _delete(world: Stage, rng: random.Random) -> None:
    name = world.queue.name
    if not (stored := sorted(world.server.streams[name].messages)):
        return
    sequence = rng.choice(stored)
    await _remove_by_hand(world, f"STREAM.MSG.DELETE.{name}", {"seq": sequence}, sequence)


async def _remove_by_hand(world: Stage, request: str, body: dict[str, Any], what: str | int) -> None:
    world.tell(f"somebody removes {what}")
    world.excuse_running()
    before = dict(world.server.streams[world.queue.name].messages)
    async with world.connected() as connection:
        try:
            await connection.api(request, body)
        finally:
            left = world.server.streams[world.queue.name].messages
            gone = [message for sequence, message in before.items() if left.get(sequence) is not message]
            world.account.removed |= _bodies(gone)
            world.account.excuse(_bodies(gone))
            # A purge makes a consumer pass by redeliveries that are due.
            world.account.passed |= left.keys()
            # Not those that somebody has or had, or that are dead: these have other ends.
            account, died = world.account, world.died
            for message in gone:
                job = message.data.decode()
                has_died = (message.sequence, message.data) in died or message.sequence in account.given_up
                if not (account.done[job] or account.running[job] or has_died):
                    account.deleted.add(message.sequence)


async def _recreate(world: Stage, rng: random.Random) -> None:
    """Delete a consumer and make it anew: it delivers every stored job, also those that are dead."""
    name, consumer = world.queue.name, rng.choice(world.queue.consumers).name
    world.tell(f"another tool deletes {consumer} and makes it anew")
    world.account.excuse(_bodies(world.server.streams[name].messages.values()))
    world.excuse_running()
    async with world.connected() as connection:
        config = (await connection.api(f"CONSUMER.INFO.{name}.{consumer}", {}))["config"]
        await connection.api(f"CONSUMER.DELETE.{name}.{consumer}", {})
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        world.account.excuse(_bodies(world.server.streams[name].messages.values()))
        request = {"stream_name": name, "config": config, "action": "create"}
        await connection.api(f"CONSUMER.CREATE.{name}.{consumer}", request)
