"""The event of a message is JSON that every database stores, whatever the message contains."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.triggers.message_event import MOST_LEVELS, message_event, message_size
from airflow_provider_jetstream.worker.errors import InvalidBodyError
from airflow_provider_jetstream.worker.pulled_message import PulledMessage

# As the wire's bytes are decoded: what isn't UTF-8 is half of a surrogate pair.
TEXT = st.text(st.characters() | st.characters(categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda values: st.lists(values) | st.dictionaries(TEXT, values),
)
BODIES = st.binary() | JSON.map(lambda value: json.dumps(value).encode())


def message(body: bytes, subject: str = "s", headers: dict[str, str] | None = None) -> PulledMessage:
    return PulledMessage(subject, b"r", body, headers or {}, "q", "c", 7, 1, 10**18)


def event_of(pulled: PulledMessage, form: Literal["text", "json"]) -> dict[str, Any]:
    return message_event(pulled, form, message_size(pulled))


@given(body=BODIES, subject=TEXT, headers=st.dictionaries(TEXT, TEXT))
def test_any_message_is_an_event_that_can_be_stored(body: bytes, subject: str, headers: dict[str, str]) -> None:
    for form in ("text", "json"):
        with suppress(InvalidBodyError):
            text = json.dumps(event_of(message(body, subject, headers), form), allow_nan=False, ensure_ascii=False)
            assert "\\u0000" not in text.replace("\\\\", "")
            text.encode()


@given(value=JSON)
def test_json_comes_through_unchanged_or_is_refused(value: object) -> None:
    body = json.dumps(value).encode()
    with suppress(InvalidBodyError):
        assert json.dumps(event_of(message(body), "json")["body"]).encode() == body


def test_levels_are_limited() -> None:
    most = b"[" * MOST_LEVELS + b"]" * MOST_LEVELS
    assert event_of(message(most), "json")["encoding"] == "json"
    for body in (b"[" + most + b"]", b'{"a": ' + most + b"}"):
        with pytest.raises(InvalidBodyError, match=f"at most {MOST_LEVELS} levels"):
            event_of(message(body), "json")


def test_an_event_that_names_a_copy_stays_small() -> None:
    pulled = message(b"", headers={"Job-Id": "j" * 1_000, "H": "v" * 60_000})
    event = message_event(pulled, "json", message_size(pulled), {"stream": "q-archive", "sequence": 3})
    assert len(json.dumps(event)) < 1_000
    assert (event["size"], event["stored"]) == (message_size(pulled), {"stream": "q-archive", "sequence": 3})
