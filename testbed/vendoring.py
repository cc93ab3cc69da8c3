"""Downloads the libraries of the monitor's page from the npm registry, as ``vendor.json`` pins them."""

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parent.parent / "airflow_provider_jetstream/plugins/monitor/static/vendor"
MANIFEST = VENDOR / "vendor.json"


class VendoringError(RuntimeError):
    """A package differs from what the manifest pins."""


def vendored(manifest: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, dict[str, Any]]]:
    """Yield every file of the manifest: its package, its name and its entry."""
    for package in manifest["packages"]:
        for name, file in package["files"].items():
            yield package, name, file


def sha256(content: bytes) -> str:
    """Return the hash of a file's content as the manifest stores it."""
    return hashlib.sha256(content).hexdigest()


def fetch(package: Mapping[str, Any], folder: Path) -> Path:
    """Download a package with npm into a folder; raises VendoringError where its content isn't the pinned one."""
    requested = f"{package['name']}@{package['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), requested]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    tarball = folder / done.stdout.split()[-1]
    found = "sha512-" + base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    if found != package["integrity"]:
        raise VendoringError(f"expected {requested} of integrity {package['integrity']}, found {found}")
    return tarball


def content_of(tarball: Path, file: Mapping[str, Any]) -> bytes:
    """Read one file of a package; replaces, as pinned, what the browser can't resolve without a build step."""
    with tarfile.open(tarball) as archive:
        member = archive.extractfile(f"package/{file['from']}")
        if member is None:
            raise VendoringError(f"expected {file['from']} in {tarball.name}, found no such file")
        content = member.read().decode()
    # Source maps aren't shipped, and a browser's tools would request files that don't exist.
    content = "\n".join(line for line in content.split("\n") if not line.startswith("//# sourceMappingURL="))
    for old, new in file.get("replace", {}).items():
        if content.count(old) != 1:
            raise VendoringError(f"expected {old} once in {file['from']}, found it {content.count(old)} times")
        content = content.replace(old, new)
    return content.encode()


def main() -> None:
    """Write the files and their hashes."""
    manifest = json.loads(MANIFEST.read_text())
    with tempfile.TemporaryDirectory() as folder:
        tarballs = {package["name"]: fetch(package, Path(folder)) for package in manifest["packages"]}
        for package, name, file in vendored(manifest):
            content = content_of(tarballs[package["name"]], file)
            (VENDOR / name).write_bytes(content)
            file["sha256"] = sha256(content)
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
