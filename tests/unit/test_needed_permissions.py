"""The error about a missing permission names the roles whose policies have it."""

from __future__ import annotations

import pytest

from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from airflow_provider_jetstream.jetstream.needed_permissions import roles_needing
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES, permissions

QUEUES = [
    WorkQueue(
        name="orders",
        subjects=["orders.jobs.>"],
        consumers=[{"name": "worker", "max_deliver": 2}],
        dead_letters="orders-dead",
        events="orders-events",
        archive=True,
        schedules=True,
    )
]
LINES = {
    (line.action, line.subject) for queue in QUEUES for role in ROLES for line in permissions(queue, role).permissions
}
# They are named by the declaration, or by the user.
OWN = ("orders.jobs.", "_INBOX_")


def _kind(subject: str) -> str:
    return subject.split(".orders")[0]


@pytest.mark.parametrize(("action", "subject"), sorted(LINES))
def test_the_roles_of_a_subject_are_those_whose_policies_have_it(action: str, subject: str) -> None:
    denied = subject.replace("*", "x").replace(">", "x.1")
    # A queue's streams aren't told apart: a program without the declaration doesn't know which is which.
    allowed = {
        role
        for queue in QUEUES
        for role in ROLES
        for line in permissions(queue, role).permissions
        if (line.action, _kind(line.subject)) == (action, _kind(subject))
    }
    found = roles_needing(action, denied)
    error = PermissionDeniedError(action, denied, "user 'u'")
    if subject.startswith(OWN):
        assert found == ()
        assert "for the user's role" in str(error)
    else:
        assert set(found) == allowed
        assert all(role in str(error) for role in allowed)


@pytest.mark.parametrize("subject", ["a\u2028b", "a\x0bb\x1b[2K", "a\udcff", "x" * 5_000, "", " "])
def test_whatever_a_server_says_was_denied_the_error_is_one_line_that_can_be_written(subject: str) -> None:
    error = PermissionDeniedError("publish", subject, "user 'u'")
    assert len(str(error).splitlines()) == 1
    assert len(str(error).encode()) < 2_000
    assert str(error).isprintable()
    assert error.subject == subject
