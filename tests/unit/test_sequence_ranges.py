"""Sets of stream sequences as ranges, compared with Python's own sets."""

from __future__ import annotations

from base64 import b64encode
from random import Random
from zlib import compress

import pytest

from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges, ranges_text


@pytest.mark.parametrize("seed", range(200))
def test_they_are_sets(seed: int) -> None:
    random = Random(seed)  # noqa: S311
    one, other = ({random.randrange(1, 40) for _ in range(random.randrange(25))} for _ in range(2))
    left, right = SequenceRanges.of(one), SequenceRanges.of(other)
    assert (set(left), left.count, bool(left)) == (one, len(one), bool(one))
    assert [sequence for sequence in range(45) if sequence in left] == sorted(one)
    assert (left | right, left & right, left - right) == (
        SequenceRanges.of(one | other),
        SequenceRanges.of(one & other),
        SequenceRanges.of(one - other),
    )
    assert SequenceRanges.decode(left.encode()) == left


def test_a_million_sequences_in_one_range_take_a_few_bytes() -> None:
    assert len(SequenceRanges.between(1, 10**6).encode()) < 32
    # Every other one of a million.
    assert len(SequenceRanges.of(range(1, 10**6, 2)).encode()) < 2_000


def _encoded(data: bytes) -> str:
    return b64encode(compress(data)).decode()


@pytest.mark.parametrize(
    "text",
    ["", "x", "AAAA", "é", _encoded(b"\x01"), _encoded(b"\x01\x00"), _encoded(b"\x01\x80"), _encoded(b"\xff" * 20)],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        SequenceRanges.decode(text)


@pytest.mark.slow
def test_short_text_stands_for_so_many_ranges_at_most() -> None:
    most = SequenceRanges.decode(_encoded(b"\x01" * (1 << 19)))
    assert (most.is_storable, len(most.bounds) * most.bounds.itemsize) == (True, 4 << 20)
    larger = SequenceRanges.of(range(1, 1 << 20, 2))
    assert not larger.is_storable
    for text in (larger.encode(), _encoded(b"\x81\x82\x03" * (1 << 20)), _encoded(b"\x80" * (4 << 20))):
        assert len(text) < 20_000
        with pytest.raises(ValueError, match=r"expected"):
            SequenceRanges.decode(text)


def test_ranges_are_named_with_the_number_of_the_rest() -> None:
    ranges = SequenceRanges.of([1, 3, 4, 5, 9, 11, 12])
    assert ranges_text(ranges) == "1, 3-5, 9, 11-12"
    assert ranges_text(ranges, 2) == "1, 3-5 and 3 more"
    assert SequenceRanges.between(3, 2) == SequenceRanges()
