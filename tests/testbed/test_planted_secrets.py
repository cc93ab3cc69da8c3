"""What is planted is found again, in whatever form it was written."""

from __future__ import annotations

import base64
import json
from html import escape
from urllib.parse import quote, quote_plus

import nkeys
import pytest

from testbed.authentication import make_pair, operator_mode
from testbed.planted_secrets import MARKER, places_of_secrets, planted, planted_seed_bytes

SECRET = planted("password")


FORMS = [
    SECRET.encode(),
    quote(SECRET, safe="").encode(),
    quote_plus(SECRET).encode(),
    json.dumps(json.dumps({"password": SECRET})).encode(),
    repr([SECRET]).encode(),
    escape(SECRET).encode(),
    SECRET.lower().encode(),
    SECRET.encode().hex().encode(),
    SECRET.encode("utf-16"),
    *(base64.b64encode(b"x" * shift + SECRET.encode() + b"y" * end) for shift in range(3) for end in range(3)),
    *(base64.urlsafe_b64encode(b"x" * shift + SECRET.encode()) for shift in range(3)),
    make_pair(key=planted_seed_bytes()).seed.encode(),
    operator_mode(user=make_pair(key=planted_seed_bytes())).credentials.encode(),
]


# Numbers, since the secrets differ between the processes that share the tests.
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_every_form_is_found(form: bytes) -> None:
    assert places_of_secrets(b"before " + form + b" behind")


def test_nothing_else_is_found() -> None:
    assert places_of_secrets(b"password-" + MARKER[1:].encode() + json.dumps({"password": "***"}).encode()) == []


def test_a_planted_seed_is_a_users() -> None:
    pair = make_pair(key=planted_seed_bytes())
    assert MARKER in pair.seed
    assert bytes(nkeys.from_seed(bytearray(pair.seed, "ascii")).public_key).decode() == pair.key
    assert pair.key.startswith("U")
