"""A run of jobs is what its jobs are one by one: same ids, same headers, same bytes, same rows, same refusals."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.origin import Origin, digest_of
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.outgoing_run import ListedRun, UniformRun
from airflow_provider_jetstream.jetstream.publishing.preparation import prepare_jobs
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun

_ORIGIN = Origin("dag", "run", "täsk % 1", round=2)
_BODY = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=6),
    st.dictionaries(
        st.sampled_from(["id", "advisory", "n"]), st.one_of(st.integers(), st.text(max_size=3)), max_size=3
    ),
    st.sampled_from([b"", b'{"id": "a"}', '{"id": 7}', b' {"id": 1}', b"%d %b", None, 1.5, [1], "\ud800"]),
)
_IDS = st.sampled_from(["a", "b", "c", "a%b", "c d", "ü", "x\ny", "\x7f", "Nats-Msg-Id: 7", "e" * 300])
_JOB = st.builds(Job, _BODY, id=st.one_of(st.none(), _IDS))


def _runs(items: Sequence[object], **arguments: Any) -> list[OutgoingRun]:
    """Prepare jobs in runs as large as can be; the first run of a call has one job."""
    prepared = prepare_jobs(items, subject="q.a%b", batch="batch", **{"origin": _ORIGIN, **arguments})
    return list(prepared.runs())


def _one_by_one(items: Sequence[object], **arguments: Any) -> list[OutgoingJob]:
    """Prepare jobs without runs: whatever looks at each job keeps them apart."""
    return list(
        prepare_jobs(items, subject="q.a%b", batch="batch", check=lambda *_: None, **{"origin": _ORIGIN, **arguments})
    )


def _outcome(function: Any, *arguments: Any, **named: Any) -> object:
    try:
        return function(*arguments, **named)
    except JobError as error:
        return type(error), str(error)


@given(
    st.one_of(st.lists(_BODY, max_size=8), st.lists(_JOB, max_size=8), st.lists(st.one_of(_BODY, _JOB), max_size=8)),
    st.booleans(),
    st.sampled_from([None, SizeLimit("q", 180, redriven=True), SizeLimit("q", 90, redriven=False)]),
)
def test_jobs_of_a_task_are_the_same_in_runs(items: list[object], by_key: bool, limit: SizeLimit | None) -> None:  # noqa: FBT001
    together = _outcome(_runs, items, by_key=by_key, limit=limit)
    apart = _outcome(_one_by_one, items, by_key=by_key, limit=limit)
    if isinstance(apart, tuple) or isinstance(together, tuple):
        assert together == apart
        return
    assert isinstance(together, list)
    assert isinstance(apart, list)
    jobs = [run.job(offset) for run in together for offset in range(len(run))]
    assert jobs == apart
    first = 0
    for run in together:
        single = ListedRun(apart[first : first + len(run)])
        if run.is_plain:
            assert run.encode(b"inbox%.", 7) == single.encode(b"inbox%.", 7)
            assert run.largest >= single.largest
        assert (run.size, set(run.subjects)) == (single.size, set(single.subjects))
        if isinstance(run, UniformRun):
            assert [text.decode() for text in run.job_ids()] == [job.job_id for job in apart[first : first + len(run)]]
            ids, bodies = run.row_columns()
            assert ids.tobytes() == b"".join(digest_of(job.message_id) or b"" for job in apart[first:][: len(run)])
            # A message id without a given one is made of the body, and then says enough of it.
            assert bodies.tobytes() == b"".join(
                sha256(job.body or b"").digest()[:8] if job.key.given_id else bytes(8)
                for job in apart[first:][: len(run)]
            )
        first += len(run)


@pytest.mark.parametrize("origin", [None, _ORIGIN], ids=["without a task", "of a task"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_equal_jobs_have_ids_of_their_own(origin: Origin | None, *, with_ids: bool) -> None:
    items = [Job(b"x", id=str(number) if with_ids else None) for number in range(1_500)]
    runs = _runs(items, origin=origin)
    assert [type(run) for run in runs] == [UniformRun] * len(runs)
    jobs = [run.job(offset) for run in runs for offset in range(len(run))]
    assert len({job.message_id for job in jobs}) == len({job.key.parts for job in jobs}) == 1_500
    assert {len(job.message_id) for job in jobs} == {22}
    parts = [part for run in runs for start in range(0, len(run), 100) for part in [run.part(start, start + 100)]]
    assert [part.job(offset) for part in parts for offset in range(len(part))] == jobs
    assert b"".join(part.encode(b"i.", 100 * place) for place, part in enumerate(parts[1:], 0)).count(b"HPUB ") == 1_499


def test_an_id_that_a_job_of_an_earlier_run_has_is_refused_with_both_indexes() -> None:
    items = [Job(b"x", id=str(number)) for number in range(2_000)] + [Job(b"y", id="1234")]
    with pytest.raises(JobError, match="jobs 1234 and 2000 both have the id '1234'"):
        _runs(items)
    # A job that is looked at by itself has made the table exact in between.
    items[1_500] = Job(b"x", id="1500", headers={"A": "1"})
    with pytest.raises(JobError, match="jobs 1234 and 2000 both have the id '1234'"):
        _runs(items)
