"""The policies of a queue whose dead letters have handlers of their own: what a redrive needs to take letters first."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
from test_role_policies import names

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Policy,
    WorkQueue,
    connect,
    permissions,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, NotFoundError
from testbed.face import authorization
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import Permission
    from testbed.face import NatsPyConnection

NAME = "orders"
QUEUE = WorkQueue(
    name=NAME,
    subjects=[f"{NAME}.jobs.>"],
    consumers=[{"name": "worker", "max_deliver": 1, "ack_wait": "50ms", "sample_freq": "0"}],
    dead_letters={
        "name": f"{NAME}-dead",
        "retention": "workqueue",
        "deny_delete": True,
        "consumers": [{"name": "handler", "max_deliver": 3, "ack_wait": "1s"}],
    },
)
REDRIVER = permissions(QUEUE, "redriver")
PROVISIONER = permissions(QUEUE, "provisioner")
# Those that a queue without handlers doesn't have.
LINES = {
    "redriver": [
        line
        for line in REDRIVER.permissions
        if f"{NAME}-dead" in line.subject and "STREAM" not in line.subject and "DIRECT" not in line.subject
    ],
    "provisioner": [
        line
        for line in PROVISIONER.permissions
        if f"CONSUMER.LIST.{NAME}-dead" in line.subject or "handler" in line.subject
    ],
}
_SECRET = "of-every-user"


def users() -> dict[str, Policy]:
    found = {"redriver": REDRIVER, "provisioner": PROVISIONER}
    for role, lines in LINES.items():
        found |= {f"{role}-{number}": found[role].without(line) for number, line in enumerate(lines)}
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    named = [Policy(user, policy.inbox_prefix, policy.permissions) for user, policy in users().items()]
    config = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*named))
    admin = f'users: [\n    {{ user: "admin", password: "{_SECRET}" }}'
    with NatsServer(config=config.replace("users: [", admin, 1), user="admin", password=_SECRET) as running:
        yield running


def settings_of(server: NatsServer, user: str) -> ConnectionSettings:
    prefix = "_INBOX" if user == "admin" else users()[user].inbox_prefix
    return ConnectionSettings(servers=(server.url,), user=user, password=_SECRET, inbox_prefix=prefix, timeout=10)


async def redrive(server: NatsServer, user: str, admin: NatsPyConnection, *, handled: bool) -> None:
    """Redrive one dead letter, which a handler could get, or which no handler is for."""
    await reset(admin)
    await provision(admin, QUEUE)
    if not handled:
        await admin.api(f"CONSUMER.DELETE.{NAME}-dead.handler")
    await make_dead_letters(admin, QUEUE, ["one"])
    async with connect(settings_of(server, user)) as connection:
        report = await redrive_dead_letters(connection, QUEUE)
        if report.failed or len(report.redriven) != 1:
            raise JetStreamProviderError(str(report))
    assert await stored_count(admin, f"{NAME}-dead") == 0


async def reset(admin: NatsPyConnection) -> None:
    for stream in (*QUEUE.companion_names(), NAME):
        try:
            await admin.api(f"STREAM.DELETE.{stream}")
        except (ApiError, NotFoundError):
            continue


async def problem_of(server: NatsServer, user: str, admin: NatsPyConnection, *, handled: bool) -> str:
    try:
        if user.startswith("redriver"):
            await redrive(server, user, admin, handled=handled)
        else:
            await reset(admin)
            async with connect(settings_of(server, user)) as connection:
                for _ in ("created", "compared"):
                    await provision(connection, QUEUE)
    except (JetStreamProviderError, AssertionError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("role", LINES)
async def test_a_role_needs_every_line_about_handlers(
    server: NatsServer, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "airflow_provider_jetstream")
    async with connect(settings_of(server, "admin")) as admin:
        for handled in (True, False):
            assert await problem_of(server, role, admin, handled=handled) == ""
        assert "doesn't let" not in caplog.text
        unnamed = [
            line.subject
            for number, line in enumerate(LINES[role])
            if not await named(server, f"{role}-{number}", admin, line, caplog)
        ]
        assert not unnamed


async def named(
    server: NatsServer, user: str, admin: NatsPyConnection, line: Permission, caplog: pytest.LogCaptureFixture
) -> bool:
    for handled in (True, False):
        caplog.clear()
        problem = await problem_of(server, user, admin, handled=handled)
        if names(line, problem + caplog.text):
            return True
    return False
