"""The redrive operator's arguments, results and retries, in this process."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from airflow_steps import process_jobs, provisioned
from dags.redrives import queue as queue_of

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Repair,
    Selection,
    WaitReport,
    WorkQueue,
    abort_redrive,
    connect,
    find_dead_letters,
    list_redrives,
)
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    LeaseHeldError,
    RedriveError,
    RedriveRequestError,
)
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from testbed.dead_letters import stream_messages
from testbed.deferral import TaskDeferred
from testbed.face import take_redrive_lease

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings, DeadLetter

pytestmark = pytest.mark.usefixtures("own_connections")

WAITING: dict[str, Any] = {"wait_for_completion": True, "wait_timeout": timedelta(seconds=0.4)}


@pytest.fixture
async def queue(settings: ConnectionSettings, name: str) -> WorkQueue:
    return await provisioned(settings, queue_of(name))


async def make_letters(settings: ConnectionSettings, queue: WorkQueue, *bodies: bytes, token: str = "one") -> None:
    async with connect(settings) as connection:
        for body in bodies:
            await connection.client.jetstream().publish(f"{queue.name}.{token}", body)
    await process_jobs(settings, queue, len(bodies), fail=True)


def context(try_number: int = 1, map_index: int | None = -1) -> Context:
    instance = SimpleNamespace(
        dag_id="dag", run_id="a run. of today", task_id="task", map_index=map_index, try_number=try_number
    )
    return cast("Context", {"ti": instance})


def operator(queue: WorkQueue, **kwargs: Any) -> JetStreamRedriveOperator:
    return JetStreamRedriveOperator(task_id="redrive", work_queue=queue, **kwargs)


async def run(queue: WorkQueue, *, try_number: int = 1, **kwargs: Any) -> dict[str, Any]:
    """Execute an operator as one try of a task, in a thread as tasks have no event loop."""
    return await asyncio.to_thread(operator(queue, **kwargs).execute, context(try_number))


async def jobs(connection: Connection, queue: WorkQueue) -> dict[int, bytes]:
    return {message.sequence: message.data for message in await stream_messages(connection, queue.name)}


@pytest.mark.slow
async def test_a_task_that_does_not_get_the_lease_can_be_retried(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one")
    other = RedriveRequest(run="other", who={"dag_id": "another"})
    lease = await take_redrive_lease(connection, queue, other, "redrive")
    assert lease is not None
    # Not AirflowFailException, after which a task isn't retried.
    with pytest.raises(LeaseHeldError, match="held by redrive other of dag_id another, since"):
        await run(queue, lease_timeout="0.2")
    await lease.release()
    assert (await run(queue, lease_timeout="5s"))["redriven"] == 1


async def test_a_selection_without_letters_is_logged_and_succeeds(
    settings: ConnectionSettings, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_letters(settings, queue, b"one")
    result = await run(queue, select={"error_class": "KeyError"}, **WAITING)
    assert (result["redriven"], result["parked"], result["failed"], result["completed"]) == (0, 0, 0, 0)
    output = capsys.readouterr().out
    assert "No dead letter of this selection was found; there is nothing to redrive" in output


async def test_a_dry_run_logs_groups_and_a_sample_and_changes_nothing(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_letters(settings, queue, b"one", b"two")
    before = await find_dead_letters(connection, queue)
    result = await run(queue, dry_run=True, group_by=["error_class", "subject"], transform=lambda _: Repair(body="new"))
    assert (result["dry_run"], result["redriven"], result["parked"]) == (True, 2, 0)
    assert [letter["body"] for letter in result["sample"]] == ["new", "new"]
    output = capsys.readouterr().out
    assert f"2 of error_class ValueError, subject {queue.name}.one" in output
    assert "A redrive would bring back 2 dead letters, park 0 and fail for 0; protocol copy: " in output
    assert await jobs(connection, queue) == {1: b"one", 2: b"two"}
    assert (await find_dead_letters(connection, queue)).letters == before.letters


@pytest.mark.slow
async def test_letters_are_discarded_and_come_back_parked(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_letters(settings, queue, b"one", b"two")
    result = await run(queue, discard=True, dry_run=True)
    assert (result["discarded"], result["redriven"]) == (2, 0)
    assert "It would discard 2, of which 0 have no copy that could bring them back" in capsys.readouterr().out
    assert len(await jobs(connection, queue)) == 2
    result = await run(queue, discard="True", sequences="[2]", why="a shop that closed")
    assert (result["discarded"], result["redriven"], result["state"]) == (1, 0, "finished")
    assert f"undo it with undo='{result['redrive']}'" in capsys.readouterr().out
    assert await jobs(connection, queue) == {1: b"one"}
    back = await run(queue, undo=result["redrive"])
    assert (back["parked"], back["redriven"]) == (1, 0)
    letters = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    assert [letter.body for letter in letters] == [b"two"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"discard": True, "wait_for_completion": True}, "make no job to wait for"),
        ({"discard": True, "engine": "spark"}, "expected no discard"),
        ({"discard": "by_policy", "engine": "spark"}, "expected no discard"),
        ({"discard": "by_policy", "wait_for_completion": True}, "make no job to wait for"),
        ({"discard": "by_policy", "select": {"consumer": "a"}}, "the policy selects"),
        ({"discard": "by policy"}, "expected true or false for discard"),
        ({"undo": "x", "engine": "spark"}, "expected no undo"),
        ({"discard": True, "max_redrives": 3}, "beside discard, found max_redrives"),
        ({"without_copy": True}, "expected discard beside without_copy"),
    ],
)
def test_what_can_not_be_discarded_is_refused_when_the_dag_is_parsed(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(RedriveRequestError, match=problem):
        operator(queue_of("discards"), **arguments)


@pytest.mark.parametrize("argument", ["discard", "undo"])
def test_a_template_that_renders_to_nothing_does_not_redrive_what_was_to_be_discarded(argument: str) -> None:
    made = operator(queue_of("discards"), **{argument: "{{ params.what }}"})
    setattr(made, argument, "")
    with pytest.raises(AirflowFailException, match=f"expected a value for {argument}"):
        made.execute(context())


async def test_a_patch_is_shown_with_its_differences_and_refused_where_it_cannot_be_used(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_letters(settings, queue, b'{"a":1.10}', b"no JSON", b"neither")
    patch = '[{"op":"add","path":"/b","value":2.50}]'
    result = await run(queue, dry_run=True, patch=patch)
    assert (result["redriven"], result["changed"], result["failed"]) == (1, 1, 2)
    output = capsys.readouterr().out
    assert "It would change 1 of them" in output
    assert "Dead letter 1 would change so:" in output
    assert "2 dead letters would stay: the patch can't be applied to the body: expected JSON" in output
    with pytest.raises(RedriveError, match="1 dead letters were redriven, 2 stayed where they were"):
        await run(queue, patch=patch)
    assert sorted((await jobs(connection, queue)).values()) == [b"neither", b"no JSON", b'{"a":1.10,"b":2.50}']
    # A patch that renders to nothing would bring letters back unchanged.
    rendering = operator(queue, patch="{{ params.patch }}")
    rendering.patch = "None"
    with pytest.raises(AirflowFailException, match="without a change"):
        await asyncio.to_thread(rendering.execute, context())
    for wrong, expected in (
        ({"patch": "[]", "transform": lambda _: None, "engine": "spark"}, "expected repair, a function from DataFrame"),
        ({"patch": patch, "engine": "spark"}, 'expected no patch with engine="spark"'),
        ({"patch": patch, "transform": lambda _: None}, "expected either a patch or a transform"),
        ({"patch": [{"op": "remove"}]}, "expected an op"),
    ):
        with pytest.raises(RedriveRequestError, match=expected):
            operator(queue, **wrong)


def repair(letter: DeadLetter) -> Repair | None:
    """Repair a letter, or fail, as its body says."""
    match letter.body:
        case b"bad":
            return Repair(body=b"good", headers={"Repaired": "yes"})
        case b"hopeless":
            raise ArithmeticError("can't be repaired")
        case b"odd":
            return cast("Repair", {"body": "good"})
        case _:
            return None


@pytest.mark.slow
async def test_a_transform_that_fails_for_some_letters_does_not_stop_the_others(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_letters(settings, queue, b"bad", b"hopeless", b"odd", b"fine")
    with pytest.raises(RedriveError) as raised:
        await run(queue, transform=repair)
    assert str(raised.value).startswith(
        "JS211 2 dead letters were redriven, 2 stayed where they were: 2: the transform raised ArithmeticError: can't"
        " be repaired; the letter is untouched; 3: expected the transform to return a Repair, or None for no change,"
        " found dict; the letter is untouched;"
    )
    output = capsys.readouterr().out
    assert "Dead letter 2 stays where it is: the transform raised ArithmeticError" in output
    assert "2 dead letters redriven (0 by earlier tries), 0 parked, 2 failed" in output
    assert await jobs(connection, queue) == {2: b"hopeless", 3: b"odd", 5: b"good", 6: b"fine"}
    # With a corrected transform, a retry continues with the remaining letters.
    result = await run(queue, try_number=2, transform=lambda _: Repair(body=b"at last"))
    assert (result["redriven"], result["resumed"], result["from_sequences"]) == (4, 2, [[1, 4]])
    assert sorted((await jobs(connection, queue)).values()) == [b"at last", b"at last", b"fine", b"good"]


async def test_a_task_that_is_killed_leaves_the_remaining_letters(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one", b"two", b"three", b"four")

    def stop_at_two(letter: DeadLetter) -> None:
        if letter.body == b"two":
            task.on_kill()

    task = operator(queue, transform=stop_at_two, rate=10)
    with pytest.raises(
        RedriveError, match="stopped after 2 dead letters, as requested; the others stayed where they were"
    ):
        await asyncio.to_thread(task.execute, context())
    assert await jobs(connection, queue) == {3: b"three", 4: b"four", 5: b"one", 6: b"two"}
    result = await run(queue, try_number=2)
    assert (result["redriven"], result["resumed"]) == (4, 2)


async def test_a_deferred_retry_waits_for_the_jobs_of_the_try_before(
    settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one")
    waiting = WAITING | {"deferrable": True}
    for try_number in (1, 2):
        with pytest.raises(TaskDeferred) as deferred:
            await run(queue, try_number=try_number, **waiting)
        trigger = deferred.value.trigger
        assert trigger.handle.sequences == [(2, 2)]
    event = {
        "status": "timeout",
        "handle": trigger.handle.as_json(),
        "missing": [[2, 2]],
        "summary": trigger.summary,
        "report": WaitReport({2}).as_json(),
    }
    with pytest.raises(DeadlineError, match="a retry goes on waiting"):
        operator(queue, **waiting).execute_complete(context(2), event)
    await process_jobs(settings, queue, 1)
    assert (await run(queue, try_number=3, **waiting))["completed"] == 1


@pytest.mark.slow
async def test_a_job_that_died_again_between_two_tries_is_awaited_under_its_new_sequence(
    settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one")
    with pytest.raises(DeadlineError):
        await run(queue, **WAITING)
    await process_jobs(settings, queue, 1, fail=True)
    with pytest.raises(DeadlineError, match=r"found 1 of \w+ that did not \(sequences 3\)"):
        await run(queue, try_number=2, **WAITING)
    await process_jobs(settings, queue, 1)
    result = await run(queue, try_number=3, **WAITING)
    assert (result["from_sequences"], result["completed"], result["dead"]) == ([[1, 2]], 1, 0)


@pytest.mark.slow
async def test_jobs_that_died_again_fail_the_task_only_once(settings: ConnectionSettings, queue: WorkQueue) -> None:
    await make_letters(settings, queue, b"one")
    waiting = WAITING | {"wait_timeout": timedelta(seconds=30)}
    task = asyncio.create_task(run(queue, **waiting))
    await process_jobs(settings, queue, 1, fail=True)
    with pytest.raises(AirflowFailException, match="JS131 expected at most 0 dead letters, found 1"):
        await task
    # Cleared once the cause is corrected.
    task = asyncio.create_task(run(queue, try_number=2, **waiting))
    await process_jobs(settings, queue, 1)
    result = await task
    assert (result["from_sequences"], result["resumed"], result["completed"]) == ([[2, 2]], 0, 1)


@pytest.mark.parametrize(
    ("arguments", "rendered", "message"),
    [
        ({"rate": "{{ x }}"}, {"rate": "fast"}, "JS133 expected a number for rate, found 'fast'"),
        ({"protocol": "{{ x }}"}, {"protocol": "magic"}, "JS133 expected a protocol among auto"),
        ({"sequences": "{{ x }}"}, {"sequences": "None"}, "JS132 expected sequences to select dead letters"),
        ({"sequences": "{{ x }}"}, {"sequences": None}, "which would select all of them: see why, or leave it out"),
        ({"select": "{{ x }}"}, {"select": ""}, "JS132 expected select to select dead letters"),
        ({"select": {"subject": "{{ x }}"}}, {"select": {"subject": ""}}, "JS132 expected a value to select subject"),
        ({}, {"subject": "somewhere.else"}, "JS133 expected a subject of"),
        ({"sequences": [7]}, {}, "JS130 expected dead letters of"),
    ],
)
async def test_an_invalid_rendered_argument_fails_the_task_without_a_retry(
    connection: Connection,
    settings: ConnectionSettings,
    queue: WorkQueue,
    arguments: dict[str, Any],
    rendered: dict[str, Any],
    message: str,
) -> None:
    await make_letters(settings, queue, b"one")
    task = operator(queue, **arguments)
    for field, value in rendered.items():
        setattr(task, field, value)
    with pytest.raises(AirflowFailException) as raised:
        await asyncio.to_thread(task.execute, context())
    assert message in str(raised.value)
    assert await jobs(connection, queue) == {1: b"one"}


def renamed(queue: WorkQueue, suffix: str) -> WorkQueue:
    return queue_of(f"{queue.name}_{suffix}")


@pytest.mark.slow
async def test_letters_become_jobs_of_another_queue_whose_ends_are_awaited(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue, tmp_path: Path
) -> None:
    other = await provisioned(settings, renamed(queue, "other"))
    await make_letters(settings, queue, b"one", b"two")
    path = tmp_path / "other.yaml"
    path.write_text(other.to_yaml())
    working = asyncio.create_task(process_jobs(settings, other, 2))
    result = await run(
        queue,
        target_queue=str(path),
        subject=f"{other.name}.again",
        **WAITING | {"wait_timeout": timedelta(seconds=20)},
    )
    await working
    assert (result["redriven"], result["target"], result["completed"]) == (2, other.name, 2)
    assert (await jobs(connection, queue), await jobs(connection, other)) == ({}, {})
    # The same queue in another form is no other queue.
    await make_letters(settings, queue, b"three")
    result = await run(queue, target_queue=queue.model_dump(mode="json"), subject=f"{queue.name}.again")
    assert (result["target"], result["to_sequences"]) == (None, [[4, 4]])


@pytest.mark.slow
async def test_an_order_is_kept_until_the_time_limit(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b'{"customer": "ann", "n": 1}', b'{"customer": "ann", "n": 2}', b"[]")
    with pytest.raises(DeadlineError, match="found letters that still wait for the job before them after 2 were"):
        await run(queue, order_key="body:customer", wait_timeout=timedelta(seconds=4))
    left = {sequence: json.loads(body) for sequence, body in (await jobs(connection, queue)).items()}
    assert sorted(map(str, left.values())) == ["[]", "{'customer': 'ann', 'n': 1}", "{'customer': 'ann', 'n': 2}"]
    working = asyncio.create_task(process_jobs(settings, queue, 3))
    result = await run(queue, order_key="body:customer", wait_for_completion=True, deferrable=False, try_number=2)
    await working
    assert (result["redriven"], result["resumed"], result["completed"]) == (3, 2, 3)


async def test_an_aborted_redrive_fails_its_task_and_a_gate_is_not_awaited_for_ever(
    connection: Connection, settings: ConnectionSettings, queue: WorkQueue
) -> None:
    await make_letters(settings, queue, b"one", b"two")
    arguments: dict[str, Any] = {"waves": [1, "rest"], "deferrable": False, "wait_timeout": 0.5}
    with pytest.raises(DeadlineError, match="a retry goes on with it"):
        await run(queue, **arguments)
    (redrive,) = await list_redrives(connection, queue)
    await abort_redrive(connection, queue, redrive.id, who="Ann Lee", why="enough")
    with pytest.raises(AirflowFailException, match=f"{redrive.id} was aborted: abort by Ann Lee: enough"):
        await run(queue, try_number=2, **arguments)
    assert len(await list_redrives(connection, queue)) == 1
