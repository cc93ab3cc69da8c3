from __future__ import annotations

import math
import re
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest


@pytest.mark.parametrize("rate", [0, -1, -0.5, math.nan, math.inf, -math.inf])
def test_a_rate_has_to_be_a_number_above_zero(rate: float) -> None:
    with pytest.raises(RedriveRequestError, match=r"^expected a rate above 0 letters a second, found .*: leave it out"):
        RedriveRequest(rate=rate)


@pytest.mark.parametrize("subject", ["", "jobs.*", "jobs.>", ">", "jobs..a", "jobs a", ".jobs"])
def test_a_subject_has_to_be_one_that_can_be_published_to(subject: str) -> None:
    with pytest.raises(
        RedriveRequestError, match=f"^expected a subject to redrive to, found {re.escape(repr(subject))}: "
    ):
        RedriveRequest(subject=subject)


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


def test_max_redrives_cannot_be_negative() -> None:
    with pytest.raises(RedriveRequestError, match=r"^expected max_redrives of at least 0, found -1$"):
        RedriveRequest(max_redrives=-1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_lease_is_waited_for_during_a_limited_time(seconds: float) -> None:
    with pytest.raises(RedriveRequestError, match=r"^lease_timeout: expected seconds or a duration "):
        RedriveRequest(lease_timeout=seconds)


def test_in_place_excludes_every_field_that_selects_or_changes_letters() -> None:
    RedriveRequest(protocol=Protocol.IN_PLACE, why="fixed", run="a", who={"dag_id": "d"})
    named = re.escape("selection, subject, transform, rate, max_redrives")
    with pytest.raises(
        RedriveRequestError, match=f"^expected nothing but the protocol, found {named}: .*leave them out"
    ):
        RedriveRequest(
            Selection(consumer="w"),
            subject="a",
            transform=lambda _: None,
            rate=1,
            max_redrives=0,
            protocol=Protocol.IN_PLACE,
        )


@pytest.mark.parametrize("protocol", list(Protocol))
def test_the_name_of_a_protocol_is_that_protocol(protocol: Protocol) -> None:
    assert RedriveRequest(protocol=protocol.value).protocol is protocol  # type: ignore[arg-type]
