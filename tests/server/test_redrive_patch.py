"""Many letters changed by a JSON Patch: the preview, what is stored, what stays, and what the audit keeps."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from test_command_line import as_json, command

from airflow_provider_jetstream.jetstream import RedriveRequest, preview, read_redrive, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.dead_letters import make_terminated_letters, stream_messages
from testbed.face import open_audit
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

PATCH = '[{"op":"test","path":"/currency","value":"usd"},{"op":"replace","path":"/currency","value":"EUR"}]'
FIT = [b'{"n":1, "f":1.10,"currency":"usd"}', b'{"currency" : "usd","n":2,"big":123456789012345678901234567890}']
UNFIT = [
    b'{"n":3,"currency":"GBP"}',
    b'{"n":4}',
    b'{"n":5,"currency":"usd","currency":"usd"}',
    b"\xff\x00",
    b"plain text",
]
NO_SUCH_VALUE = (
    "operation 1 of the patch, test /currency: the body has another value there, or none; the letter is untouched"
)


async def bodies(connection: NatsPyConnection, stream: str) -> dict[int, bytes]:
    return {message.sequence: message.data for message in await stream_messages(connection, stream)}


async def records(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> Any:
    audit = await open_audit(connection, queue)
    return await audit.last_record(sequence)


@pytest.mark.slow
@pytest.mark.parametrize("terminated", [False, True])
async def test_letters_that_fit_are_changed_and_the_others_stay_byte_for_byte(
    connection: NatsPyConnection, name: str, *, terminated: bool
) -> None:
    queue = await make_queue(connection, name)
    make = make_terminated_letters if terminated else make_dead_letters
    await make(connection, queue, [*FIT, *UNFIT])
    before = await bodies(connection, name)
    request = RedriveRequest(patch=PATCH, why="the bank wants EUR", who={"person": "Ann"})
    shown = (await preview(connection, queue, request)).as_json()
    assert await bodies(connection, name) == before
    assert (shown["redriven"], shown["changed"], shown["failed"]) == (2, 2, 5)
    assert shown["causes"][NO_SUCH_VALUE] == 2
    assert sum(shown["causes"].values()) == 5
    assert [letter["sequence"] for letter in shown["sample"]] == [1, 2]
    assert '-  "currency": "usd"\n+  "currency": "EUR"' in shown["sample"][0]["difference"]
    assert '   "f": 1.10,' in shown["sample"][0]["difference"]
    report = await redrive_dead_letters(connection, queue, request)
    assert (sorted(report.redriven), sorted(report.failed)) == ([1, 2], [3, 4, 5, 6, 7])
    assert report.failed[3] == report.failed[4] == NO_SUCH_VALUE
    assert 'found "currency" twice' in report.failed[5]
    assert "aren't UTF-8" in report.failed[6]
    assert "expected JSON" in report.failed[7]
    after = await bodies(connection, name)
    for sequence, body in enumerate(FIT, 1):
        assert after[report.redriven[sequence]] == body.replace(b'"usd"', b'"EUR"')
    assert {number: body for number, body in after.items() if number <= 7} == (
        {} if terminated else dict(enumerate(UNFIT, 3))
    )
    # The letters that stayed are letters still, and the whole of each is there.
    left = await preview(connection, queue, RedriveRequest())
    assert left.redriven == 5
    # The audit keeps the change: the patch with the redrive, and with each letter what it changed there.
    redrive = await read_redrive(connection, queue, report.redrive)
    assert (redrive.plan["patch"], redrive.failed, redrive.state) == (PATCH, 5, "failed")
    record = await records(connection, queue, 1)
    assert record.changes["body"] == {"currency": {"before": "usd", "after": "EUR"}}
    assert record.changes["sha256"] == {
        "before": sha256(FIT[0]).hexdigest(),
        "after": sha256(after[report.redriven[1]]).hexdigest(),
    }
    assert (record.why, record.who["person"]) == ("the bank wants EUR", "Ann")


@pytest.mark.slow
async def test_a_letter_that_a_patch_does_not_change_comes_back_as_it_is(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, [b'{"a": 1}', b'{"a": 2}'])
    request = RedriveRequest(patch=[{"op": "replace", "path": "/a", "value": 2}])
    shown = await preview(connection, queue, request)
    assert (shown.redriven, shown.changed) == (2, 1)
    assert [letter["sequence"] for letter in shown.sample] == [1]
    report = await redrive_dead_letters(connection, queue, request)
    after = await bodies(connection, name)
    assert [after[report.redriven[number]] for number in (1, 2)] == [b'{"a": 2}', b'{"a": 2}']
    assert (await records(connection, queue, 2)).changes is None


@pytest.mark.slow
async def test_a_redrive_that_goes_on_gets_its_patch_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, [b'{"a":1}', b'{"b":1}'])
    first = await redrive_dead_letters(
        connection, queue, RedriveRequest(patch=[{"op": "remove", "path": "/a"}], run="fix")
    )
    assert (list(first.redriven), list(first.failed)) == ([1], [2])
    with pytest.raises(RedriveRequestError, match=r"expected a patch for the letters that are left, .* found none"):
        await redrive_dead_letters(connection, queue, RedriveRequest(run="fix"))
    assert (await bodies(connection, name))[2] == b'{"b":1}'
    other = '[{"op":"remove","path":"/b"}]'
    rest = await redrive_dead_letters(connection, queue, RedriveRequest(patch=other, run="fix"))
    assert (rest.redrive, sorted(rest.redriven), rest.failures) == (first.redrive, [1, 2], 0)
    assert (await bodies(connection, name))[rest.redriven[2]] == b"{}"
    assert (await read_redrive(connection, queue, rest.redrive)).plan["patch"] == other


@pytest.mark.slow
async def test_a_patched_copy_that_is_too_large_is_not_brought_back_unchanged(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=2_000)
    await make_dead_letters(connection, queue, [b'{"a":1}'])
    request = RedriveRequest(patch=[{"op": "add", "path": "/b", "value": "x" * 2_000}])
    shown = await preview(connection, queue, request)
    report = await redrive_dead_letters(connection, queue, request)
    assert (shown.redriven, shown.failures, len(report.redriven), report.failures) == (0, 1, 0, 1)
    assert "expected a copy of at most 2000 bytes" in report.failed[1]
    assert await bodies(connection, name) == {1: b'{"a":1}'}


@pytest.mark.slow
async def test_the_command_shows_the_difference_and_redrives_with_the_patch(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, [*FIT, b'{"n":"\\u001b[31m\x1b"}', UNFIT[0]])
    file = tmp_path / "fix.json"
    file.write_text(PATCH)
    start = ("redrive", "start", name)
    text = await command(nats, *start, "--patch", file, "--dry-run", code=1)
    assert "dry run: 2 would be redriven, 0 parked, 2 would stay" in text
    assert "2 of them would be changed" in text
    assert '-  "currency": "usd"\n+  "currency": "EUR"' in text
    shown = await as_json(nats, *start, "--patch", PATCH, "--dry-run", code=1)
    assert (shown["changed"], shown["failed"]) == (2, 2)
    for wrong in ("[]", str(tmp_path / "missing"), '[{"op":"remove"}]'):
        await command(nats, *start, "--patch", wrong, "--dry-run", code=2)
    assert len(await bodies(connection, name)) == 4
    report = await as_json(nats, *start, "--patch", file, "--sequence", "1-2", "--why", "EUR")
    assert (report["redriven"], report["failed"]) == (2, 0)
    assert FIT[0].replace(b'"usd"', b'"EUR"') in (await bodies(connection, name)).values()
    assert f"with the patch {PATCH}" in await command(nats, "redrive", "status", name, report["redrive"])
    status = await as_json(nats, "redrive", "status", name, report["redrive"])
    assert json.loads(status["plan"]["patch"]) == json.loads(PATCH)
