"""What pages have their readers export, print for a server or give to Kubernetes is taken by what it is for."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    WorkQueue,
    connect,
    permissions,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
from airflow_provider_jetstream.worker import Delivery, Worker
from testbed.authentication import operator_mode
from testbed.certificates import make_tls
from testbed.code_blocks import ROOT, code_blocks
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK, free_port
from testbed.queues import running_worker
from tools.permission_page import QUEUE

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.console import Terminal

# The hook in a process of its own, which has only what the page exports.
_HOOK = """
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
print(*JetStreamHook().test_connection())
"""
_PASSWORD = "of-the-user"


@pytest.mark.slow
def test_the_hook_reads_the_connection_with_several_servers(terminal: Terminal) -> None:
    with NatsServer(user="airflow", password="…") as server:
        # The first of the two is away.
        terminal.replace("nats-1, nats-2", f"{LOOPBACK}:{free_port()}, {LOOPBACK}:{server.port}")
        printed = run_hook(terminal)
    assert f"True Connected to nats-server {server.version}" in printed


@pytest.mark.slow
def test_the_hook_reads_a_secret_that_is_no_file(terminal: Terminal, tmp_path: Path) -> None:
    mode, tls = operator_mode(), make_tls(tmp_path / "tls")
    # The page's servers have a certificate of an authority that the system knows.
    terminal.env["SSL_CERT_FILE"] = str(tls.ca)
    with NatsServer(tls=tls, config=mode.config) as server:
        terminal.replace("nats.example.org", f"{LOOPBACK}:{server.port}")
        terminal.replace('"…"', json.dumps(mode.credentials))
        printed = run_hook(terminal)
    assert f"True Connected to nats-server {server.version}" in printed


def run_hook(terminal: Terminal) -> str:
    """Run the next command, and connect with the hook in the same shell."""
    terminal.env["AIRFLOW_HOME"] = str(terminal.folder)
    # The connection is to be read from what is exported, and from nothing else.
    terminal.env.pop("NATS_URL")
    return terminal.run(after=f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_HOOK)}")


def handle(job: Delivery) -> dict[str, int]:
    """Do a job."""
    return {"size": len(job.body)}


@pytest.mark.slow
async def test_a_server_takes_the_printed_policy_and_keeps_it(terminal: Terminal) -> None:
    (terminal.folder / "orders.yaml").write_text(yaml.safe_dump(QUEUE))
    queue = WorkQueue.load(QUEUE)
    printed = await asyncio.to_thread(terminal.run)
    (variable,) = re.findall(r"password: \$(\w+)", printed)
    (prefix,) = re.findall(r"inbox_prefix of the connection: (\S+)", printed)
    (user,) = re.findall(r'user: "(\S+)"', printed)
    # Who makes the queue and does its jobs has another user.
    admin = f'users: [\n    {{ user: "admin", password: "{_PASSWORD}" }}'
    # The server's environment, or a line of its configuration, has the password.
    config = f'{variable}: "{_PASSWORD}"\n{printed.replace("users: [", admin, 1)}'
    with NatsServer(config=config) as server:
        everything = ConnectionSettings(servers=(server.url,), user="admin", password=_PASSWORD)
        own = ConnectionSettings(servers=(server.url,), user=user, password=_PASSWORD, inbox_prefix=prefix)
        async with connect(everything) as connection, connect(own) as restricted:
            await provision(connection, queue)
            async with running_worker(Worker(queue, "worker", handle, everything)):
                cursor = await take_cursor(restricted, queue)
                report = await publish(restricted, queue, [Job("a")], subject="orders.jobs.new")
                async with asyncio.timeout(30):
                    assert len((await wait(restricted, cursor, report.sequences)).completed) == 1
            with pytest.raises(PermissionDeniedError, match="redriver") as denied:
                await redrive_dead_letters(restricted, queue)
            assert denied.value.code == "JS106"
    # The second command has the worker's policy, each subject once.
    words = shlex.split((await asyncio.to_thread(terminal.run)).replace("\\\n", " "), comments=True)
    assert words[:5] == ["nsc", "add", "user", "--account", "SHOP"]
    policy = permissions(queue, "worker", consumer="worker")
    assert words[6::2] == [policy.user, *policy.subjects("publish"), *policy.subjects("subscribe")]


@pytest.mark.slow
def test_kubectl_makes_the_objects_that_the_pod_mounts(terminal: Terminal) -> None:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("kubectl isn't installed")
    # No cluster: kubectl prints the objects that it would make.
    terminal.add_program("kubectl", f'exec "{kubectl}" "$@" --dry-run=client --output=yaml')
    terminal.env |= {"KUBECONFIG": "/dev/null", "HOME": str(terminal.folder)}
    (terminal.folder / "example_dags").symlink_to(ROOT / "example_dags")
    (terminal.folder / "user.creds").write_text("credentials")
    made = [yaml.safe_load(terminal.run()) for _ in range(2)]
    objects = [yaml.safe_load(block.code) for block in code_blocks("yaml") if block.page == "docs/kubernetes.md"]
    (pod,) = [
        each["spec"]["template"]["spec"]
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "orders-worker")
    ]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    paths = {
        f"{mounted[volume['name']]}/{key}"
        for volume in pod["volumes"]
        for each in made
        if each["metadata"]["name"]
        in (volume.get("configMap", {}).get("name"), volume.get("secret", {}).get("secretName"))
        for key in each["data"]
    }
    assert paths == {"/etc/queues/orders.yaml", "/var/run/nats/user.creds"}
    text = str(pod["containers"][0])
    assert all(path in text for path in paths)
    declared = WorkQueue.load(yaml.safe_load(made[0]["data"]["orders.yaml"]))
    assert declared == WorkQueue.load(ROOT / "example_dags/queues/orders.yaml")
