from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker.cli import main

if TYPE_CHECKING:
    from pathlib import Path

QUEUE = """
name: orders
subjects: ["orders.*"]
consumers:
  - {name: processor, max_deliver: 2}
"""


HANDLERS = """
NUMBER = 7

def process(job):
    pass

def nothing():
    pass

async def wait(job):
    pass

unnamed = lambda job: None
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a queue's file into the working folder, with handlers of all kinds."""
    file = tmp_path / "orders.yaml"
    file.write_text(QUEUE)
    (tmp_path / "command_handlers.py").write_text(HANDLERS)
    (tmp_path / "command_broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in {"NATS_URL", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "NATS_CA"} & os.environ.keys():
        monkeypatch.delenv(name)
    return file


def run(queue: Path, *arguments: str, handler: str = "command_handlers:process", consumer: str = "processor") -> int:
    return main(["run", "--queue", str(queue), "--consumer", consumer, "--handler", handler, *arguments])


@pytest.mark.parametrize("path", ["command_handlers", "command_handlers:", ":process", "", ".command_handlers:process"])
def test_an_invalid_handler_path_is_refused_with_the_expected_form(
    queue: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(queue, handler=path) == 2
    assert capsys.readouterr().err == (
        f"jetstream-worker: expected a handler as package.module:function, found {path!r}\n"
    )


@pytest.mark.parametrize(
    ("path", "finding"),
    [
        ("no_such_module:process", "found none: No module named 'no_such_module'"),
        ("command_handlers:other", "found none: module 'command_handlers' has no attribute 'other'"),
        ("command_broken:process", "found none: No module named 'no_such_package'"),
    ],
)
def test_a_handler_that_cannot_be_imported_is_named_with_the_cause(
    queue: Path, path: str, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(queue, handler=path) == 2
    assert capsys.readouterr().err == f"jetstream-worker: expected a handler at {path}, {finding}\n"


def test_a_handler_that_is_not_callable_is_named(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(queue, handler="command_handlers:NUMBER") == 2
    assert capsys.readouterr().err == ("jetstream-worker: expected a function at command_handlers:NUMBER, found int\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--deadline=soon", 'expected a duration such as "30s"'),
        ("--deadline=0", "expected a time above 0, such as 5m, or \"none\", found '0'"),
        ("--deadline=-1", "expected seconds or a duration"),
        ("--grace=later", 'expected a duration such as "30s"'),
        ("--metrics-port=70000", "expected a port from 0 (any) to 65535, found '70000'"),
        ("--metrics-port=http", "expected a port from 0 (any) to 65535, found 'http'"),
        ("--log-format=xml", "invalid choice: 'xml'"),
        ("--priorities=none", "invalid choice: 'none' (choose from 'fair', 'strict')"),
    ],
)
def test_an_invalid_option_is_refused_with_what_is_expected(
    queue: Path, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(queue, option)
    assert ended.value.code == 2
    assert f"{option.split('=')[0]}: {message}" in capsys.readouterr().err


def test_an_unreachable_server_is_named(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    assert run(queue) == 2
    assert "jetstream-worker: no NATS server reached at nats://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "many", "1.5", ""])
def test_a_concurrency_that_is_no_positive_number_is_refused(
    queue: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(queue, f"--concurrency={number}")
    assert ended.value.code == 2
    assert f"--concurrency: expected a whole number of at least 1, found {number!r}" in capsys.readouterr().err


@pytest.mark.parametrize("fallback", ["", ":low", "low.yaml:", ":"])
def test_an_invalid_fallback_is_refused_with_the_expected_forms(
    queue: Path, fallback: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(queue, "--fallback", fallback)
    assert ended.value.code == 2
    assert (
        "argument --fallback: expected a consumer of the queue, or the path of another queue's YAML file and its"
        f" consumer with a colon between them, found {fallback!r}"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fallbacks", "message"),
    [
        (
            ["low"],
            "the declaration of work queue 'orders' can't be used:\n  - expected one of its consumers (processor)",
        ),
        (["processor"], "expected each consumer once, found orders/processor twice"),
        (["orders.yaml:processor"], "expected each consumer once, found orders/processor twice"),
        (["missing.yaml:low"], "expected a YAML file at this path, found: No such file or directory"),
    ],
)
def test_an_unusable_fallback_is_named(
    queue: Path, fallbacks: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(queue, *(argument for fallback in fallbacks for argument in ("--fallback", fallback))) == 2
    assert message in capsys.readouterr().err
