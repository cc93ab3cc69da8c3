"""The digests of ids by which tasks and workers of other makes name a job."""

from __future__ import annotations

import json

import pytest

from airflow_provider_jetstream.jetstream.publishing.advised_jobs import advised_job_digest, reported_job


@pytest.mark.parametrize("job_id", ["x y", "grün 日本", "a.b>*", "\ud800", "x" * 5_000, '"', ""])
def test_an_id_of_any_characters_is_found_in_json(job_id: str) -> None:
    subject = "advisory.x"
    body = json.dumps({"id": job_id, "advisory": subject})
    assert reported_job(subject, body.encode()) == advised_job_digest(subject, job_id)
    assert len(advised_job_digest(subject, job_id)) == 22
    assert reported_job("advisory.y", body.encode()) != advised_job_digest(subject, job_id)


@pytest.mark.parametrize("body", [b'{"id": 7.0}', b'{"id": NaN}', b'{"id": 1e400}', b'{"id": true}', b'{"id": null}'])
def test_what_is_no_id_of_a_job_is_none_of_a_report(body: bytes) -> None:
    assert reported_job("advisory.x", body) is None
