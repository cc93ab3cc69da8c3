"""Selections and groups of dead letters."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.selection import NotKept, Selection
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.queue.declaration import Retention
from airflow_provider_jetstream.jetstream.units import parse_seconds

DIED = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOW = DIED + timedelta(hours=1)

DEATH = Death(
    stream="orders",
    created="2026-01-01T00:00:00Z",
    sequence=7,
    consumer="printer",
    reason=Reason.TERMINATED,
    died_at=DIED,
    deliveries=2,
    explanation="no paper",
    error_class="printing.PaperError",
    error_message="tray 17 is empty",
    traceback_digest="0123456789ab",
    error_place="printing:feed:17",
)
LETTER = DeadLetter(
    death=DEATH,
    subject="orders.new.eu",
    body=b"body",
    headers=(),
    time="2026-01-01T11:00:00Z",
    source=BodySource.COPY,
    entries=(1, 2),
    preserved=True,
    ready_at=DIED,
    origin=Origin("shop", "monday", "publish", 3),
)


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"sequences": [7, 8]}, {"sequences": [8]}),
        ({"reasons": ["terminated", "orphan"]}, {"reasons": ["max_deliveries"]}),
        ({"error_class": "printing.PaperError"}, {"error_class": "PaperError"}),
        ({"fingerprint": DEATH.fingerprint}, {"fingerprint": "0" * 12}),
        ({"traceback_digest": "0123456789ab"}, {"traceback_digest": "0" * 12}),
        ({"subject": "orders.new.eu"}, {"subject": "orders.new"}),
        ({"subject": "orders.*.eu"}, {"subject": "orders.*"}),
        ({"subject": "orders.>"}, {"subject": "order.>"}),
        ({"consumer": "printer"}, {"consumer": "print"}),
        ({"older_than": "1h"}, {"older_than": "61m"}),
        ({"younger_than": "61m"}, {"younger_than": "1h"}),
        ({"older_than": timedelta(minutes=59)}, {"older_than": timedelta(days=1)}),
        ({"dag_id": "shop"}, {"dag_id": "shop2"}),
        ({"run_id": "monday"}, {"run_id": "tuesday"}),
        ({"task_id": "publish"}, {"task_id": ""}),
        ({"parked": False}, {"parked": True}),
    ],
)
def test_each_field_selects(fields: dict[str, Any], others: dict[str, Any]) -> None:
    assert Selection.of(fields).matches(LETTER, NOW)
    assert not Selection.of(others).matches(LETTER, NOW)
    # Every field that is set has to match.
    both = {"consumer": "printer", "subject": "orders.>"}
    assert Selection.of(both | fields).matches(LETTER, NOW)
    assert not Selection.of(both | others).matches(LETTER, NOW)
    assert not Selection.of({"dag_id": "other"} | {"error_class": "none"} | others).matches(LETTER, NOW)


def test_parked_letters_are_selected_only_explicitly() -> None:
    parked = replace(LETTER, parked="too often")
    assert not Selection().matches(parked, NOW)
    assert Selection(parked=True).matches(parked, NOW)
    assert not Selection(parked=True).matches(LETTER, NOW)


@pytest.mark.parametrize(
    ("keep", "age", "is_kept"),
    [
        ({"terminated": "1h"}, "59m", True),
        ({"terminated": "1h"}, "1h", False),
        ({"default": "1h"}, "1h", False),
        ({"default": "1ms", "terminated": "2h"}, "1h", True),
        ({"default": "1ms", "terminated": -1}, "1h", True),
        ({"max_deliveries": "1ms"}, "1h", True),
        ({"parked": "1ms"}, "1h", True),
    ],
)
def test_a_letter_is_kept_for_the_age_of_its_reason(keep: dict[str, Any], age: str, *, is_kept: bool) -> None:
    # What its worker says of the time doesn't count.
    letter = replace(LETTER, kept_since=DIED, death=replace(DEATH, died_at=DIED - timedelta(days=99)))
    now = DIED + timedelta(seconds=parse_seconds(age))
    assert NotKept(keep=Retention(**keep)).matches(letter, now) is not is_kept


def test_a_policy_keeps_parked_letters_by_an_age_of_their_own_and_jobs_that_are_not_dead() -> None:
    parked = replace(LETTER, parked="too often", kept_since=NOW)
    policy = NotKept(keep=Retention(default="1ms", parked="2h"))
    assert not policy.matches(parked, NOW + timedelta(hours=1))
    assert policy.matches(parked, NOW + timedelta(hours=2))
    for reason in (Reason.UNDELIVERABLE, Reason.UNACCOUNTED):
        assert not policy.matches(replace(LETTER, death=replace(DEATH, reason=reason)), NOW)
    assert not NotKept().matches(LETTER, NOW)


def test_every_reason_of_a_dead_letter_has_an_age() -> None:
    others = {Reason.UNDELIVERABLE, Reason.UNACCOUNTED}
    assert {*Retention.model_fields} == {*Reason} - others | {"default", "parked"}


def test_undeliverable_jobs_are_selected_only_explicitly() -> None:
    job = replace(LETTER, death=replace(DEATH, reason=Reason.UNDELIVERABLE))
    assert not Selection().matches(job, NOW)
    assert not Selection().selects_undeliverable
    named = Selection.of({"reasons": ["undeliverable"]})
    assert named.matches(job, NOW)
    assert named.selects_undeliverable
    assert not named.matches(LETTER, NOW)


@pytest.mark.parametrize("source", [None, {}, Selection(), {"older_than": None, "parked": False}])
def test_an_empty_selection_selects_all_letters_in_circulation(source: Any) -> None:
    assert Selection.of(source).selects_all


def test_letters_of_the_same_cause_share_a_fingerprint() -> None:
    other = replace(DEATH, sequence=9, error_message="tray 3 is empty", died_at=NOW, deliveries=5)
    assert other.fingerprint == DEATH.fingerprint
    for change in ({"error_message": "tray 3 is jammed"}, {"consumer": "binder"}, {"reason": Reason.ORPHAN}):
        assert replace(DEATH, **change).fingerprint != DEATH.fingerprint
