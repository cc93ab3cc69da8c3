from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import airflow_provider_jetstream
from airflow_provider_jetstream.spark.application.package_zip import package_zip

_ROOT = Path(airflow_provider_jetstream.__file__).parent
_MODULES = sorted(
    ".".join(file.relative_to(_ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in (_ROOT / "spark").rglob("*.py")
    if file.stem != "__main__"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as executors get it with ``--py-files``."""
    return package_zip(tmp_path_factory.mktemp("archive") / "package.zip")


def _run(archive: Path, code: str) -> str:
    start = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); sys.modules.update(airflow=None, nats=None, pandas=None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_can_be_imported_from_the_zip_without_airflow_and_nats_py(archive: Path) -> None:
    code = f"""
import importlib, threading
for name in {_MODULES!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(archive)!r}), module.__file__
    print(name)
assert threading.active_count() == 1
"""
    assert _run(archive, code).split() == _MODULES


def test_importing_the_package_loads_no_large_dependency(archive: Path) -> None:
    code = """
import airflow_provider_jetstream.spark
print(sorted({"pyspark", "pyarrow", "numpy", "pydantic"} & set(sys.modules)))
"""
    assert _run(archive, code).strip() == "[]"
