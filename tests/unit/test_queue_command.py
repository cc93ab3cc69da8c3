"""The command ``jetstream-queue permissions``."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.command.program import main
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES, combined_policy, permissions

if TYPE_CHECKING:
    from pathlib import Path

_YAML = """
name: orders
subjects: ["orders.>"]
consumers:
  - {name: fast, filter_subject: orders.fast, max_deliver: 2}
  - {name: slow, filter_subject: orders.slow, max_deliver: 2}
dead_letters: orders-dead
events: orders-events
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "orders.yaml"
    path.write_text(_YAML)
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["permissions", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_user_with_several_roles_has_one_inbox(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed(capsys, "--queue", file, "--role", "publisher", "--role", "waiter", "--user", "etl")
    assert config.count("user: ") == 1
    assert re.findall(r'"(_INBOX\S*)"', config) == ["_INBOX_etl.>"]
    assert "password: $NATS_ETL_PASSWORD" in config
    assert '"orders.>"' in config
    assert '"$JS.API.CONSUMER.CREATE.orders-events.*"' in config


def test_the_command_for_nsc_is_one_command_of_a_shell(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys, "--queue", file, "--role", "worker", "--consumer", "slow", "--form", "nsc", "--account", "A B"
    )
    comment, _, command = text.partition("\n")
    assert comment == "# inbox_prefix of the connection: _INBOX_orders-worker-slow"
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:7] == ["nsc", "add", "user", "--account", "A B", "--name", "orders-worker-slow"]
    policy = permissions(WorkQueue.load(file), "worker", consumer="slow")
    options = list(zip(words[7::2], words[8::2], strict=True))
    assert [subject for option, subject in options if option == "--allow-pub"] == list(policy.subjects("publish"))
    assert [subject for option, subject in options if option == "--allow-sub"] == list(policy.subjects("subscribe"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--role", "worker"], "expected a consumer of orders (fast, slow), found None"),
        (["--role", "worker", "--consumer", "other"], "found 'other'"),
        (["--role", "monitor", "--user", "a.>"], "expected a user's name of letters, digits, - and _, found 'a.>'"),
        (["--role", "monitor", "--consumer", "fast"], "expected a consumer only for the role worker, found 'fast'"),
    ],
)
def test_what_cannot_be_printed_is_named(
    file: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["permissions", "--queue", str(file), *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert main(["permissions", "--queue", str(file.parent / "missing.yaml"), *arguments]) == 2


def test_a_role_that_reads_what_a_queue_lacks_is_refused() -> None:
    queue = WorkQueue.load({"name": "q", "subjects": ["q"], "consumers": [{"name": "c", "max_deliver": 2}]})
    with pytest.raises(ArgumentError, match="expected events of q"):
        permissions(queue, "waiter")
    for role in ("redriver", "monitor", "spark-reader"):
        with pytest.raises(ArgumentError, match="expected dead letters of q"):
            permissions(queue, role)
    with pytest.raises(ArgumentError, match="expected a role of publisher"):
        permissions(queue, "admin")  # type: ignore[arg-type]


def test_no_policy_allows_everything(file: Path) -> None:
    queue = WorkQueue.load(file)
    policies = [permissions(queue, role, consumer="fast" if role == "worker" else None) for role in ROLES]
    for policy in (*policies, combined_policy("all", *policies)):
        allowed = {*policy.subjects("publish"), *policy.subjects("subscribe")}
        assert not allowed & {">", "*", "$JS.>", "$JS.API.>", "$JS.ACK.>", "_INBOX.>", "_INBOX_>"}
        (inbox,) = (subject for subject in allowed if subject.startswith("_INBOX"))
        assert inbox == f"{policy.inbox_prefix}.>"
        # An empty list of what is allowed would allow everything.
        nothing = policy.without(policy.permissions[-1])
        assert 'subscribe: { deny: ">" }' in nothing.server_config() or nothing.subjects("subscribe")
