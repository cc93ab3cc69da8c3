from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import airflow_provider_jetstream

_ROOT = Path(airflow_provider_jetstream.__file__).parent
_MODULES = sorted(
    ".".join(file.relative_to(_ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in (_ROOT / "spark").glob("*.py")
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it goes to executors with ``--py-files``."""
    path = tmp_path_factory.mktemp("archive") / "package.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("__init__.py", "jetstream", "spark"):
            root = _ROOT / part
            for file in [root] if root.is_file() else root.rglob("*.py"):
                archive.write(file, file.relative_to(_ROOT.parent))
    return path


def _run(archive: Path, code: str) -> str:
    start = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); sys.modules.update(airflow=None, nats=None, pandas=None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_comes_from_a_zip_without_airflow_and_the_client_library(archive: Path) -> None:
    code = f"""
import importlib, threading
for name in {_MODULES!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(archive)!r}), module.__file__
    print(name)
assert threading.active_count() == 1
"""
    assert _run(archive, code).split() == _MODULES


def test_the_package_itself_is_light(archive: Path) -> None:
    code = """
import airflow_provider_jetstream.spark
print(sorted({"pyspark", "pyarrow", "numpy", "pydantic"} & set(sys.modules)))
"""
    assert _run(archive, code).strip() == "[]"
