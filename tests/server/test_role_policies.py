"""Every role runs under exactly its policy, and without any one line an error or a log line names what is missing."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from role_flows import count_letters_as_spark, take_samples

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    Origin,
    Permission,
    Policy,
    Protocol,
    PublishError,
    Redrive,
    RedriveRequest,
    Selection,
    WaitPolicy,
    WorkQueue,
    account_for_jobs,
    cancel,
    connect,
    discover_queue,
    find_dead_letters,
    give_up_job,
    list_redrives,
    move_due_jobs,
    pause_redrive,
    permissions,
    provision,
    publish,
    read_attempts,
    redrive_dead_letters,
    retry_job,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DriftError,
    JetStreamProviderError,
    PermissionDeniedError,
    UnreachableError,
)
from airflow_provider_jetstream.worker import Worker
from airflow_provider_jetstream.worker.errors import GiveUpError
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.face import ROLES, Scan, authorization, inspect_all_queues, stream_info, summarise_dead_letters
from testbed.nats_server import NatsServer
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    pull_jobs,
    small_queue,
    store_completion,
    stored_count,
)
from testbed.seams import current

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from typing import TypeAlias

    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection, StoredMessage

    _Flow: TypeAlias = Callable[[ConnectionSettings, NatsPyConnection], Awaitable[None]]

QUEUE = WorkQueue(
    name="orders",
    subjects=["orders.jobs.>"],
    consumers=[{"name": "worker", "max_deliver": 1, "ack_wait": "500ms", "sample_freq": "0"}],
    dead_letters="orders-dead",
    events="orders-events",
    archive=True,
    attempts=True,
)
SUBJECT = "orders.jobs.a"
PLAN, PLANNED_STREAM = "plans.jobs.a", "plans-schedules"
DUE = (b"done before", b"cancelled", b"due")
# Of the roles that are about jobs with a time.
PLANNED = WorkQueue(
    name="plans",
    subjects=["plans.jobs.>"],
    consumers=[{"name": "worker", "max_deliver": 1, "sample_freq": "0"}],
    dead_letters="plans-dead",
    events="plans-events",
    archive=True,
    schedules=True,
)
# Needed with more than 500 letters, or for a queue that allows no direct gets; these flows have neither.
_OF_OTHER_QUEUES = {
    ("spark-reader", "$JS.API.STREAM.MSG.GET.orders"),
    *(
        (role, f"$JS.API.DIRECT.GET.orders{name}")
        for role in ("redriver", "monitor", "provisioner")
        for name in ("", "-dead", "-events", "-audit", "-archive")
    ),
    ("redriver", "$JS.API.STREAM.PURGE.orders-dead"),
    # Of a queue with another consumer, and with records of redrives and copies of letters.
    ("provisioner", "$JS.API.CONSUMER.MSG.NEXT.orders.worker"),
    ("provisioner", "$JS.API.STREAM.MSG.GET.orders-audit"),
    ("provisioner", "$JS.API.STREAM.MSG.GET.orders-archive"),
    # Without it, samples are read one by one.
    ("monitor", "$JS.API.DIRECT.GET.airflow_monitor"),
}
_QUEUES: dict[str, WorkQueue] = {"scheduler": PLANNED, "mover": PLANNED}
# These change nothing, so the queue stays as it is from one run to the next.
_READING = {"monitor", "spark-reader"}
_ADMIN = "admin"
_SECRET = "of-every-user"


def users() -> dict[str, Policy]:
    """Return the policy of each role, and each without one of its lines."""
    found: dict[str, Policy] = {}
    for role in ROLES:
        policy = permissions(_QUEUES.get(role, QUEUE), role)
        found[role] = policy
        for number, line in enumerate(policy.permissions):
            found[f"{role}-{number}"] = policy.without(line)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    named = [Policy(user, policy.inbox_prefix, policy.permissions) for user, policy in users().items()]
    config = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*named))
    admin = f'users: [\n    {{ user: "{_ADMIN}", password: "{_SECRET}" }}'
    with NatsServer(config=config.replace("users: [", admin, 1), user=_ADMIN, password=_SECRET) as running:
        asyncio.run(_prepare(settings_of(running, _ADMIN)))
        yield running


async def _prepare(settings: ConnectionSettings) -> None:
    async with connect(settings) as connection:
        await provision(connection, QUEUE)
        await provision(connection, small_queue("other"))


def settings_of(server: NatsServer, user: str) -> ConnectionSettings:
    """Return a user's settings; the inbox prefix is that of its role."""
    prefix = "_INBOX" if user == _ADMIN else users()[user].inbox_prefix
    return ConnectionSettings(servers=(server.url,), user=user, password=_SECRET, inbox_prefix=prefix, timeout=10)


def handle(job: Delivery) -> dict[str, int]:
    """Do a job, fail, or give up, as its body says."""
    job.progress(0.5, "half")
    if b"give up" in job.body:
        raise GiveUpError("expected another job")
    if b"fail" in job.body:
        raise ValueError("no such customer")
    return {"size": len(job.body)}


async def do_jobs(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    """Run a worker until nothing is left to do."""
    worker = Worker(QUEUE, "worker", handle, settings, grace=1)
    running = asyncio.create_task(worker.run())

    async def done() -> bool:
        info = await admin.api("CONSUMER.INFO.orders.worker")
        return running.done() or (not info["num_pending"] and not info["num_ack_pending"])

    try:
        await eventually(done, 60)
    finally:
        worker.stop()
        await running


async def publishes(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    origin = Origin("dag", uuid4().hex, "task", max_tries=1)

    ended = threading.Event()

    def blocking() -> Iterator[str]:
        yield "first"
        yield "second"
        ended.wait(60)

    async with connect(settings) as connection:
        await publish(connection, QUEUE, ["alone"], subject=SUBJECT)
        before = await stored_count(admin, "orders")
        cut_off = asyncio.ensure_future(publish(connection, QUEUE, blocking(), subject=SUBJECT, origin=origin))

        async def stored() -> bool:
            return cut_off.done() or await stored_count(admin, "orders") == before + 2

        await eventually(stored, 60)
        # As if the process were killed, which can't record any more what it has published.
        await connection.client.close()
        ended.set()
        with suppress(UnreachableError, PublishError):
            await cut_off
    async with connect(settings) as connection:
        await publish(connection, QUEUE, [*("first", "second"), *map(str, range(20))], subject=SUBJECT, origin=origin)


async def waits(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    async with connect(settings) as connection:
        cursor = await take_cursor(connection, QUEUE)
        report = await publish(admin, QUEUE, ["a job", "fail"], subject=SUBJECT)
        with patch(seams.WAIT_ATTEMPTS_SECONDS, 0.1):
            waiting = asyncio.ensure_future(wait(connection, cursor, report.sequences, policy=WaitPolicy(max_dead=5)))
            # Long enough for the comparison with the server, and for a look at attempts.
            await asyncio.wait({waiting}, timeout=0.5)
        await do_jobs(settings_of_admin(settings), admin)
        await waiting
        # The end of reading isn't waited for; a denial of it is handled in a task of its own.
        for _ in range(3):
            await connection.client.flush()
        if isinstance(connection.last_error, PermissionDeniedError):
            raise connection.last_error


async def works(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    # With an origin, so that there are events already.
    await publish(admin, QUEUE, ["a job", "fail", "give up"], subject=SUBJECT, origin=Origin("d", uuid4().hex, "t"))
    await do_jobs(settings, admin)


async def make_letters(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    """Leave three dead letters: one is stored, one has its body in copies, one in the archive only."""
    with suppress(ApiError):
        # As after a restart of the server.
        await admin.api("CONSUMER.DELETE.orders-audit.uptime")
    if await stored_count(admin, "orders-dead") == 0:
        origin = Origin("d", uuid4().hex, "t")
        await publish(admin, QUEUE, ["a job", "fail", "give up"], subject=SUBJECT, origin=origin)
        await do_jobs(settings_of_admin(settings), admin)
        entries = await stored_count(admin, "orders-dead")
        await publish(admin, QUEUE, ["another program's"], subject=SUBJECT)
        (job,) = await pull_jobs(admin, QUEUE, 1, within=60)
        await job.term()

        async def recorded() -> bool:
            return await stored_count(admin, "orders-dead") > entries

        await eventually(recorded, 60)


async def redrives(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await make_letters(settings, admin)
    async with connect(settings) as connection:
        run = uuid4().hex
        report = await redrive_dead_letters(connection, QUEUE, RedriveRequest(run=run))
        raise_for(report.failed)
    await do_jobs(settings_of_admin(settings), admin)
    async with connect(settings) as connection:
        raise_for((await redrive_dead_letters(connection, QUEUE, RedriveRequest(max_redrives=1))).failed)
        raise_for((await redrive_dead_letters(connection, QUEUE, RedriveRequest(Selection(parked=True)))).failed)


async def redrives_all_ways(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    for flow in (redrives, requeues, scans, accounts, while_a_job_runs(redrives_once), retries):
        await reset(admin, "redriver")
        await flow(settings, admin)


async def retries(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    hourly = {"name": "worker", "max_deliver": 5, "ack_wait": "1h", "backoff": ["1h"], "sample_freq": "0"}
    queue = WorkQueue.model_validate(QUEUE.model_dump(mode="json", exclude_unset=True) | {"consumers": [hourly]})
    await provision(admin, queue)
    await publish(admin, queue, ["fail", "fail"], subject=SUBJECT)

    async def both_wait() -> bool:
        found = [await read_attempts(admin, queue, sequence) for sequence in (1, 2)]
        return all(attempts and attempts[-1].waits_until for attempts in found)

    worker = Worker(queue, "worker", handle, settings_of_admin(settings), grace=1)
    running = asyncio.create_task(worker.run())
    try:
        await eventually(both_wait, 60)
    finally:
        worker.stop()
        await running
    async with connect(settings) as connection:
        await retry_job(connection, queue, 1)
        await give_up_job(connection, queue, 2)


async def requeues(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await publish(admin, QUEUE, ["fail"], subject=SUBJECT)
    await do_jobs(settings_of_admin(settings), admin)

    async def dead() -> bool:
        return await stored_count(admin, "orders-dead") > 0

    # The server publishes its advisory some time after the delivery has ended.
    await eventually(dead, 60)
    async with connect(settings) as connection:
        # Servers before 2.14 can't.
        if connection.server_version >= (2, 14, 0):
            report = await redrive_dead_letters(connection, QUEUE, RedriveRequest(protocol=Protocol.IN_PLACE))
            raise_for(report.failed)


async def scans(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    # A worker that stores no copies.
    await publish(admin, QUEUE, ["fail"], subject=SUBJECT)
    await exhaust_deliveries(admin, QUEUE, 1)
    async with connect(settings) as connection:
        await summarise_dead_letters(connection, QUEUE)


async def accounts(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await publish(admin, QUEUE, ["a job", "a job"], subject=SUBJECT)
    await do_jobs(settings_of_admin(settings), admin)
    async with connect(settings) as connection:
        await account_for_jobs(connection, QUEUE)


async def waits_for_a_running_job(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    async with connect(settings) as connection:
        cursor = await take_cursor(connection, QUEUE)
        report = await publish(admin, QUEUE, ["a job"], subject=SUBJECT)
        async with running_job(admin):
            await wait(connection, cursor, report.sequences)


@asynccontextmanager
async def running_job(admin: NatsPyConnection) -> AsyncIterator[None]:
    """Have the job that waits in the queue as a worker has it, until the block ends."""
    (job,) = await pull_jobs(admin, QUEUE, 1, within=60)

    async def work() -> None:
        while True:
            await job.in_progress()
            await asyncio.sleep(0.1)

    working = asyncio.create_task(work())
    try:
        yield
    finally:
        working.cancel()
        await job.ack_sync()


async def redrives_once(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    async with connect(settings) as connection:
        raise_for((await redrive_dead_letters(connection, QUEUE)).failed)


def while_a_job_runs(flow: _Flow) -> _Flow:
    """Return a flow during which the server may owe advisories."""

    async def look(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
        await make_letters(settings, admin)
        await publish(admin, QUEUE, ["a job"], subject=SUBJECT)
        async with running_job(admin):
            await flow(settings, admin)

    return look


def without(stream: str, flow: _Flow) -> _Flow:
    """Return a flow on a queue one of whose streams is gone."""

    async def look(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
        await make_letters(settings, admin)
        await admin.api(f"STREAM.DELETE.{stream}")
        await flow(settings, admin)

    return look


def capturing_advisories_only(flow: _Flow) -> _Flow:
    """Return a flow on a queue whose dead letter queue was made by hand, as documents show it."""

    async def look(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
        await make_letters(settings, admin)
        config = (await admin.api("STREAM.INFO.orders-dead"))["config"]
        config["subjects"] = [subject for subject in config["subjects"] if subject.startswith("$JS.EVENT.")]
        await admin.api("STREAM.UPDATE.orders-dead", config)
        await flow(settings, admin)

    return look


def raise_for(failed: object) -> None:
    """Raise an error that names why letters failed, if any did."""
    if failed:
        raise JetStreamProviderError(str(failed))


async def monitors(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await make_letters(settings, admin)
    async with connect(settings) as connection:
        overviews = await inspect_all_queues(connection)
        raise_for([overview.problem for overview in overviews if overview.name == "orders" and overview.problem])
        queue = await discover_queue(connection, "orders")
        scan = await Scan.begin(connection, queue)
        async for _ in scan.pages(Selection()):
            await find_dead_letters(connection, queue)
        await read_attempts(connection, queue, 1)
        redrive = await record_redrive(admin, queue)
        assert redrive in {found.id for found in await list_redrives(connection, queue)}
        report = await publish(admin, QUEUE, ["deleted"], subject=SUBJECT)
        await admin.api("STREAM.MSG.DELETE.orders", {"seq": max(report.sequences)})
        assert (await account_for_jobs(connection, queue)).unaccounted_count
        await pause_redrive(connection, queue, redrive, who="Ann Lee")
        await take_samples(connection, admin)


async def record_redrive(admin: NatsPyConnection, queue: WorkQueue) -> str:
    """Store the record of a redrive that runs, as its holder does, and return its id."""
    created = (await stream_info(admin, queue.name))["created"]
    redrive = f"20260101T000000-{uuid4().hex[:8]}"
    record = Redrive(id=redrive, stream=queue.name, created=created, run=redrive, began_at=datetime.now(UTC))
    await admin.client.jetstream().publish(f"audit.{queue.name}.redrives.{redrive}", record.model_dump_json().encode())
    return redrive


async def provisions(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    async with connect(settings) as connection:
        await provision(connection, QUEUE)
        fields = QUEUE.model_dump(exclude_unset=True)
        changed = {"description": uuid4().hex}
        for part in ("dead_letters", "events", "archive", "audit", "attempts"):
            fields[part] = {"name": getattr(QUEUE, part).name, **changed}
        await provision(connection, WorkQueue.load(fields | changed))


async def provisions_twice(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await provisions(settings, admin)
    await reset(admin, "provisioner")
    await creates_anew(settings, admin)


async def creates_anew(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    """Provision a queue whose consumer is gone: it would run dead letters again."""
    await provision(admin, QUEUE)
    await make_letters(settings, admin)
    await admin.api("CONSUMER.DELETE.orders.worker")
    async with connect(settings) as connection:
        with pytest.raises(DriftError, match="it would run 1 dead letter again"):
            await provision(connection, QUEUE)


def without_consumer(flow: _Flow) -> _Flow:
    """Return a flow on a queue whose consumer is gone."""

    async def look(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
        await make_letters(settings, admin)
        await admin.api("CONSUMER.DELETE.orders.worker")
        await flow(settings, admin)

    return look


async def reports_on_spark(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    await make_letters(settings, admin)
    options = {"servers": settings.servers[0], "user": settings.user or "", "password": _SECRET}
    options["inboxPrefix"] = settings.inbox_prefix
    for is_direct in (False, True):
        config = (await admin.api("STREAM.INFO.orders-audit"))["config"]
        await admin.api("STREAM.UPDATE.orders-audit", {**config, "allow_direct": is_direct})
        assert await count_letters_as_spark(options, QUEUE) == 3


async def schedules(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    """Schedule a job, and once more, as a task does that is tried again."""
    async with connect(settings) as connection:
        for _ in range(2):
            report = await publish(connection, PLANNED, [Job(b"later", id="1", delay="1h")], subject=PLAN)
            report.raise_for_failures()
    assert await stored_count(admin, PLANNED_STREAM) == 1


async def moves(settings: ConnectionSettings, admin: NatsPyConnection) -> None:
    """Move a job, one that is cancelled on its way, and one that an earlier mover had stored and a worker has done."""
    jobs = [Job(b"hidden", id="1", delay="1h"), *(Job(body, delay="100ms", id=body.decode()) for body in DUE)]
    (await publish(admin, PLANNED, jobs, subject=PLAN)).raise_for_failures()
    # As an answer of the server is stored that somebody has sent there.
    hidden = (await stream_messages(admin, PLANNED_STREAM, "scheduled.plans.>"))[0]
    await admin.client.jetstream().publish(hidden.subject, b"{}")

    async def due(count: int) -> list[StoredMessage] | None:
        found = await stream_messages(admin, PLANNED_STREAM, "due.plans.>")
        return found if len(found) == count else None

    for message in await eventually(lambda: due(len(DUE))) or []:
        if message.data == b"done before":
            headers = {"Nats-Msg-Id": message.header("Scheduled-Msg-Id") or "", "Job-Id": message.data.decode()}
            await admin.client.jetstream().publish(PLAN, message.data, headers=headers)
    (done,) = await pull_jobs(admin, PLANNED, 1, within=60)
    await store_completion(admin, PLANNED, 1, job_id="done before")
    await done.ack_sync()
    await admin.api("STREAM.PURGE.plans-archive")
    store_each = current(seams.MOVER_STORE_EACH)

    async def cancel_first(*args: Any) -> Any:
        await cancel(admin, PLANNED, "cancelled", "by hand")
        return await store_each(*args)

    stop = asyncio.Event()
    async with connect(settings) as connection:
        with patch(seams.MOVER_STORE_EACH, cancel_first):
            moving = asyncio.ensure_future(move_due_jobs(connection, PLANNED, stop=stop))

            async def all_is_moved() -> bool:
                # A schedule that is stored once more replaces what hid it.
                return moving.done() or await stored_count(admin, PLANNED_STREAM) == 1

            await eventually(all_is_moved, 60)
            stop.set()
            await moving


_FLOWS: dict[str, _Flow] = {
    "publisher": publishes,
    "scheduler": schedules,
    "mover": moves,
    "waiter": waits,
    "worker": works,
    "redriver": redrives_all_ways,
    "monitor": monitors,
    "spark-reader": reports_on_spark,
    "provisioner": provisions_twice,
}


# The part of a flow that needs most lines.
_MISSING: dict[str, _Flow] = {"redriver": redrives, "provisioner": provisions}
_PROBE = "$JS.API.CONSUMER.MSG.NEXT.orders.worker"
_DEAD_LETTERS = "$JS.API.STREAM.INFO.orders-dead"
_ANEW: dict[str, _Flow] = dict.fromkeys(("the queue's streams", "jobs that are dead letters", "entries"), creates_anew)
# The states of the queue in which a line is needed that the role's flow needs nowhere else: by subject, or by what the
# line is for.
_STATES: dict[str, dict[str, _Flow]] = {
    "waiter": {_PROBE: waits_for_a_running_job},
    "redriver": {
        _PROBE: while_a_job_runs(redrives_once),
        "requeueing in place": requeues,
        **{line.subject: retries for line in permissions(QUEUE, "redriver").permissions if "attempts" in line.subject},
        "dead jobs whose consumer is gone": without_consumer(redrives_once),
        "copies of bodies, before they are gone": scans,
        _DEAD_LETTERS: capturing_advisories_only(redrives_once),
        **{
            f"$JS.API.STREAM.INFO.{stream}": without(stream, redrives_once)
            for stream in ("orders-events", "orders-archive", "orders-audit")
        },
    },
    "monitor": {_PROBE: while_a_job_runs(monitors), _DEAD_LETTERS: capturing_advisories_only(monitors)},
    "provisioner": _ANEW,
    "spark-reader": {
        _PROBE: while_a_job_runs(reports_on_spark),
        _DEAD_LETTERS: capturing_advisories_only(reports_on_spark),
    },
}


def settings_of_admin(settings: ConnectionSettings) -> ConnectionSettings:
    """Return the administrator's settings for the same server."""
    return settings.model_copy(update={"user": _ADMIN, "inbox_prefix": "_INBOX"})


async def reset(admin: NatsPyConnection, role: Any) -> None:
    """Begin with new streams, or with none for the role that makes them."""
    queue = _QUEUES.get(role, QUEUE)
    for stream in (*queue.companion_names(), queue.name):
        with suppress(ApiError):
            await admin.api(f"STREAM.DELETE.{stream}")
    if role != "provisioner":
        await provision(admin, queue)


async def run(
    server: NatsServer, user: str, role: Any, caplog: pytest.LogCaptureFixture, missing: Permission | None
) -> tuple[str, str]:
    """Run a role's flow until it ends, or until something names the missing line; return the error, and the log."""
    caplog.clear()
    problem = ""
    async with connect(settings_of(server, _ADMIN)) as admin:
        flow = _FLOWS[role]
        state = None
        if missing:
            states = _STATES.get(role, {})
            state = states.get(missing.subject) or states.get(missing.purpose)
            flow = state or _MISSING.get(role, flow)
        if missing is None or role not in _READING or state:
            await reset(admin, role)
        task = asyncio.ensure_future(flow(settings_of(server, user), admin))
        deadline = asyncio.get_running_loop().time() + 120
        while not task.done() and not (missing and names(missing, caplog.text)):
            await asyncio.wait({task}, timeout=0.1)
            if asyncio.get_running_loop().time() > deadline:
                problem = "the flow hangs"
                break
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001
            problem = f"{problem}{type(error).__name__}: {error}"
        if state:
            await reset(admin, role)
    return problem, caplog.text


def names(line: Permission, text: str) -> bool:
    """Return whether a text names a subject that the line allows."""
    pattern = re.escape(line.subject).replace(r"\*", r"[^\s.]+").replace(">", r"\S+")
    return re.search(f"{line.action} to {pattern}", text) is not None


def _roles() -> Iterator[object]:
    for role in ROLES:
        marks = [pytest.mark.since_server("2.12", "schedules")] if role in _QUEUES else []
        yield pytest.param(role, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("role", [*_roles()])
async def test_a_role_needs_every_line_of_its_policy(
    server: NatsServer, role: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "airflow_provider_jetstream")
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.1)
    problem, logged = await run(server, role, role, caplog, None)
    assert problem == ""
    assert "doesn't let" not in logged
    if server.version < "2.14":
        # The policies are the same for all servers, and some lines are about what only newer ones have.
        return
    problems = []
    for number, line in enumerate(users()[role].permissions):
        problem, logged = await run(server, f"{role}-{number}", role, caplog, line)
        if not names(line, problem + logged) and (role, line.subject) not in _OF_OTHER_QUEUES:
            problems.append(f"{line.action} {line.subject}: {problem} {logged[-600:]}")
    assert not problems, "\n\n".join(problems)


async def denied(connection: NatsPyConnection, subject: str) -> None:
    """Wait until the server has denied a subject."""
    await eventually(lambda: getattr(connection.last_error, "subject", "") == subject, 30)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_reads_no_other_users_answers_and_deletes_nothing(server: NatsServer, role: Any) -> None:
    async with connect(settings_of(server, role)) as connection:
        for subject in ("_INBOX.>", ">", "*.>", "orders.jobs.>", "$JS.ACK.>"):
            await connection.client.subscribe(subject)
            await denied(connection, subject)
        requests = ("STREAM.DELETE.orders", "STREAM.PURGE.orders", "CONSUMER.DELETE.orders.worker", "STREAM.INFO.other")
        for request in requests:
            with pytest.raises(PermissionDeniedError, match=request):
                await connection.api(request)
        others = {"other.jobs.a", "completed.orders.other.1", "$SYS.REQ.SERVER.PING", "_INBOX.a.b"}
        if role not in ("publisher", "redriver"):
            others |= {SUBJECT, "published.orders.key"}
        if role not in ("worker", "redriver"):
            others |= {"dead.orders.worker.1", "$JS.ACK.orders.worker.1.1.1.1.0"}
        if role != "redriver":
            others |= {"audit.orders.lease", "parked.orders.worker.1"}
        for subject in others:
            await connection.publish(subject, b"forged")
            await denied(connection, subject)
