"""This package as a zip, for executors that don't have it installed; run as a program, it writes the named file."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import airflow_provider_jetstream

ZIP_NAME = "airflow_provider_jetstream.zip"

# The modules that executors need; the Airflow modules can't be imported there.
_INCLUDED = ("__init__.py", "lazy_exports.py", "jetstream", "spark")


def package_zip(file: Path) -> Path:
    """Write the zip, and return its path."""
    root = Path(airflow_provider_jetstream.__file__).parent
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _INCLUDED:
            path = root / name
            for module in [path] if path.is_file() else sorted(path.rglob("*")):
                if module.is_file() and "__pycache__" not in module.parts:
                    archive.write(module, module.relative_to(root.parent))
    return file


def main() -> None:
    """Write the zip to the file that the command line names, and print its path."""
    print(package_zip(Path(sys.argv[1] if len(sys.argv) > 1 else ZIP_NAME)).resolve())


if __name__ == "__main__":
    main()
