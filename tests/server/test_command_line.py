"""The command ``jetstream-queue`` as a process against a real server: results, errors, pipes, hostile text."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import airflow_provider_jetstream
from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    WorkQueue,
    find_dead_letters,
    redrive_dead_letters,
)
from testbed.dead_letters import publish_raw, stream_messages
from testbed.face import find_cancellation
from testbed.nats_server import NatsServer
from testbed.ports import free_port
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
    wait_for_entries,
)

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import RedriveReport
    from testbed.face import NatsPyConnection

_PROGRAM = [sys.executable, "-m", "airflow_provider_jetstream.command.program"]
ESCAPES = b"\x1b[2J\x1b]0;owned\x07\x00\x9b31m"


def environment(server: NatsServer | None = None, **values: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    return clean | ({"NATS_URL": server.url} if server else {}) | {"COLUMNS": "200"} | values


def run(server: NatsServer | None, *arguments: object, stdin: bytes = b"", **values: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*_PROGRAM, *map(str, arguments)],
        capture_output=True,
        check=False,
        timeout=120,
        input=stdin,
        env=environment(server, **values),
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def command(server: NatsServer, *arguments: object, code: int = 0, stdin: bytes = b"") -> str:
    found = await asyncio.to_thread(run, server, *arguments, stdin=stdin)
    assert found[0] == code, found
    assert "Traceback" not in found[2], found[2]
    return found[1]


async def as_json(server: NatsServer, *arguments: object, code: int = 0) -> Any:
    return json.loads(await command(server, *arguments, "--json", code=code))


@pytest.mark.slow
async def test_a_queue_is_planned_applied_linted_shown_and_imported_unchanged(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "queue.yaml"
    file.write_text(small_queue(name, consumer={"sample_freq": "100%"}).to_yaml())
    planned = await as_json(nats, "queue", "plan", file, code=1)
    assert planned["changes"] == len(planned["steps"]) > 3
    applied = await as_json(nats, "queue", "apply", file)
    assert [step["name"] for step in applied["steps"]] == [step["name"] for step in planned["steps"]]
    assert "nothing to change" in await command(nats, "queue", "plan", file)
    assert [warning["name"] for warning in await as_json(nats, "queue", "lint", file, code=1)] == ["unbounded-archive"]
    # As the source documents do it: a stream and a consumer by the server's own API, without anything else.
    made_by_hand = f"{name}-hand"
    await connection.api(
        f"STREAM.CREATE.{made_by_hand}",
        {
            "name": made_by_hand,
            "subjects": [f"{made_by_hand}.>"],
            "retention": "workqueue",
            "max_age": 7 * 86_400 * 10**9,
        },
    )
    config = {"durable_name": "w", "ack_policy": "explicit", "max_deliver": 3, "ack_wait": 5 * 10**9}
    await connection.api(f"CONSUMER.DURABLE.CREATE.{made_by_hand}.w", {"stream_name": made_by_hand, "config": config})
    imported = tmp_path / "hand.yaml"
    assert await command(nats, "queue", "import", made_by_hand, "--out", imported) == ""
    assert WorkQueue.load(str(imported)).consumer("w").max_deliver == 3
    assert (await as_json(nats, "queue", "plan", imported))["changes"] == 0
    imported.write_text(await command(nats, "queue", "import", made_by_hand))
    assert (await as_json(nats, "queue", "plan", imported))["changes"] == 0
    assert [warning["name"] for warning in await as_json(nats, "queue", "lint", imported, "--running", code=1)]
    await publish_jobs(connection, small_queue(name), ["a", "b"])
    shown = await as_json(nats, "queue", "show", name)
    assert (shown["pending"], [consumer["consumer"] for consumer in shown["consumers"]]) == (2, [CONSUMER])
    assert "2 pending" in await command(nats, "queue", "show", file)
    listed = {queue["queue"]: queue for queue in await as_json(nats, "queues")}
    assert (listed[name]["pending"], listed[name]["dead_letter_queue"]) == (2, f"{name}-dead")
    assert listed[made_by_hand]["dead_letter_queue"] is None
    assert name in await command(nats, "queues")


@pytest.mark.slow
async def test_buckets_are_no_queues_and_shown_as_none(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    """Only a stream of work-queue retention is a queue, and no bucket of another tool, whatever its retention."""
    bucket, retention = name.replace("-", "_"), {"retention": "workqueue"}
    streams: dict[str, dict[str, Any]] = {
        f"KV_{bucket}": {"subjects": [f"$KV.{bucket}.>"], "max_msgs_per_subject": 1},
        f"KV_{bucket}_jobs": {"subjects": [f"$KV.{bucket}_jobs.>"], **retention},
        f"OBJ_{bucket}": {"subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"]},
        f"OBJ_{bucket}_jobs": {"subjects": [f"$O.{bucket}_jobs.C.>"], **retention},
        f"KV_{bucket}_copy": {"mirror": {"name": f"KV_{bucket}"}},
        f"{name}-log": {"subjects": [f"log.{name}"]},
        f"{name}-interest": {"subjects": [f"interest.{name}"], "retention": "interest"},
    }
    own = {f"KV_{name}-mine": {"subjects": [f"{name}.>"], **retention}}
    for stream, config in (streams | own).items():
        await connection.api(f"STREAM.CREATE.{stream}", {"name": stream, "storage": "memory", **config})
    listed = {queue["queue"] for queue in await as_json(nats, "queues")}
    assert listed & (streams | own).keys() == own.keys()
    for stream in streams:
        code, out, error = await asyncio.to_thread(run, nats, "queue", "show", stream)
        assert (code, out) == (2, ""), stream
        assert f"work queue '{stream}' can't be used" in error
        assert "expected a" in error
    assert "0 stored" in await command(nats, "queue", "show", *own)


@pytest.mark.slow
async def test_letters_are_listed_selected_grouped_shown_and_diagnosed(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    body = '{"a":1,"a":2,"f":1.10}'
    first = await make_dead_letters(connection, queue, [body, "two"], headers={"Job-Id": "j1"})
    await make_dead_letters(connection, queue, ["three"], kind="other")
    lines = (await command(nats, "letters", "list", name, "--json")).splitlines()
    assert [json.loads(line)["sequence"] for line in lines] == [1, 2, 3]
    assert len((await command(nats, "letters", "list", name, "--limit", 2)).splitlines()) == 3
    selected = await command(nats, "letters", "list", name, "--subject", f"{name}.jobs.other", "--json")
    assert [json.loads(line)["sequence"] for line in selected.splitlines()] == [3]
    ranged = await command(nats, "letters", "list", name, "--sequence", "2-9", "--json")
    assert [json.loads(line)["sequence"] for line in ranged.splitlines()] == [2, 3]
    groups = await as_json(nats, "letters", "groups", name, "--by", "subject")
    assert [group["count"] for group in groups["groups"]] == [2, 1]
    shown = await as_json(nats, "letters", "show", name, first[0])
    assert (shown["body"], shown["job_id"]) == (body, "j1")
    assert await command(nats, "letters", "show", name, first[0], "--raw") == body
    assert body in await command(nats, "letters", "show", name, first[0])
    diagnosis = await as_json(nats, "letters", "diagnose", name, code=1)
    assert (diagnosis["dead"], diagnosis["action"]) == (3, "wait")
    assert "still failing: don't redrive yet" in await command(nats, "letters", "diagnose", name, code=1)
    await command(nats, "letters", "show", name, 99, code=5)


@pytest.mark.slow
async def test_an_account_is_made_of_a_queue_and_names_what_was_purged(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, consumer={"sample_freq": "100%"}, jobs=["a", "b"])
    account = await as_json(nats, "account", name)
    assert (account["jobs"], account["stored"], account["unaccounted"], account["not_known"]) == (2, 2, 0, 0)
    await connection.api(f"STREAM.PURGE.{name}")
    account = await as_json(nats, "account", name, code=1)
    assert (account["gone"], account["unaccounted_sequences"]) == (2, [[1, 2]])
    assert f"2 jobs of {name}: 0 stored, 0 ended, 2 unaccounted (1-2)" in await command(nats, "account", name, code=1)
    await command(nats, "redrive", "start", name, "--sequence", "1-2")
    assert await stored_count(connection, name) == 2
    await command(nats, "account", name)


@pytest.mark.slow
async def test_jobs_are_found_where_they_are_stored_and_cancelled(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["dead"], headers={"Job-Id": "j0"})
    await publish_jobs(connection, queue, ['{"id": "j1", "city": "Gent"}', "b"], headers={"Tenant": "acme"})
    lines = (await command(nats, "jobs", "find", name, "--header", "Tenant=acme", "--json")).splitlines()
    assert [(job["sequence"], job["job_id"], job["state"]) for job in map(json.loads, lines)] == [
        (2, "j1", "pending"),
        (3, "3", "pending"),
    ]
    assert "delivered" in await command(nats, "jobs", "find", name, "--id", "j0")
    assert "j1" in await command(nats, "jobs", "find", name, "--text", "Gent", "--subject", f"{name}.jobs.>")
    assert "no such job" in await command(nats, "jobs", "find", name, "--id", "j9", code=1)
    (cancelled,) = await as_json(nats, "jobs", "cancel", name, "j1", "--why", "a mistake")
    assert (cancelled["job_id"], cancelled["schedules"]) == ("j1", 0)
    found = await find_cancellation(connection, queue, "j1", datetime.fromtimestamp(0, UTC))
    assert found
    assert found.why == "a mistake"
    await command(nats, "jobs", "cancel", name, "", code=2)


@pytest.mark.slow
async def test_a_letter_is_edited_with_a_difference_before_it_is_redriven(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name)
    (letter,) = await make_dead_letters(connection, queue, ['{"amount": 1.10}'])
    file = tmp_path / "body"
    file.write_text('{"amount": 2.20}')
    edit = ("letters", "edit", name, letter)
    text = await command(nats, *edit, "--body", file, "--dry-run")
    assert '-{"amount": 1.10}' in text
    assert '+{"amount": 2.20}' in text
    assert "no difference" in await command(nats, *edit, "--body", "-", stdin=b'{"amount": 1.10}')
    # Nobody can be asked, and nothing is redriven without an answer.
    await command(nats, *edit, "--body", file, code=2)
    done = await as_json(nats, *edit, "--body", file, "--yes", "--why", "wrong amount")
    assert done["redriven"] == 2
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.data == b'{"amount": 2.20}'


@pytest.mark.slow
async def test_a_hostile_letter_acts_on_no_terminal(nats: NatsServer, connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    headers = b"Job-Id: \xff" + ESCAPES.replace(b"\x00", b"") + b"\r\nX-\xe2\x80\xae: \xe2\x80\xaegnp.exe"
    await publish_raw(nats, f"{name}.jobs.\udcff", headers, ESCAPES + b"\xff\xfe[bold red]x[/]" + "\u202e".encode())
    await exhaust_deliveries(connection, queue, 1)
    for arguments in (["list"], ["groups"], ["show", "1"], ["diagnose"]):
        verb, *rest = arguments
        for form in ([], ["--json"]):
            text = await command(nats, "letters", verb, name, *rest, *form, code=1 if verb == "diagnose" else 0)
            assert text
            assert all(character.isprintable() or character in "\n\t" for character in text), repr(text)
    shown = json.loads(await command(nats, "letters", "show", name, 1, "--json"))
    assert shown["body"] is None
    assert shown["body_base64"]
    # In an encoding that hasn't the characters, too.
    found = await asyncio.to_thread(run, nats, "letters", "show", name, 1, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert found[0] == 0, found


@pytest.mark.slow
async def test_ten_thousand_letters_are_listed_in_flat_memory_and_a_closed_pipe_is_no_traceback(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    peaks = []
    for count in (500, 10_000):
        queue = await make_queue(connection, f"{name}-{count}", consumer={"max_ack_pending": -1, "ack_wait": "60s"})
        jetstream, body = connection.client.jetstream(), b"x" * 2_000
        for start in range(0, count, 1_000):
            subject = f"{queue.name}.jobs.plain"
            await asyncio.gather(*(jetstream.publish(subject, body) for _ in range(min(1_000, count - start))))
        left = count
        while left:
            messages = await pull_jobs(connection, queue, min(left, 2_000), within=60)
            left -= len(messages)
            for message in messages:
                await message.nak()
        await wait_for_entries(connection, queue, count)
        listing = ["letters", "list", queue.name, "--json"]
        lines, peak = await asyncio.to_thread(read_lines, nats, listing)
        assert lines == count
        peaks.append(peak)
    # 10,000 bodies of 2,000 bytes alone are 20 MB.
    assert peaks[1] - peaks[0] < 16 * 2**20, peaks
    await asyncio.to_thread(read_one_line, nats, listing)


def read_lines(server: NatsServer, arguments: list[str]) -> tuple[int, int]:
    """Return how many lines a command prints, and how much memory it had while it printed them."""
    process = subprocess.Popen([*_PROGRAM, *arguments], stdout=subprocess.PIPE, env=environment(server))
    assert process.stdout
    lines = peak = 0
    while process.stdout.readline():
        lines += 1
        if lines % 500 == 1:
            peak = max(peak, psutil.Process(process.pid).memory_info().rss)
    assert process.wait(30) == 0
    return lines, peak


def read_one_line(server: NatsServer, arguments: list[str]) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*_PROGRAM, *arguments], stdout=pipe, stderr=pipe, env=environment(server))
    assert process.stdout
    assert process.stderr
    assert json.loads(process.stdout.readline())["sequence"] == 1
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 141


@pytest.mark.slow
def test_errors_have_their_own_exit_codes(tmp_path: Path) -> None:
    form = ["--json"]
    away = f"nats://127.0.0.1:{free_port()}"
    code, out, error = run(None, "queues", "--server", away, "--timeout", "3", *form)
    assert (code, out) == (3, "")
    assert "no NATS server reached" in error
    with NatsServer(user="ann", password="secret-word") as server:
        for arguments in (["queues", *form], ["letters", "list", "orders"]):
            code, out, error = run(server, *arguments, "--user", "ann", "--password", "wrong")
            assert (code, out) == (4, "")
            assert "warning: --password is in the list of processes" in error
            assert "wrong" not in error.replace("wrong credentials", "")
        password = tmp_path / "password"
        password.write_text("secret-word")
        code, out, error = run(server, "queues", "--user", "ann", "--password-file", password, *form, NATS_TOKEN="x")
        assert (code, error) == (0, "")
        code, _, error = run(server, "queue", "show", "missing", *form, NATS_USER="ann", NATS_PASSWORD="secret-word")
        assert code == 5
        assert json.loads(error)["error"]["code"] == "JS113"
    # What would be a part of a request's subject is no stream's name.
    for name in ("a b", "orders\r\nPUB x", ">", "\udcff"):
        code, out, error = run(None, "queue", "show", name, *form)
        assert (code, out) == (2, ""), error
        assert "Traceback" not in error
    assert run(None, "queue", "plan", tmp_path / "missing.yaml", *form)[0] == 2
    assert run(None, "letters", "list", "orders", "--older-than", "yesterday", "--server", away, *form)[0] == 2
    assert run(None, "queues", "--context", tmp_path / "none.json", *form)[0] == 2
    assert run(None, "queues", "--server", away, "--tls-cert-file", "x", *form)[0] == 2


@pytest.mark.slow
def test_the_program_says_its_version_and_what_it_can_do() -> None:
    assert run(None, "--version")[:2] == (0, f"jetstream-queue {airflow_provider_jetstream.__version__}\n")
    code, text, _ = run(None, "letters", "--help")
    assert code == 0
    assert "diagnose" in text
    assert run(None)[0] == 2
    assert run(None, "letters", "list", "q", "--sequence", "9-3")[0] == 2
    for sequences in ("1-99999999999999999999", "1-" + "9" * 100_000):
        status, _, error = run(None, "letters", "list", "q", "--sequence", sequences)
        assert (status, "expected a" in error) == (2, True)


@pytest.mark.slow
def test_the_shell_completes_commands(tmp_path: Path) -> None:
    file, line = tmp_path / "completions", "jetstream-queue letters di"
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    run(None, stdin=b"", **shell, _ARGCOMPLETE_STDOUT_FILENAME=str(file))
    assert file.read_text().split() == ["diagnose"]


@pytest.mark.slow
async def test_the_list_of_queues_and_a_diagnosis_agree_about_jobs_that_may_be_dead(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    """Without entries nobody knows which jobs are dead while others are in flight: neither says that none is dead."""
    queue = await make_queue(connection, name, consumer={"max_deliver": 1, "ack_wait": "60s"}, dead=["a", "b"])
    await connection.api(f"STREAM.PURGE.{name}-dead")
    await publish_jobs(connection, queue, ["c"])
    (working,) = await pull_jobs(connection, queue, 1)
    _, table, noted = await asyncio.to_thread(run, nats, "queues")
    code, out, error = await asyncio.to_thread(run, nats, "letters", "diagnose", name)
    (row,) = [line.split() for line in table.splitlines() if line.startswith(f"{name} ")]
    assert row[1:5] == ["0", "1", "2", "0"]
    assert (code, error) == (1, "")
    assert f"{name}: no dead letters are proved: 2 jobs may be dead" in out
    assert f"warning: 2 of the 2 dead jobs of {name} have no entry in {name}-dead: " in noted
    await working.ack()


# ``jetstream-queue redrive`` as processes against a real server: a few, waves, steering from elsewhere, Ctrl-C.


SAMPLED = {"sample_freq": "100%", "ack_wait": "5s"}


def start(server: NatsServer, *arguments: object) -> subprocess.Popen[str]:
    words = [*_PROGRAM, "redrive", "start", *map(str, arguments), "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment(server))


async def ended(process: subprocess.Popen[str]) -> tuple[int, Any, str]:
    out, error = await asyncio.to_thread(process.communicate, timeout=120)
    assert "Traceback" not in error, error
    return process.returncode, json.loads(out), error


@pytest.mark.slow
async def test_a_few_letters_are_redriven_and_their_outcome_is_awaited(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead=[str(number) for number in range(5)])
    dry = await as_json(nats, "redrive", "start", name, "--dry-run")
    assert (dry["dry_run"], dry["redriven"]) == (True, 5)
    assert "5 would be redriven" in await command(nats, "redrive", "start", name, "--dry-run")
    assert await stored_count(connection, name) == 5
    process = start(nats, name, "--first", 2, "--why", "a fix")
    done = [await message.ack_sync() for message in await pull_jobs(connection, queue, 2, within=60)]
    code, report, _ = await ended(process)
    assert (code, len(done), report["redriven"], report["state"]) == (0, 2, 2, "finished")
    assert report["outcomes"]["completed"] == 2
    (listed,) = await as_json(nats, "redrive", "status", name)
    assert (listed["id"], listed["why"], listed["who"]["by"]) == (report["redrive"], "a fix", "jetstream-queue")
    assert report["redrive"] in await command(nats, "redrive", "status", name)
    assert "2 completed after the redrive" in await command(nats, "redrive", "status", name, report["redrive"])
    assert await stored_count(connection, name) == 3
    # What has ended can't be steered any more.
    await command(nats, "redrive", "pause", name, report["redrive"], code=2)
    await command(nats, "redrive", "pause", name, "missing", code=5)


@pytest.mark.slow
async def test_letters_are_discarded_with_a_reason_and_brought_back_by_the_redrives_id(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name, consumer={"ack_wait": "50ms"}, dead=["a", "b", "c"])
    dry = await as_json(nats, "redrive", "discard", name, "--sequence", "1-2", "--dry-run")
    assert (dry["discarded"], dry["without_copy"], dry["redriven"]) == (2, 0, 0)
    assert await stored_count(connection, name) == 3
    report = await as_json(nats, "redrive", "discard", name, "--sequence", "1-2", "--why", "a test shop")
    assert (report["discarded"], report["state"]) == (2, "finished")
    assert await stored_count(connection, name) == 1
    shown = await command(nats, "redrive", "status", name, report["redrive"])
    assert "0 redriven, 0 parked, 2 discarded, 0 failed" in shown
    assert "(a test shop)" in shown
    assert "2 parked" in await command(nats, "redrive", "undo", name, report["redrive"], "--dry-run")
    one = await as_json(nats, "redrive", "undo", name, report["redrive"], "--sequence", 2)
    assert one["parked"] == 1
    assert "1 parked" in await command(nats, "redrive", "undo", name, report["redrive"])
    lines = (await command(nats, "letters", "list", name, "--parked", "--json")).splitlines()
    assert [json.loads(line)["sequence"] for line in lines] == [1, 2]
    # Nothing is left to bring back; nor is there where nothing was discarded.
    assert (await as_json(nats, "redrive", "undo", name, report["redrive"]))["parked"] == 0
    await command(nats, "redrive", "undo", name, report["redrive"], "--sequence", 3, code=5)
    await command(nats, "redrive", "undo", name, one["redrive"], code=2)


@pytest.mark.slow
async def test_a_wave_that_dies_again_waits_at_its_gate_for_another_process(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead=[str(number) for number in range(5)])
    process = start(nats, name, "--waves", "2,rest")
    for message in await pull_jobs(connection, queue, 2, within=60):
        await message.term()

    async def at_gate() -> str | None:
        redrives = await as_json(nats, "redrive", "status", name)
        return redrives[0]["id"] if redrives and redrives[0]["state"] == "at_gate" else None

    redrive = await eventually(at_gate, within=60)
    text = await command(nats, "redrive", "abort", name, redrive, "--why", "it still fails")
    assert "aborted" in text
    assert "2 died again" in text
    code, report, _ = await ended(process)
    assert (code, report["state"], report["redriven"]) == (1, "aborted", 2)
    shown = await as_json(nats, "redrive", "status", name, redrive)
    assert [control["action"] for control in shown["controls"]] == ["abort"]


@pytest.mark.slow
async def test_ctrl_c_stops_a_redrive_which_goes_on_and_brings_each_letter_back_once(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    bodies = [str(number) for number in range(40)]
    await make_dead_letters(connection, queue, bodies)
    process = start(nats, name, "--rate", 5)

    async def began() -> bool:
        return any(message.header("Redrive-Count") for message in await stream_messages(connection, name))

    await eventually(began, within=60)
    process.send_signal(signal.SIGINT)
    code, report, error = await ended(process)
    assert code == 130
    assert 0 < report["redriven"] < len(bodies)
    (key,) = re.findall(r"--run (\S+) goes on", error)
    assert key == report["run"]
    rest = await as_json(nats, "redrive", "start", name, "--run", key)
    assert (rest["state"], rest["failed"]) == ("finished", 0)
    done = await process_all(connection, queue, within=60)
    assert done == dict.fromkeys(bodies, 1)


@pytest.mark.slow
async def test_a_redrive_right_after_a_death_says_until_when_it_waits(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    """A worker may have a job until its ack wait has passed: commands say until when, and can be stopped."""
    queue = await make_queue(connection, name, consumer={"ack_wait": "600s"})
    sequences = await make_dead_letters(connection, queue, ["a", "b"])
    ready = max(letter.ready_at for letter in (await find_dead_letters(connection, queue)).letters)
    edit = (*_PROGRAM, "letters", "edit", name, str(sequences[1]), "--body", "-", "--yes")
    starts = (*_PROGRAM, "redrive", "start", name, "--json"), (*_PROGRAM, "redrive", "start", name, "--first", "2")
    for words in (*starts, edit):
        process = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(nats)
        )
        assert process.stdin
        assert process.stderr
        process.stdin.write_eof()
        async with asyncio.timeout(30):
            said = (await process.stderr.readline()).decode()
            assert said.startswith("waits until "), said
            moment = datetime.strptime(said.split(", ", 1)[0], "waits until %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
            assert ready <= moment <= ready + timedelta(seconds=1)
            assert "ack wait" in said
            process.send_signal(signal.SIGINT)
            await process.communicate()
        assert process.returncode == 130
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == sequences


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_a_wait_for_slow_workers_is_in_the_log_and_the_progress(
    connection: NatsPyConnection, name: str, protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "600s"})
    sequences = await make_dead_letters(connection, queue, ["a", "b"])
    stop, said = asyncio.Event(), list[str]()

    def note(report: RedriveReport) -> None:
        if report.waiting:
            said.append(report.waiting)
            stop.set()

    caplog.set_level("INFO")
    async with asyncio.timeout(30):
        report = await redrive_dead_letters(
            *(connection, queue, RedriveRequest(protocol=protocol)), progress=note, stopped=stop.is_set
        )
    assert (report.cancelled, report.waiting, dict(report.redriven)) == (True, "", {})
    assert said
    assert f"The redrive of {name} waits {said[0]}" in caplog.text
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == sequences
