"""Draws the images that the DAG ``image_conversion`` has converted, into a folder that may have them already."""

import sys
from pathlib import Path

from PIL import Image

SIZE = (64, 48)
COLOURS = ("red", "green", "blue")


def main(*folders: str) -> None:
    """Create the folders, and draw the images into the first one."""
    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for colour in COLOURS:
        Image.new("RGB", SIZE, colour).save(Path(folders[0]) / f"{colour}.jpg")


if __name__ == "__main__":
    main(*sys.argv[1:])
