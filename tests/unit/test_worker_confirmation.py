"""A worker's requests that are repeated until they are confirmed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.worker.acknowledgement import send_until_confirmed
from testbed import seams

if TYPE_CHECKING:
    from pytest_mock import MockerFixture


async def test_a_request_is_repeated_until_it_is_confirmed(mocker: MockerFixture) -> None:
    send = mocker.AsyncMock(side_effect=[DeadlineError("no answer"), None])
    await send_until_confirmed(send, "the completion")
    assert send.await_count == 2


async def test_a_request_that_is_never_confirmed_is_given_up(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.ACKNOWLEDGEMENT_CONFIRM_TIMEOUT, 0.0)
    send = mocker.AsyncMock(side_effect=DeadlineError("no answer"))
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineError, match="no answer"):
            await send_until_confirmed(send, "the completion")
