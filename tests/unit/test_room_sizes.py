"""The table of the rooms' sizes in docs/architecture.md is about the code of today."""

from __future__ import annotations

import pytest

from tools.room_sizes import room_sizes, rows

# The share by which a size may differ from what the page says, so that not every change has to write the page.
_TOLERANCE = 0.1


def test_the_page_lists_every_room_with_about_its_size() -> None:
    listed, sizes = rows(), room_sizes()
    assert listed.keys() == sizes.keys()
    for room, row in listed.items():
        assert row.size.lines == pytest.approx(sizes[room].lines, rel=_TOLERANCE), (room, "run make reference")
        assert row.size.modules == pytest.approx(sizes[room].modules, rel=_TOLERANCE, abs=2), (
            room,
            "run make reference",
        )


def test_a_room_that_is_larger_than_its_ceiling_has_a_reason() -> None:
    too_large = {room for room, row in rows().items() if row.size.lines > row.ceiling * (1 + _TOLERANCE)}
    assert {room for room, row in rows().items() if row.reason} == too_large
