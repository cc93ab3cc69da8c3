"""A release: its files are what users need, a registry renders the README, and both install into empty environments."""

from __future__ import annotations

import io
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from tools.release import build, check_installed, check_metadata, content_problems, project_version

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


def test_metadata_and_readme_are_what_a_registry_takes(release: tuple[Path, Path]) -> None:
    check_metadata(*release)
    assert content_problems(*release) == []


@pytest.mark.parametrize("number", [0, 1], ids=["sdist", "wheel"])
def test_each_file_installs_into_an_empty_environment(release: tuple[Path, Path], number: int, tmp_path: Path) -> None:
    check_installed(release[number], tmp_path / "environment", project_version())


def test_another_version_than_the_project_s_is_refused(release: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"AssertionError: {project_version()}"):
        check_installed(release[1], tmp_path / "environment", "0.0.0")


def test_what_files_lack_is_found(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr(
            "a.dist-info/METADATA", "Metadata-Version: 2.4\nName: a\n\nA [link](docs/a.md), [one](https://b.org)"
        )
        opened.writestr("tests/test_a.py", "")
        opened.writestr("airflow_provider_jetstream/a.py", "")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a-1/README.md"), io.BytesIO())
    found = content_problems(sdist, wheel)
    assert "the wheel has no py.typed" in found
    assert "the wheel has tests" in found
    assert "the sdist has no LICENSE" in found
    assert "only one of the two has airflow_provider_jetstream/a.py" in found
    assert "the README links to docs/a.md" in found
    assert not any("b.org" in problem for problem in found)
