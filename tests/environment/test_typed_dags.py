"""What mypy and pyright say of DAGs beside the installed wheel: forty wrong lines are refused, right DAGs aren't."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from testbed.code_blocks import code_blocks
from testbed.environments import ROOT, build_wheel, create_environment, locked

TYPED_DAGS = Path(__file__).parent / "typed_dags"
WRONG_LINES = 40
_PAGE = "page_"
# Of Airflow's own types: attrs' converters and the keys of a context, which pyright takes literally.
_OF_AIRFLOW = (
    re.compile(r'"dict\[str, Param\]" cannot be assigned to parameter "params" of type "ParamsDict"'),
    re.compile(r'"\w+" is not a required key in "Context"'),
)
_DAG = re.compile(r"^from airflow\.sdk import .*\bDAG\b", re.MULTILINE)
# Functions of the pages have no annotations, for brevity.
_OF_PAGES = "no-untyped-def"

Errors = dict[str, dict[int, list[str]]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with Airflow, the wheel, what the examples import, and both type checkers."""
    packages = [
        f"{build_wheel()}[airflow]",
        *map(locked, ("apache-airflow", "mypy", "pyspark")),
        locked("pyright").replace("pyright", "pyright[nodejs]"),
    ]
    return create_environment(tmp_path_factory.mktemp("typed") / "venv", Path(sys.executable), packages)


def mypy_errors(python: Path, folder: Path) -> Errors:
    """Return what mypy says in its strict mode, by file and line."""
    command = [str(python), "-m", "mypy", "--strict", "--config-file=", "--output=json", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode in (0, 1), done.stderr) == (True, ""), done.stdout + done.stderr
    found: Errors = defaultdict(lambda: defaultdict(list))
    for line in filter(lambda text: text.startswith("{"), done.stdout.splitlines()):
        message = json.loads(line)
        is_of_page = message["file"].startswith(_PAGE)
        if message["severity"] == "error" and not (is_of_page and message["code"] == _OF_PAGES):
            found[message["file"]][message["line"]].append(message["message"])
    return found


def pyright_errors(python: Path, folder: Path) -> Errors:
    """Return what pyright says, by file and line, without the limits of Airflow's own types."""
    command = [str(python), "-m", "pyright", "--pythonpath", str(python), "--outputjson", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: Errors = defaultdict(lambda: defaultdict(list))
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    assert answer["summary"]["filesAnalyzed"] == len([*folder.glob("*.py")])
    for message in answer["generalDiagnostics"]:
        if message["severity"] != "error" or any(known.search(message["message"]) for known in _OF_AIRFLOW):
            continue
        found[Path(message["file"]).name][message["range"]["start"]["line"] + 1].append(message["message"])
    return found


CHECKERS = pytest.mark.parametrize("errors_of", [mypy_errors, pyright_errors], ids=["mypy", "pyright"])


@CHECKERS
def test_forty_wrong_lines_of_a_dag_are_refused_line_by_line(python: Path, tmp_path: Path, errors_of: object) -> None:
    assert callable(errors_of)
    text = (TYPED_DAGS / "wrong.txt").read_text(encoding="utf-8")
    (tmp_path / "wrong.py").write_text(text, encoding="utf-8")
    wrong = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")]
    assert len(wrong) == WRONG_LINES
    found = errors_of(python, tmp_path)
    assert sorted(found["wrong.py"]) == wrong, found


@CHECKERS
def test_right_dags_the_examples_and_those_of_the_pages_pass(python: Path, tmp_path: Path, errors_of: object) -> None:
    assert callable(errors_of)
    dags = [TYPED_DAGS / "right.py", *(ROOT / "example_dags").glob("*.py")]
    for file in dags:
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    blocks = [block for block in code_blocks("python") if _DAG.search(block.code)]
    assert {"README.md", "docs/waiting.md"} <= {block.page for block in blocks}
    for block in blocks:
        name = re.sub(r"\W", "_", str(block))
        (tmp_path / f"{'' if block.page == 'README.md' else _PAGE}{name}.py").write_text(block.code, encoding="utf-8")
    found = errors_of(python, tmp_path)
    assert {name: dict(lines) for name, lines in found.items()} == {}
