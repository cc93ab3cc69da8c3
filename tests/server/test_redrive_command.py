"""``jetstream-queue redrive`` as processes against a real server: a few, waves, steering from elsewhere, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from test_command_line import as_json, command, environment

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    find_dead_letters,
    redrive_dead_letters,
)
from testbed.dead_letters import stream_messages
from testbed.queues import eventually, make_dead_letters, make_queue, process_all, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import RedriveReport
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_PROGRAM = [sys.executable, "-m", "airflow_provider_jetstream.command.program"]
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
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_dead_letters(connection, queue, [str(number) for number in range(5)])
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
async def test_a_wave_that_dies_again_waits_at_its_gate_for_another_process(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_dead_letters(connection, queue, [str(number) for number in range(5)])
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
    queue = await make_queue(connection, name, consumer={"ack_wait": "600s"}, atomic_redrive=True)
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
