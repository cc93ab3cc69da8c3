"""Repairs of letters by a redrive, and their records in the audit."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from test_command_line import as_json, command

from airflow_provider_jetstream.jetstream import (
    JsonPatch,
    RedriveRequest,
    Repair,
    Selection,
    find_dead_letters,
    preview,
    read_redrive,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.dead_letters import letter_records, make_terminated_letters, publish_raw, stored_message, stream_messages
from testbed.face import Headers, open_audit
from testbed.queues import exhaust_deliveries, make_dead_letters, make_queue, process_all, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


@pytest.mark.slow
async def test_the_repaired_job_is_stored_and_the_audit_records_the_difference(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    pairs = (("Tag", "one"), ("Tag", "two"), ("Customer", "x"), ("Old", "1"), ("Nats-Msg-Id", "first"))
    body = json.dumps({"id": 7, "amount": "12,50", "secret": "x" * 600}).encode()
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=Headers(pairs))
    await exhaust_deliveries(connection, queue, 1)

    def repair(letter: DeadLetter) -> Repair:
        fields = json.loads(letter.body)
        del fields["secret"]
        return Repair(fields | {"amount": 12.5}, {"Customer": "Ünal", "Old": None, "New": "n"})

    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=repair))
    report.raise_for_failures()
    copy = await stored_message(connection, name, report.redriven[1])
    assert json.loads(copy.data) == {"id": 7, "amount": 12.5}
    own = [pair for pair in copy.headers if not pair[0].startswith(("Nats-", "Redrive-"))]
    assert own == [("Tag", "one"), ("Tag", "two"), ("Customer", "Ünal"), ("New", "n")]
    assert copy.header("Nats-Msg-Id") != "first"
    (record,) = await letter_records(connection, queue)
    assert record.changes == {
        "body": {
            "amount": {"before": "12,50", "after": 12.5},
            "secret": {"before": "x" * 500 + "… (600 characters)", "after": None},
        },
        "headers": {
            "Customer": {"before": ["x"], "after": "Ünal"},
            "Old": {"before": ["1"], "after": None},
            "New": {"before": None, "after": "n"},
        },
    }


@pytest.mark.slow
async def test_a_transform_that_raises_or_returns_an_invalid_repair_fails_only_its_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = ["raises", "returns", "unserialisable", "servers", "large", "unchanged", "good"]
    await make_dead_letters(connection, queue, jobs)
    before = {number: await stored_message(connection, name, number) for number in range(1, 8)}

    def repair(letter: DeadLetter) -> Repair | None:
        match letter.body:
            case b"raises":
                raise ValueError("no such customer")
            case b"returns":
                return {"body": 1}  # type: ignore[return-value]
            case b"unserialisable":
                return Repair(object())
            case b"servers":
                return Repair(headers={"Nats-Msg-Id": "mine"})
            case b"large":
                return Repair("x" * connection.client.max_payload)
            case b"good":
                return Repair("better")
        return None

    request = RedriveRequest(transform=repair)
    shown = await preview(connection, queue, request)
    report = await redrive_dead_letters(connection, queue, request)
    assert report.redriven == {6: 8, 7: 9}
    assert shown.failed == report.failed
    assert (shown.redriven, shown.failures, report.failures) == (2, 5, 5)
    causes = {
        1: "the transform raised ValueError: no such customer; the letter is untouched",
        2: "expected the transform to return a Repair, or None for no change, found dict; the letter is untouched",
        3: "the transform's repair can't be sent: expected a body of bytes, text or JSON values, found object: .*",
        4: "the transform's repair can't be sent: job 4 sets Nats-Msg-Id: headers starting with Nats- belong to .*",
        5: r"expected a copy of at most \d+ bytes \(the server's max_payload\), found \d+ for job 5, \d+ of them .*",
    }
    for number, expected in causes.items():
        assert re.fullmatch(expected, report.failed[number])
        assert await stored_message(connection, name, number) == before[number]
    assert [record.changes is None for record in await letter_records(connection, queue)] == [True, False]
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 2, 3, 4, 5]
    assert await process_all(connection, queue) == {"unchanged": 1, "better": 1}
    assert set((await redrive_dead_letters(connection, queue)).redriven) == {1, 2, 3, 4, 5}
    assert await process_all(connection, queue) == dict.fromkeys(jobs[:5], 1)


@pytest.mark.slow
async def test_text_that_utf_8_cannot_represent_is_repaired_and_recorded(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_raw(nats, f"{name}.jobs.a", b"City: K\xf6ln\r\nTwo Words: x", b'{"name": "\\ud800"}')
    await exhaust_deliveries(connection, queue, 1)
    repair = Repair({"name": "?"}, {"City": "Köln", "Two Words": None})
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=lambda _: repair))
    assert report.redriven == {1: 2}
    copy = await stored_message(connection, name, 2)
    assert (copy.data, copy.header("City"), copy.header("Two Words")) == (b'{"name":"?"}', "Köln", None)
    (record,) = await letter_records(connection, queue)
    assert record.changes is not None
    assert record.changes["headers"] == {
        "City": {"before": ["K?ln"], "after": "Köln"},
        "Two Words": {"before": ["x"], "after": None},
    }


@pytest.mark.slow
async def test_a_change_of_many_fields_still_fits_the_audit(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    body = json.dumps({f"field{number}": "x" * 50 for number in range(8_000)})
    await publish_jobs(connection, queue, [body])
    await exhaust_deliveries(connection, queue, 1)
    emptied = dict.fromkeys(json.loads(body), "y" * 50)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=lambda _: Repair(emptied)))
    report.raise_for_failures()
    (record,) = await letter_records(connection, queue)
    assert record.changes is not None
    assert record.changes["body"]["before"]["bytes"] == len(body)
    assert await process_all(connection, queue) == {json.dumps(emptied, separators=(",", ":")): 1}


# Many letters changed by a JSON Patch: the preview, what is stored, what stays, and what the audit keeps.


PATCH = '[{"op":"test","path":"/currency","value":"usd"},{"op":"replace","path":"/currency","value":"EUR"}]'
FIT = [b'{"n":1, "f":1.10,"currency":"usd"}', b'{"currency" : "usd","n":2,"big":123456789012345678901234567890}']
PATCHED = [b'{"n":1,"f":1.10,"currency":"EUR"}', b'{"currency":"EUR","n":2,"big":123456789012345678901234567890}']
PATCHED = [b'{"n":1,"f":1.10,"currency":"EUR"}', b'{"currency":"EUR","n":2,"big":123456789012345678901234567890}']
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
    assert [after[report.redriven[sequence]] for sequence in (1, 2)] == PATCHED
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
    queue = await make_queue(connection, name, dead=[b'{"a": 1}', b'{"a": 2}'])
    request = RedriveRequest(patch=[{"op": "replace", "path": "/a", "value": 2}])
    shown = await preview(connection, queue, request)
    assert (shown.redriven, shown.changed) == (2, 1)
    assert [letter["sequence"] for letter in shown.sample] == [1]
    report = await redrive_dead_letters(connection, queue, request)
    after = await bodies(connection, name)
    assert [after[report.redriven[number]] for number in (1, 2)] == [b'{"a":2}', b'{"a": 2}']
    assert (await records(connection, queue, 2)).changes is None


@pytest.mark.slow
async def test_a_redrive_that_goes_on_gets_its_patch_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=[b'{"a":1}', b'{"b":1}'])
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
    queue = await make_queue(connection, name, max_msg_size=2_000, dead=[b'{"a":1}'])
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
    await make_queue(connection, name, dead=[*FIT, b'{"n":"\\u001b[31m\x1b"}', UNFIT[0]])
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
    assert PATCHED[0] in (await bodies(connection, name)).values()
    assert f"with the patch {PATCH}" in await command(nats, "redrive", "status", name, report["redrive"])
    status = await as_json(nats, "redrive", "status", name, report["redrive"])
    assert json.loads(status["plan"]["patch"]) == json.loads(PATCH)


# Transforms that return nonsense and patches that make too much: one letter fails, by name; the others come back.


_GOOD = "good"


class _Unreadable:
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class _Fields(dict[str, str]):
    def items(self) -> Any:
        raise ZeroDivisionError


def _raise(error: BaseException) -> Any:
    raise error


async def _asynchronous() -> None:
    """Be what a callable returns that isn't awaited."""


# What a transform does → what the report says of the letter.
NONSENSE: Mapping[str, tuple[Callable[[], Any], str]] = {
    "subject of a number": (lambda: Repair(subject=5), "expected a subject as text, found int"),  # type: ignore[arg-type]
    "subject of a list": (lambda: Repair(subject=["a"]), "expected a subject as text, found list"),  # type: ignore[arg-type]
    "subject of bytes": (lambda: Repair(subject=b"q"), "expected a subject as text, found bytes"),  # type: ignore[arg-type]
    "empty subject": (lambda: Repair(subject=""), "it is empty"),
    "wildcard": (lambda: Repair(subject="{name}.jobs.*"), "a job's subject can't have wildcards"),
    "all below": (lambda: Repair(subject="{name}.jobs.>"), "a job's subject can't have wildcards"),
    "subject of two lines": (lambda: Repair(subject="{name}.jobs.a\r\nPUB x 0"), "white space or control characters"),
    "subject with a bell": (lambda: Repair(subject="{name}.jobs.\a"), "white space or control characters"),
    "long subject": (lambda: Repair(subject="{name}.jobs." + "a" * 5_000), "more than 3500"),
    "half a character": (lambda: Repair(subject="{name}.jobs.\ud800"), "white space or control characters"),
    "headers of a list": (lambda: Repair(headers=["a"]), "expected headers by name, found"),  # type: ignore[arg-type]
    "header of a list": (lambda: Repair(headers={"A": ["x"]}), "expected text without line breaks"),  # type: ignore[dict-item]
    "header of a nested tuple": (lambda: Repair(headers={"A": (("x",),)}), "expected text without line breaks"),  # type: ignore[dict-item]
    "header of two lines": (lambda: Repair(headers={"A": "x\r\nNats-Msg-Id: y"}), "expected text without line breaks"),
    "header's name of two lines": (lambda: Repair(headers={"A\r\nB": "x"}), "expected a name of letters"),
    "header without text": (lambda: Repair(headers={"A": _Unreadable()}), "expected text without line breaks"),  # type: ignore[dict-item]
    "headers that raise": (lambda: Repair(headers=_Fields(A="x")), "it can't be read (ZeroDivisionError)"),
    "no number": (lambda: Repair({"a": float("nan")}), "expected a body of bytes, text or JSON values"),
    "body of a set": (lambda: Repair({1, 2}), "expected a body of bytes, text or JSON values"),
    "body that raises": (lambda: Repair(_Fields(a="x")), "it can't be read (ZeroDivisionError)"),
    "body of many digits": (lambda: Repair(10**5_000), "expected a body of bytes, text or JSON values"),
    "coroutine": (_asynchronous, "expected the transform to return a Repair, or None for no change, found coroutine"),
    "generator": (lambda: (_ for _ in ()), "or None for no change, found generator"),
    "class": (lambda: Repair, "or None for no change, found type"),
    "error without text": (lambda: _raise(ValueError(_Unreadable())), "the transform raised ValueError;"),
    "error of half a character": (
        lambda: _raise(ValueError("\ud800\r\n\0")),
        "the transform raised ValueError: \ufffd",
    ),
    "long error": (lambda: _raise(ValueError("x" * 100_000)), "the transform raised ValueError: xxx"),
    "cancellation": (lambda: _raise(asyncio.CancelledError()), "the transform raised CancelledError"),
    "end of a generator": (lambda: _raise(GeneratorExit()), "the transform raised GeneratorExit"),
    "recursion": (lambda: _raise(RecursionError("too deep")), "the transform raised RecursionError: too deep"),
}


def _repairing(name: str) -> Callable[[DeadLetter], Any]:
    def transform(letter: DeadLetter) -> Any:
        if letter.body == _GOOD.encode():
            return Repair("better")
        found = NONSENSE[letter.body.decode()][0]()
        if isinstance(found, Repair) and isinstance(found.subject, str):
            return replace(found, subject=found.subject.replace("{name}", name))
        return found

    return transform


@pytest.mark.parametrize("fields", [{}, {"waves": [10, "rest"]}, {"order_key": "body:key"}], ids=["", "waves", "order"])
async def test_a_transform_that_returns_nonsense_fails_only_its_letter(
    connection: NatsPyConnection, name: str, fields: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"})
    jobs = [_GOOD, *NONSENSE, _GOOD]
    await make_terminated_letters(connection, queue, jobs)
    request = RedriveRequest(transform=_repairing(name), **fields)
    shown = await preview(connection, queue, request)
    json.dumps(shown.as_json(), allow_nan=False).encode()
    assert (shown.redriven, shown.failures) == (2, len(NONSENSE))
    report = await redrive_dead_letters(connection, queue, replace(request, waves=()))
    assert set(report.redriven) == {1, len(jobs)}
    assert report.failed.keys() == shown.failed.keys()
    for sequence, (_, expected) in enumerate(NONSENSE.values(), 2):
        assert expected in report.failed[sequence]
        assert report.failed[sequence].endswith("; the letter is untouched")
        assert len(report.failed[sequence]) < 2_000
    assert await process_all(connection, queue) == {"better": 2}
    # The letters that failed come back as they are.
    assert len((await redrive_dead_letters(connection, queue)).redriven) == len(NONSENSE)


async def test_nonsense_does_not_end_a_redrive_in_waves(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100"})
    await make_terminated_letters(connection, queue, ["subject of a number", _GOOD, "cancellation", _GOOD])
    request = RedriveRequest(transform=_repairing(name), waves=[2, "rest"], stop_when=1.0)
    redriving = asyncio.create_task(redrive_dead_letters(connection, queue, request))
    while not redriving.done():
        await process_all(connection, queue)
        await asyncio.sleep(0.05)
    report = await redriving
    assert set(report.redriven) == {2, 4}
    assert set(report.failed) == {1, 3}


async def test_a_body_that_python_reads_and_json_has_not_is_recorded_by_its_digest(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    bodies = [b'{"a":NaN}', b'{"a":1e999}', b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"]
    await make_terminated_letters(connection, queue, bodies)
    request = RedriveRequest(transform=lambda _: Repair({"a": 1}))
    json.dumps((await preview(connection, queue, request)).as_json(), allow_nan=False)
    assert set((await redrive_dead_letters(connection, queue, request)).redriven) == {1, 2, 3}


# Each makes megabytes of the kilobytes of a patch and of a body.
BOMBS: Mapping[str, tuple[bytes, list[dict[str, Any]]]] = {
    "copy of the whole": (b'["' + b"x" * 50_000 + b'"]', [{"op": "copy", "from": "", "path": "/-"}] * 15),
    "copies of a part": (
        json.dumps({"a": "x" * 100_000}).encode(),
        [{"op": "copy", "from": "/a", "path": f"/b{number}"} for number in range(100)],
    ),
    "copies that are removed": (
        json.dumps({"a": "x" * 400_000}).encode(),
        [{"op": "copy", "from": "/a", "path": "/b"}, {"op": "remove", "path": "/b"}] * 50,
    ),
    "characters of four bytes": (
        json.dumps(["\U0001f600" * 120_000], ensure_ascii=False).encode(),
        [{"op": "copy", "from": "/0", "path": "/-"}] * 5,
    ),
    "names of members": (
        json.dumps({"n" * 400_000: 1}).encode(),
        [{"op": "copy", "from": "", "path": f"/{number}"} for number in range(8)],
    ),
}


@pytest.mark.slow
async def test_a_patch_that_makes_too_much_fails_only_its_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [body for body, _ in BOMBS.values()])
    for number, (bomb, (_, operations)) in enumerate(BOMBS.items(), 1):
        request = RedriveRequest(Selection(sequences=[number]), patch=JsonPatch.of(operations))
        shown = await preview(connection, queue, request)
        report = await redrive_dead_letters(connection, queue, request)
        assert set(report.failed) == {number}, bomb
        assert report.failed == shown.failed
        assert "the patched body would have more than 2097152 bytes" in report.failed[number]
    assert len((await redrive_dead_letters(connection, queue)).redriven) == len(BOMBS)


async def test_a_patch_of_large_bodies_leaves_the_event_loop_free(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [b"[" + b"1," * 3_000 + b"0]"] * 2)
    patched, threads = JsonPatch.patched, set[int]()

    def noted(patch: JsonPatch, body: bytes) -> bytes:
        threads.add(threading.get_ident())
        return patched(patch, body)

    mocker.patch.object(JsonPatch, "patched", noted)
    request = RedriveRequest(patch=JsonPatch.of([{"op": "replace", "path": "/0", "value": 2}]))
    assert (await preview(connection, queue, request)).changed == 2
    assert set((await redrive_dead_letters(connection, queue, request)).redriven) == {1, 2}
    assert threads
    assert threading.get_ident() not in threads
