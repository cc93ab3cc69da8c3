from __future__ import annotations

import math
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest


@pytest.mark.parametrize("run", ["", "a.b", "a b", "*", ">", "a\n"])
def test_a_key_has_to_be_one_token(run: str) -> None:
    with pytest.raises(RedriveRequestError, match=r"^expected a key without dots, wildcards and white space, found "):
        RedriveRequest(run=run)


@pytest.mark.parametrize(
    "fields",
    [
        {"who": {"task": object()}},
        {"who": {"rate": math.nan}},
        {"who": {"task": "\ud800"}},
        {"why": "\udcff"},
    ],
    ids=["object", "nan", "surrogate", "why"],
)
def test_who_and_why_have_to_be_json_before_anything_is_copied(fields: dict[str, Any]) -> None:
    with pytest.raises(RedriveRequestError, match=r"^expected who and why to fit a record in JSON, found otherwise: "):
        RedriveRequest(**fields)


@pytest.mark.parametrize("protocol", list(Protocol))
def test_the_name_of_a_protocol_is_that_protocol(protocol: Protocol) -> None:
    assert RedriveRequest(protocol=protocol.value).protocol is protocol  # type: ignore[arg-type]
