"""docs/contract is what the models say, and says of queue files and of stored messages what their readers say."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from airflow_provider_jetstream.command.program import main
from airflow_provider_jetstream.jetstream.contract import VERSION
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.ends import parse_end
from testbed.code_blocks import CodeBlock, code_blocks
from tools.contract_files import FOLDER, contract_files

if TYPE_CHECKING:
    from pathlib import Path

ROOT = FOLDER.parent.parent
FILES = contract_files()
QUEUE = jsonschema.Draft202012Validator(json.loads(FILES["queue.schema.json"]))
# Only the loader compares the filters of several consumers.
OVERLAPPING = ROOT / "tests" / "airflow" / "dags" / "queues" / "overlapping.yaml"


def test_the_files_are_those_of_the_models() -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert stored == FILES, "run make contract-files"
    for text in FILES.values():
        if (schema := json.loads(text)).get("$schema"):
            jsonschema.Draft202012Validator.check_schema(schema)
    assert f"Version {VERSION}." in (FOLDER.parent / "worker-contract.md").read_text(encoding="utf-8")


def queue_files() -> list[Path]:
    # Not the folders of tools and of installed packages.
    folders = [
        folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name[0] != "." and folder.name != "web"
    ]
    found = [path for folder in folders for path in folder.rglob("*.y*ml")]
    return sorted(path for path in found if is_queue(yaml.safe_load(path.read_text(encoding="utf-8"))))


def is_queue(values: Any) -> bool:
    return isinstance(values, dict) and "subjects" in values


def loads(values: Any) -> bool:
    try:
        WorkQueue.load(values)
    except QueueDeclarationError:
        return False
    return True


@pytest.mark.parametrize("path", queue_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_schema_says_of_each_queue_file_what_the_loader_says(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert QUEUE.is_valid(values) is (loads(values) or path == OVERLAPPING)


@pytest.mark.parametrize("block", code_blocks("yaml"), ids=str)
def test_the_schema_accepts_the_queues_of_the_documentation(block: CodeBlock) -> None:
    values = yaml.safe_load(block.code)
    if is_queue(values):
        # A page may leave out the name.
        values = {"name": "q"} | values
        assert loads(values)
        assert list(QUEUE.iter_errors(values)) == []


def test_the_schema_accepts_what_the_command_writes() -> None:
    for path in queue_files():
        if loads(yaml.safe_load(path.read_text(encoding="utf-8"))):
            assert list(QUEUE.iter_errors(yaml.safe_load(WorkQueue.load(path).to_yaml()))) == []


BASE: dict[str, Any] = {"name": "q", "subjects": ["q.>"], "consumers": [{"name": "w", "max_deliver": 2}]}


def consumer(**fields: Any) -> dict[str, Any]:
    return {"consumers": [{"name": "w", "max_deliver": 2} | fields]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"subjects": "q.>"},
        {"max_age": "7d"},
        {"max_age": "1h30m"},
        {"max_age": "1.5h"},
        {"max_age": -1},
        {"max_age": "-1"},
        {"max_age": 3_600_000_000_000},
        {"max_age": 30},
        {"max_age": "30"},
        {"max_age": "30 s"},
        {"max_age": "PT5M"},
        {"max_age": True},
        {"max_age": 2**63},
        {"max_bytes": "256MB"},
        {"max_bytes": "1 GiB"},
        {"max_bytes": "10k"},
        {"max_bytes": 1024},
        {"max_bytes": "1.5GB"},
        {"max_bytes": "256 megabytes"},
        {"max_bytes": -2},
        {"max_msgs": -2},
        {"storage": "tape"},
        {"num_replicas": 6},
        {"subject": "q.>"},
        {"dead_letters": "q-dead"},
        {"dead_letters": {"max_age": "1d"}},
        {"dead_letters": {"name": "q-dead", "retention": "workqueue", "consumers": [{"name": "h", "max_deliver": 3}]}},
        {"dead_letters": {"name": "q-dead", "retention": "none"}},
        {"dead_letters": "q-dead", "archive": False},
        {"dead_letters": "q-dead", "archive": True, "audit": {"max_age": "30d"}},
        {"events": True},
        {"events": "q-events", "advisory_subjects": "done.>"},
        {"atomic_redrive": True},
        {"execute_at_header": "maybe"},
        consumer(ack_wait="1s", backoff=["1s", "5s"], max_deliver=3),
        consumer(ack_wait="soon"),
        consumer(backoff="1s"),
        consumer(filter_subject="q.a"),
        consumer(filter_subject="q.a", filter_subjects=["q.b"]),
        consumer(filter="q.a"),
        consumer(partitions=0),
        consumer(partitions=2, filter_subject="q.{partition}.*"),
        consumer(priority_policy="first"),
        {"consumers": {"name": "w"}},
        {"consumers": [{"max_deliver": 2}]},
    ],
    ids=str,
)
def test_the_schema_says_of_a_value_what_the_loader_says(changes: dict[str, Any]) -> None:
    values = BASE | changes
    assert QUEUE.is_valid(values) is loads(values)


COMPLETION: dict[str, Any] = {
    "type": "io.airflow.jetstream.v1.completion",
    "timestamp": "2026-11-21T09:04:44.67Z",
    "stream": "q",
    "consumer": "w",
    "stream_seq": 7,
    "deliveries": 1,
}


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({}, None),
        ({"id": "a", "job_id": "a", "worker": "w-1", "result": {"a": 1}, "further": 1}, None),
        ({"result": None}, None),
        ({"stream_seq": -1}, None),
        ({"stream_seq": 2**64}, None),
        ({"deliveries": "one"}, None),
        ({"consumer": "a.b"}, None),
        ({"consumer": "a\tb"}, None),
        ({"job_id": "x" * 10_001}, None),
        ({"job_id": 7}, None),
        *(({}, field) for field in COMPLETION),
    ],
    ids=str,
)
def test_the_schema_of_a_completion_says_what_a_wait_says(changes: dict[str, Any], left_out: str | None) -> None:
    body = {field: value for field, value in (COMPLETION | changes).items() if field != left_out}
    schema = jsonschema.Draft202012Validator(json.loads(FILES["completion.schema.json"]))
    assert schema.is_valid(body) is (parse_end(json.dumps(body).encode(), 1, "q") is not None)


def test_each_reference_of_the_asyncapi_file_leads_somewhere() -> None:
    text = FILES["asyncapi.json"]
    content = json.loads(text)
    for reference in re.findall(r'"\$ref": "([^"]+)"', text):
        if reference.startswith("./"):
            assert reference.removeprefix("./") in FILES
            continue
        place = content
        for key in reference.removeprefix("#/").split("/"):
            place = place[key]
    assert content["channels"]["end"]["address"] == "completed.{queue}.{consumer}.{sequence}"


def test_the_pre_commit_hook_checks_several_files(capsys: pytest.CaptureFixture[str]) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *arguments = hook["entry"].split()
    assert program == "jetstream-queue"
    files = [path for path in queue_files() if re.search(hook["files"], path.relative_to(ROOT).as_posix())]
    examples = [str(path) for path in files if "example_dags" in path.parts]
    assert len(examples) > 5
    assert main([*arguments, *examples]) == 1
    printed = capsys.readouterr().out
    assert "orders.yaml: dead-letters-not-captured: " in printed
    assert main([*arguments, examples[0], str(OVERLAPPING)]) == 2
    assert "overlap" in capsys.readouterr().err
