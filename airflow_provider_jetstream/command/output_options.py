"""The options about what is printed, which every sub-command has."""

from __future__ import annotations

import argparse


def output_options() -> argparse.ArgumentParser:
    """Return a parser with the options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print results, and errors, as JSON")
    return parser
