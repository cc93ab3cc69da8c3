"""Transforms that return nonsense and patches that make too much: one letter fails, by name; the others come back."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    JsonPatch,
    RedriveRequest,
    Repair,
    Selection,
    preview,
    redrive_dead_letters,
)
from testbed.dead_letters import make_terminated_letters
from testbed.queues import make_queue, process_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import DeadLetter
    from testbed.face import NatsPyConnection

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
    "white space before items": (
        b"[" + b" " * 300_000 + b"1]",
        [{"op": "add", "path": "/-", "value": number} for number in range(100)],
    ),
    "white space before members": (
        b"{" + b"\n" * 300_000 + b'"a":1}',
        [{"op": "add", "path": f"/b{number}", "value": number} for number in range(100)],
    ),
    "characters of four bytes": (
        json.dumps(["\U0001f600" * 120_000], ensure_ascii=False).encode(),
        [{"op": "copy", "from": "/0", "path": "/-"}] * 5,
    ),
    "names of members": (
        json.dumps({"n" * 400_000: 1}).encode(),
        [{"op": "copy", "from": "", "path": f"/{number}"} for number in range(8)],
    ),
    "many values": (b"[" + b"1," * 60_000 + b"0]", [{"op": "copy", "from": "", "path": "/-"}] * 2),
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
        assert "the patched body would have more than 2097152 bytes" in report.failed[number] or bomb == "many values"
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
