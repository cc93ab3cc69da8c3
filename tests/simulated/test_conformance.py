"""The simulated server answers as a nats-server does: the same scripts are played on both.

A script is some twenty requests about a work queue with two consumers, a dead letter queue and an archive, drawn from
its kind and number. What differs at first is played once more by itself: answers of a busy machine may come late.
``SCRIPTS=24`` plays so many of each kind, as ``make conformance`` does.
"""

from __future__ import annotations

import os

import pytest

from testbed.simulated.conformance import compare

EACH = int(os.environ.get("SCRIPTS", "1"))
KINDS = tuple(filter(None, os.environ.get("KINDS", "").split(",")))
VERSIONS = ("2.15.1", "2.12.8", "2.10.27")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("version", VERSIONS)
async def test_the_simulated_server_answers_as_a_real_one(version: str) -> None:
    comparison = await compare(version, EACH, KINDS)
    print(comparison)
    assert not comparison.differing, f"{comparison}\n{comparison.shown()}"
