"""This package as a zip, for executors that don't have it; run as a program, it writes the file that it is given."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import airflow_provider_jetstream

ZIP_NAME = "airflow_provider_jetstream.zip"

# What executors need; Airflow's part stays out, since it can't be imported there.
_PARTS = ("__init__.py", "jetstream", "spark")


def package_zip(file: Path) -> Path:
    """Write the zip.

    :param file: where to
    :return: the same
    """
    root = Path(airflow_provider_jetstream.__file__).parent
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in _PARTS:
            path = root / part
            for module in [path] if path.is_file() else sorted(path.rglob("*")):
                if module.is_file() and "__pycache__" not in module.parts:
                    archive.write(module, module.relative_to(root.parent))
    return file


def main() -> None:
    """Write it to the file that the command line names, and say where it is."""
    print(package_zip(Path(sys.argv[1] if len(sys.argv) > 1 else ZIP_NAME)).resolve())


if __name__ == "__main__":
    main()
