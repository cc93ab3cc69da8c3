"""A batch of jobs is what its jobs are one by one: same ids, same headers, same bytes, same rows, same refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.origin import Origin, digest_of
from airflow_provider_jetstream.jetstream.publishing.batch import Batch
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

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


def _batches(items: Sequence[object], **arguments: Any) -> list[Batch]:
    """Prepare jobs in batches as large as can be; the first batch of a call has one job."""
    prepared = PreparedJobs(items, subject="q.a%b", batch="batch", **{"origin": _ORIGIN, **arguments})
    return list(prepared.batches())


def _one_by_one(items: Sequence[object], **arguments: Any) -> list[OutgoingJob]:
    """Prepare jobs one by one: whatever looks at each job keeps them apart."""
    return list(
        PreparedJobs(items, subject="q.a%b", batch="batch", check=lambda *_: None, **{"origin": _ORIGIN, **arguments})
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
def test_jobs_of_a_task_are_the_same_in_batches(items: list[object], by_key: bool, limit: SizeLimit | None) -> None:  # noqa: FBT001
    together = _outcome(_batches, items, by_key=by_key, limit=limit)
    apart = _outcome(_one_by_one, items, by_key=by_key, limit=limit)
    if isinstance(apart, tuple) or isinstance(together, tuple):
        assert together == apart
        return
    assert isinstance(together, list)
    assert isinstance(apart, list)
    jobs = [batch.job(offset) for batch in together for offset in range(len(batch))]
    assert jobs == apart
    first = 0
    for batch in together:
        singles = list(map(Batch.of, apart[first : first + len(batch)]))
        if batch.is_plain:
            encoded = b"".join(single.encode(b"inbox%.", place) for place, single in enumerate(singles, 7))
            assert batch.encode(b"inbox%.", 7) == encoded
            assert batch.largest >= max(single.largest for single in singles)
        assert (batch.size, {batch.subject}) == (sum(one.size for one in singles), {one.subject for one in singles})
        assert list(batch.job_ids()) == [
            job.job_id.encode("utf-8", "surrogatepass") for job in apart[first:][: len(batch)]
        ]
        if batch.single is None:
            digests, bodies = batch.row_columns()
            assert digests.tobytes() == b"".join(
                digest_of(job.message_id) or b"" for job in apart[first:][: len(batch)]
            )
            # A message id without a given one is made of the body, and then says enough of it.
            assert bodies.tobytes() == b"".join(
                job.body_digest if job.given_id else bytes(8) for job in apart[first:][: len(batch)]
            )
        first += len(batch)


@pytest.mark.parametrize("origin", [None, _ORIGIN], ids=["without a task", "of a task"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_equal_jobs_have_ids_of_their_own(origin: Origin | None, *, with_ids: bool) -> None:
    items = [Job(b"x", id=str(number) if with_ids else None) for number in range(1_500)]
    batches = _batches(items, origin=origin)
    assert [len(batch) for batch in batches] == [1, 512, 512, 475]
    jobs = [batch.job(offset) for batch in batches for offset in range(len(batch))]
    assert len({job.message_id for job in jobs}) == 1_500
    assert {len(job.message_id) for job in jobs} == {22}
    parts = [batch.part(start, start + 100) for batch in batches for start in range(0, len(batch), 100)]
    assert [part.job(offset) for part in parts for offset in range(len(part))] == jobs
    assert b"".join(part.encode(b"i.", 100 * place) for place, part in enumerate(parts[1:], 0)).count(b"HPUB ") == 1_499


def test_an_id_that_a_job_of_an_earlier_batch_has_is_refused_with_both_indexes() -> None:
    items = [Job(b"x", id=str(number)) for number in range(2_000)] + [Job(b"y", id="1234")]
    with pytest.raises(JobError, match="jobs 1234 and 2000 both have the id '1234'"):
        _batches(items)
    # A job between them is looked at by itself.
    items[1_500] = Job(b"x", id="1500", headers={"A": "1"})
    with pytest.raises(JobError, match="jobs 1234 and 2000 both have the id '1234'"):
        _batches(items)
