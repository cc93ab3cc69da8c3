"""The commands of the pages about workers and the command line run as they stand, and do what the pages say."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import shutil
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from test_exporter import scrape

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    Reason,
    WorkQueue,
    account_for_jobs,
    cancel,
    connect,
    find_dead_letters,
    permissions,
    provision,
    publish,
    read_attempts,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.authentication import operator_mode
from testbed.certificates import make_tls
from testbed.code_blocks import ROOT, code_blocks
from testbed.dead_letters import acknowledge_jobs, stream_messages
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK, free_port
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    running_worker,
    stored_count,
)
from testbed.terminal import terminal_env
from tools.reference.permission_page import QUEUE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.console import Terminal
    from testbed.face import NatsPyConnection

# What the page's handler calls is its reader's own.
_READERS_OWN = """
from pathlib import Path


def bank_is_open():
    return not Path("bank.closed").exists()


def fetch(item, amount):
    return f"{item}-{amount}"
"""


@pytest.fixture
async def admin(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to the server that the terminal's commands use."""
    async with connect(ConnectionSettings(servers=(own_nats.url,), timeout=5)) as connection:
        yield connection


def write_queue(folder: Path, file: str, name: str, consumer: str, **fields: Any) -> WorkQueue:
    """Write the file of a queue that a page names by its file alone."""
    declared = {
        "name": name,
        "subjects": [f"{name}.>"],
        "dead_letters": f"{name}-dead",
        "events": f"{name}-events",
        "consumers": [{"name": consumer, "max_deliver": 5, "backoff": ["30s"]}],
    }
    (folder / file).write_text(yaml.safe_dump(declared | fields))
    return WorkQueue.load(folder / file)


def write_handler(folder: Path, file: str) -> None:
    """Write the handler of docs/worker.md into a module, with the functions that its reader has."""
    (handler,) = [block for block in code_blocks("python") if block.file == "shop/orders.py"]
    (folder / file).parent.mkdir()
    (folder / file).write_text(handler.code + _READERS_OWN)


async def ended(process: Process) -> None:
    process.signal(signal.SIGTERM)
    await eventually(lambda: not process.alive)
    assert process.returncode == 0, process.output()


async def completions(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, dict[str, Any]]:
    """Read the completions of a queue's jobs, by the jobs' sequences."""
    assert queue.events
    found = [json.loads(each.data) for each in await stream_messages(connection, queue.events.name, "completed.>")]
    return {event["stream_seq"]: event for event in found}


@pytest.mark.slow
async def test_an_account_names_the_jobs_that_are_gone_without_evidence(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queue = await make_queue(admin, "orders", consumer={"sample_freq": "100%"})
    await publish_jobs(admin, queue, ["done", "deleted", "waiting"])
    await acknowledge_jobs(admin, queue, 1)
    await admin.api("STREAM.MSG.DELETE.orders", {"seq": 2})
    shown = await asyncio.to_thread(terminal.run, code=1)
    assert "3 jobs of orders: 1 stored, 1 ended, 1 unaccounted (2)" in shown


@pytest.mark.slow
async def test_the_handler_of_the_page_does_gives_up_and_delays_jobs(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = write_queue(terminal.folder, "queue.yaml", "orders", "high")
    write_handler(terminal.folder, "shop/orders.py")
    await provision(admin, queue)
    terminal.replace("nats://nats:4222", own_nats.url)
    closed = terminal.folder / "bank.closed"
    closed.touch()
    await publish(admin, queue, [Job({"item": "salt", "amount": 1})], subject="orders.new")
    worker = terminal.start()
    await eventually(lambda: worker.output().count("job ended") == 1)
    closed.unlink()
    bodies = [{"item": "tea", "amount": 3}, {"item": "tea", "amount": 1_001}, {"item": "tea"}]
    await publish(admin, queue, [Job(body) for body in bodies], subject="orders.new")
    await eventually(lambda: worker.output().count("job ended") == 1 + len(bodies))
    await ended(worker)
    # The first one is delivered again in two minutes.
    assert await stored_count(admin, "orders") == 1
    done = await completions(admin, queue)
    assert {sequence: (each["result"], each["worker"]) for sequence, each in done.items()} == {
        2: ({"shelf": "tea-3"}, "3")
    }
    letters = {letter.sequence: letter.death for letter in (await find_dead_letters(admin, queue)).letters}
    assert set(letters) == {3, 4}
    assert letters[3].explanation == "no store has so many"
    assert letters[4].error_class == "airflow_provider_jetstream.worker.errors.InvalidBodyError"


@pytest.mark.slow
async def test_a_delivery_ends_with_the_log_line_that_the_page_shows(
    own_nats: NatsServer, admin: NatsPyConnection, tmp_path: Path
) -> None:
    queue = write_queue(tmp_path, "queue.yaml", "orders", "high")
    (tmp_path / "slow.py").write_text("import asyncio\n\n\nasync def process(job):\n    await asyncio.sleep(60)\n")
    await provision(admin, queue)
    await admin.client.jetstream().publish("orders.new", b"", headers={"Job-Id": "order-16"})
    words = "run --queue queue.yaml --consumer high --handler slow:process --deadline 0.1 --id 3 --log-format json"
    command = [sys.executable, "-m", "airflow_provider_jetstream.worker.cli", *words.split()]
    worker = Process.start(command, env=terminal_env(own_nats.url), log_file=tmp_path / "worker.log", cwd=tmp_path)
    try:
        await eventually(lambda: "job ended" in worker.output())
    finally:
        worker.terminate()
    ended = [line for line in map(json.loads, worker.output().splitlines()) if line["message"].startswith("job ended")]
    (shown,) = [json.loads(block.code) for block in code_blocks("json") if block.page == "docs/worker.md"]
    assert list(ended[0]) == list(shown)
    of_the_delivery = {"time", "message", "sequence", "job_id", "attempt", "outcome", "seconds"}
    assert {name: ended[0][name] for name in shown.keys() - of_the_delivery} == {
        name: shown[name] for name in shown.keys() - of_the_delivery
    }


@pytest.mark.slow
async def test_a_worker_with_a_fallback_does_the_jobs_of_both_queues(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queues = {}
    for kind in ("high", "normal"):
        queue = write_queue(terminal.folder, f"tasks_{kind}.yaml", f"tasks_{kind}", "worker")
        await provision(admin, queue)
        await publish(admin, queue, [Job({"item": kind, "amount": 1})] * 15, subject=f"tasks_{kind}.new")
        queues[kind] = queue
    write_handler(terminal.folder, "shop/tasks.py")
    worker = terminal.start()

    async def all_done() -> bool:
        return not sum([await stored_count(admin, queue.name) for queue in queues.values()])

    await eventually(all_done)
    await ended(worker)
    for kind, queue in queues.items():
        done = await completions(admin, queue)
        assert [each["result"] for each in done.values()] == [{"shelf": f"{kind}-1"}] * 15


def handle(job: Delivery) -> None:
    """Do a redriven job."""


@pytest.mark.slow
async def test_the_first_look_finds_queues_and_says_what_to_do(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = await make_queue(admin, "orders")
    terminal.replace("nats://nats-1:4222", own_nats.url)
    listed = await asyncio.to_thread(terminal.run)
    assert "orders" in listed
    await make_dead_letters(admin, queue, ["a", "b"])
    # Dead letters are what the exit code 1 says of this command.
    assert "2 dead letters" in await asyncio.to_thread(terminal.run, code=1)


@pytest.mark.slow
async def test_letters_older_than_an_hour_are_listed_one_a_line(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    (old,) = await make_dead_letters(admin, queue, ["old"])
    # A worker's record says when; the server's advisory would say that it was a moment ago.
    await admin.api("STREAM.PURGE.orders-dead")
    record = {
        "Dead-Letter-Sequence": str(old),
        "Dead-Letter-Subject": "orders.jobs.plain",
        "Dead-Letter-Reason": "max_deliveries",
        "Dead-Letter-Last-Failure": (datetime.now(UTC) - timedelta(hours=2)).isoformat(),
    }
    await admin.client.jetstream().publish("dead.orders.worker", b"old", headers=record)
    await make_dead_letters(admin, queue, ["new"])
    (line,) = (await asyncio.to_thread(terminal.run)).splitlines()
    assert (json.loads(line)["sequence"], line.isascii()) == (old, True)


@pytest.mark.slow
async def test_letters_are_counted_redriven_a_few_first_in_waves_and_patched(
    terminal: Terminal, admin: NatsPyConnection, own_nats: NatsServer
) -> None:
    queue = await make_queue(admin, "orders", consumer={"ack_wait": "30s", "max_ack_pending": 1_000})
    await make_dead_letters(admin, queue, [json.dumps({"total": f"1,{number}"}) for number in range(125)])
    assert "125 would be redriven" in await asyncio.to_thread(terminal.run)
    assert await stored_count(admin, "orders") == 125
    settings = ConnectionSettings(servers=(own_nats.url,))
    async with running_worker(Worker(queue, "worker", handle, settings, concurrency=20)):
        assert re.search(r"\b10 completed", await asyncio.to_thread(terminal.run))
        assert await stored_count(admin, "orders") == 115
        assert re.search(r"\b115 completed", await asyncio.to_thread(terminal.run))
        assert await stored_count(admin, "orders") == 0
    (first, second) = json.loads(await _status(terminal))
    assert (first["redriven"], second["redriven"], second["why"]) == (115, 10, "provider is back")
    await make_dead_letters(admin, queue, [json.dumps({"total": "1,5"}), json.dumps({"sum": "1,5"})])
    patch = [{"op": "replace", "path": "/total", "value": "1.5"}]
    (terminal.folder / "fix.json").write_text(json.dumps(patch))
    # One of the two letters has no total, so it would stay, which is what the exit code 1 says.
    printed = await asyncio.to_thread(terminal.run, code=1)
    assert [line for line in printed.splitlines() if line.startswith(("-  ", "+  "))] == [
        '-  "total": "1,5"',
        '+  "total": "1.5"',
    ]
    assert "1 of them would be changed" in printed
    assert "252: operation 1 of the patch, replace /total: the body has no such place" in printed
    assert await stored_count(admin, "orders") == 2


async def _status(terminal: Terminal) -> str:
    """Ask for the redrives, as the page's table of commands names it."""
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        "jetstream-queue redrive status orders --json",
        env=terminal.env,
        stdout=asyncio.subprocess.PIPE,
    )
    return (await process.communicate())[0].decode()


@pytest.mark.slow
def test_the_shell_completes_what_is_typed(terminal: Terminal) -> None:
    typed = "jetstream-queue letters di"
    function = "$(complete -p jetstream-queue | grep -oP '(?<=-F )\\S+')"
    press_tab = (
        f"COMP_LINE='{typed}' COMP_POINT={len(typed)} COMP_TYPE=9 COMP_WORDS=({typed}) COMP_CWORD=2"
        f"\n{function} jetstream-queue di letters\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    assert terminal.run(after=press_tab).split() == ["diagnose"]


@pytest.mark.slow
async def test_the_exporter_serves_metrics_until_it_is_interrupted(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    await publish_jobs(admin, queue, ["a"])
    port = free_port()
    terminal.replace("9808", str(port))
    exporter = terminal.start()
    found = await eventually(lambda: scrape(port).get("jetstream_queue_messages"), 60)
    assert found == {("orders",): 1}
    exporter.signal(signal.SIGINT)
    await eventually(lambda: not exporter.alive)
    assert exporter.returncode == 0


@pytest.mark.slow
async def test_an_example_runs_without_docker(terminal: Terminal, admin: NatsPyConnection, tmp_path: Path) -> None:
    terminal.folder = ROOT
    ledger = tmp_path / "surveys"
    terminal.env["SURVEYS_LEDGER"] = str(ledger)
    await asyncio.to_thread(terminal.run)
    queue = WorkQueue.load(ROOT / "example_dags/queues/surveys.yaml")
    await publish(admin, queue, [Job({"to": "ada@example.org"})], subject="surveys.new")
    worker = terminal.start()
    await eventually(ledger.exists)
    await ended(worker)
    assert json.loads(ledger.read_text())["to"] == "ada@example.org"


@pytest.mark.slow
async def test_a_job_that_waits_is_retried_and_another_given_up(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = WorkQueue(
        name="scans",
        subjects=["scans.>"],
        consumers=[{"name": "worker", "max_deliver": 3, "backoff": ["1h"]}],
        dead_letters="scans-dead",
        attempts=True,
    )

    def fail(_: Delivery) -> None:
        raise ValueError("page 2 is empty")

    await provision(admin, queue)
    await publish(admin, queue, ["a scan", "another"], subject="scans.a")

    async def both_wait() -> bool:
        attempts = [await read_attempts(admin, queue, sequence) for sequence in (1, 2)]
        return all(found and found[-1].waits_until for found in attempts)

    async with running_worker(Worker(queue, "worker", fail, admin.settings)):
        await eventually(both_wait)
    for _ in range(2):
        command = terminal.next()
        terminal.put_back()
        assert terminal.run().strip() == command.shown
    (message,) = await pull_jobs(admin, queue, 1)
    assert (message.metadata.sequence.stream, message.metadata.num_delivered) == (1, 2)
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert letter.sequence == 2
    assert (letter.death.explanation or "").endswith(": blank")


async def test_a_queue_is_prepared_before_the_first_job(terminal: Terminal, admin: NatsPyConnection) -> None:
    # What the page wants at least.
    limits = {"max_bytes": "256MB", "discard": "new", "archive": {"max_bytes": "256MB"}}
    queue = write_queue(terminal.folder, "orders.yaml", "orders", "processor", **limits)
    assert await asyncio.to_thread(terminal.run) == "nothing found\n"
    # A change to make is what the exit code 1 says of this command.
    assert "create" in await asyncio.to_thread(terminal.run, code=1)
    await asyncio.to_thread(terminal.run)
    assert await stored_count(admin, "orders") == 0
    policy = permissions(queue, "worker", consumer="processor")
    printed = await asyncio.to_thread(terminal.run)
    assert all(f'"{line.subject}"' in printed for line in policy.permissions)


# The requests, backups and trials that pages have their readers type run as they stand, and do what the pages say.


WORKER = Path(__file__).parents[2] / "example_workers" / "worker.mjs"
# The job that the page's requests name.
NAMED = 17
# The trial's own id, and times.
_ID = r"(?<=conform-)[0-9a-f]+|\b\d{10,}(\.\d+)?"
# The server writes the state of a consumer a moment after it has changed.
PERSISTED = 0.4


async def answer_of(terminal: Terminal) -> dict[str, Any]:
    """Send the next request, and return the server's answer."""
    answer: dict[str, Any] = json.loads(await asyncio.to_thread(terminal.run))
    return answer


@pytest.mark.slow
async def test_a_report_accounts_for_a_job_that_is_gone_and_ends_a_letter(
    terminal: Terminal, admin: NatsPyConnection
) -> None:
    queue = await make_queue(admin, "orders_stream", consumer={"sample_freq": "100%"}, deny_delete=False)
    await publish_jobs(admin, queue, map(str, range(NAMED)))
    await acknowledge_jobs(admin, queue, NAMED - 1)
    # Gone, and nothing says how.
    await admin.api("STREAM.MSG.DELETE.orders_stream", {"seq": NAMED})
    assert (await account_for_jobs(admin, queue)).unaccounted == ((NAMED, NAMED),)
    assert (await answer_of(terminal))["stream"] == "orders_stream-audit"
    assert (await account_for_jobs(admin, queue)).unaccounted == ()

    for suffix in ("", "-audit", "-events", "-dead", "-archive"):
        await admin.api(f"STREAM.DELETE.orders_stream{suffix}")
    queue = await make_queue(admin, "orders_stream", consumer={"sample_freq": "100%"})
    await publish_jobs(admin, queue, map(str, range(NAMED - 1)))
    await acknowledge_jobs(admin, queue, NAMED - 1)
    assert await make_dead_letters(admin, queue, ["dead"]) == [NAMED]
    assert [letter.sequence for letter in (await find_dead_letters(admin, queue)).letters] == [NAMED]
    assert (await answer_of(terminal))["stream"] == "orders_stream-audit"
    assert (await find_dead_letters(admin, queue)).letters == ()
    assert await stored_count(admin, "orders_stream") == 1
    assert (await redrive_dead_letters(admin, queue)).redriven == {}
    assert await stored_count(admin, "orders_stream") == 0


@pytest.mark.slow
async def test_a_record_by_hand_makes_the_letter_what_it_says(terminal: Terminal, admin: NatsPyConnection) -> None:
    consumer = {"name": "printer", "filter_subject": "orders.new", "ack_wait": "30s"}
    queue = await make_queue(admin, "orders", subjects=["orders.new"], consumer=consumer, dead_letters="orders-dead")
    for number in range(NAMED):
        await admin.client.jetstream().publish("orders.new", f"page {number}".encode())
    *done, named = await pull_jobs(admin, queue, NAMED, consumer="printer")
    for message in done:
        await message.ack_sync()
    (terminal.folder / "body").write_bytes(named.data)
    assert (await answer_of(terminal))["stream"] == "orders-dead"
    await named.respond(b"+TERM no paper")
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert (letter.sequence, letter.subject, letter.body) == (NAMED, "orders.new", named.data)
    assert (letter.death.reason, letter.death.explanation) == (Reason.TERMINATED, "no paper")


@pytest.mark.slow
async def test_a_cancellation_is_looked_up_by_the_digest_of_the_id(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders")
    token = hashlib.sha256(b"order-16").hexdigest()
    for named, actual in (("<events stream>", "orders-events"), ("<queue>", "orders"), ("<token>", token)):
        terminal.replace(named, actual)
    # As the page finds the events stream.
    assert (await admin.api("STREAM.NAMES", {"subject": "completed.orders.>"}))["streams"] == ["orders-events"]
    assert (await answer_of(terminal))["error"]["err_code"] == 10037
    await publish_jobs(admin, queue, ["a"], headers={"Job-Id": "order-16"})
    await cancel(admin, queue, "order-16", "wrong price")
    terminal.put_back()
    stored = (await answer_of(terminal))["message"]
    (message,) = await stream_messages(admin, "orders-events", f"cancelled.orders.{token}")
    assert (stored["subject"], stored["seq"]) == (message.subject, message.sequence)
    assert stored["time"]


@pytest.mark.slow
def test_conform_prints_which_lines_a_worker_keeps(terminal: Terminal, node_folder: Path, tmp_path: Path) -> None:
    right = "${place.stored}`);\n  for"
    source = WORKER.read_text(encoding="utf-8")
    assert source.count(right) == 1
    # The worker of the page writes seconds where nanoseconds belong.
    (node_folder / "worker.mjs").write_text(source.replace(right, "${Number(place.stored) / 1e9}`);\n  for"))
    terminal.folder = node_folder
    port = free_port()
    terminal.env["NATS_URL"] = f"nats://{LOOPBACK}:{port}"
    options = f"--addr {LOOPBACK} --port {port} --store_dir '{tmp_path}/store' --log '{tmp_path}/log'"
    terminal.add_program("nats-server", f'exec "{find_nats_server()}" "$@" {options}')
    *_, conform = terminal.left
    printed = terminal.run(code=1, count=2, after="code=$?; kill $!; exit $code").splitlines()
    shown = [line for line in conform.shown.splitlines() if line != "…"]
    assert printed[-1] == shown[-1]
    without_ids = {re.sub(_ID, "#", line) for line in printed}
    assert [line for line in shown if re.sub(_ID, "#", line) not in without_ids] == []


@pytest.mark.slow
async def test_a_queue_is_backed_up_and_restored_stream_by_stream(terminal: Terminal, admin: NatsPyConnection) -> None:
    queue = await make_queue(admin, "orders", consumer={"sample_freq": "100%", "max_deliver": 2})
    await make_dead_letters(admin, queue, ["a", "b"])
    await publish_jobs(admin, queue, ["c"])
    await asyncio.sleep(PERSISTED)
    streams = ("orders-audit", "orders", "orders-events", "orders-dead", "orders-archive")
    for _ in streams:
        await asyncio.to_thread(terminal.run)
    counts = {stream: await stored_count(admin, stream) for stream in streams}
    for stream in streams:
        await admin.api(f"STREAM.DELETE.{stream}")
    for _ in streams:
        await asyncio.to_thread(terminal.run)
    assert {stream: await stored_count(admin, stream) for stream in streams} == counts
    findings = await find_dead_letters(admin, queue)
    assert [letter.body for letter in findings.letters] == [b"a", b"b"]
    await redrive_dead_letters(admin, queue)
    assert await process_all(admin, queue) == {"a": 1, "b": 1, "c": 1}


# What pages have their readers export, print for a server or give to Kubernetes is taken by what it is for.


# The hook in a process of its own, which has only what the page exports.
_HOOK = """
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
print(*JetStreamHook().test_connection())
"""
_PASSWORD = "of-the-user"


@pytest.mark.slow
def test_the_hook_reads_the_connection_with_several_servers(terminal: Terminal) -> None:
    with NatsServer(user="airflow", password="…") as server:
        # The first of the two is away.
        terminal.replace("nats-1, nats-2", f"{LOOPBACK}:{free_port()}, {LOOPBACK}:{server.port}")
        printed = run_hook(terminal)
    assert f"True Connected to nats-server {server.version}" in printed


@pytest.mark.slow
def test_the_hook_reads_a_secret_that_is_no_file(terminal: Terminal, tmp_path: Path) -> None:
    mode, tls = operator_mode(), make_tls(tmp_path / "tls")
    # The page's servers have a certificate of an authority that the system knows.
    terminal.env["SSL_CERT_FILE"] = str(tls.ca)
    with NatsServer(tls=tls, config=mode.config) as server:
        terminal.replace("nats.example.org", f"{LOOPBACK}:{server.port}")
        terminal.replace('"…"', json.dumps(mode.credentials))
        printed = run_hook(terminal)
    assert f"True Connected to nats-server {server.version}" in printed


def run_hook(terminal: Terminal) -> str:
    """Run the next command, and connect with the hook in the same shell."""
    terminal.env["AIRFLOW_HOME"] = str(terminal.folder)
    # The connection is to be read from what is exported, and from nothing else.
    terminal.env.pop("NATS_URL")
    return terminal.run(after=f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_HOOK)}")


def handle_settings(job: Delivery) -> dict[str, int]:
    """Do a job."""
    return {"size": len(job.body)}


@pytest.mark.slow
async def test_a_server_takes_the_printed_policy_and_keeps_it(terminal: Terminal) -> None:
    (terminal.folder / "orders.yaml").write_text(yaml.safe_dump(QUEUE))
    queue = WorkQueue.load(QUEUE)
    printed = await asyncio.to_thread(terminal.run)
    (variable,) = re.findall(r"password: \$(\w+)", printed)
    (prefix,) = re.findall(r"inbox_prefix of the connection: (\S+)", printed)
    (user,) = re.findall(r'user: "(\S+)"', printed)
    # Who makes the queue and does its jobs has another user.
    admin = f'users: [\n    {{ user: "admin", password: "{_PASSWORD}" }}'
    # The server's environment, or a line of its configuration, has the password.
    config = f'{variable}: "{_PASSWORD}"\n{printed.replace("users: [", admin, 1)}'
    with NatsServer(config=config) as server:
        everything = ConnectionSettings(servers=(server.url,), user="admin", password=_PASSWORD)
        own = ConnectionSettings(servers=(server.url,), user=user, password=_PASSWORD, inbox_prefix=prefix)
        async with connect(everything) as connection, connect(own) as restricted:
            await provision(connection, queue)
            async with running_worker(Worker(queue, "worker", handle_settings, everything)):
                cursor = await take_cursor(restricted, queue)
                report = await publish(restricted, queue, [Job("a")], subject="orders.jobs.new")
                async with asyncio.timeout(30):
                    assert len((await wait(restricted, cursor, report.sequences)).completed) == 1
            with pytest.raises(PermissionDeniedError, match="redriver") as denied:
                await redrive_dead_letters(restricted, queue)
            assert denied.value.code == "JS106"
    # The second command has the worker's policy, each subject once.
    words = shlex.split((await asyncio.to_thread(terminal.run)).replace("\\\n", " "), comments=True)
    assert words[:5] == ["nsc", "add", "user", "--account", "SHOP"]
    policy = permissions(queue, "worker", consumer="worker")
    assert words[6::2] == [policy.user, *policy.subjects("publish"), *policy.subjects("subscribe")]


@pytest.mark.slow
def test_kubectl_makes_the_objects_that_the_pod_mounts(terminal: Terminal) -> None:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("kubectl isn't installed")
    # No cluster: kubectl prints the objects that it would make.
    terminal.add_program("kubectl", f'exec "{kubectl}" "$@" --dry-run=client --output=yaml')
    terminal.env |= {"KUBECONFIG": "/dev/null", "HOME": str(terminal.folder)}
    (terminal.folder / "example_dags").symlink_to(ROOT / "example_dags")
    (terminal.folder / "user.creds").write_text("credentials")
    made = [yaml.safe_load(terminal.run()) for _ in range(2)]
    objects = [yaml.safe_load(block.code) for block in code_blocks("yaml") if block.page == "docs/kubernetes.md"]
    (pod,) = [
        each["spec"]["template"]["spec"]
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "orders-worker")
    ]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    paths = {
        f"{mounted[volume['name']]}/{key}"
        for volume in pod["volumes"]
        for each in made
        if each["metadata"]["name"]
        in (volume.get("configMap", {}).get("name"), volume.get("secret", {}).get("secretName"))
        for key in each["data"]
    }
    assert paths == {"/etc/queues/orders.yaml", "/var/run/nats/user.creds"}
    text = str(pod["containers"][0])
    assert all(path in text for path in paths)
    declared = WorkQueue.load(yaml.safe_load(made[0]["data"]["orders.yaml"]))
    assert declared == WorkQueue.load(ROOT / "example_dags/queues/orders.yaml")
