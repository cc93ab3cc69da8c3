"""The options that select dead letters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.limits import SEQUENCE

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

# Each text field of a selection with its option's help.
_TEXTS: Final = {
    "consumer": "that this consumer delivered",
    "subject": "on this subject, or filter",
    "error_class": "of this error",
    "fingerprint": "of this fingerprint, which letters of the same text share",
    "traceback_digest": "of this digest, which letters of the same place in the code share",
    "dag_id": "that this DAG published",
    "run_id": "that this run published",
    "task_id": "that this task published",
    "older_than": 'dead for at least this long, such as "2h"',
    "younger_than": "dead for less than this",
}
_MOST_SEQUENCES = 1_000_000


def selection_options() -> argparse.ArgumentParser:
    """Return a parser with the options; a letter is selected if it matches all that are given."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("selection", "All dead letters in circulation where no option is given.")
    group.add_argument(
        "--sequence",
        action="append",
        type=_sequences,
        dest="select_sequences",
        metavar="N[-M]",
        help="of this stream sequence, or of these; may be given several times",
    )
    group.add_argument(
        "--reason",
        action="append",
        choices=[reason.value for reason in Reason],
        dest="select_reasons",
        help="dead for this reason; may be given several times",
    )
    for field, text in _TEXTS.items():
        group.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", dest=f"select_{field}", help=text)
    group.add_argument(
        "--parked", action="store_true", dest="select_parked", help="out of circulation rather than in it"
    )
    return parser


def selection_of(options: argparse.Namespace) -> Selection:
    """Return the selection that the options make.

    :raises SelectionError: they make none
    """
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

    values: dict[str, Any] = {
        name.removeprefix("select_"): value
        for name, value in vars(options).items()
        if name.startswith("select_") and value not in (None, False)
    }
    if listed := values.get("sequences"):
        values["sequences"] = [sequence for span in listed for sequence in span]
    return Selection.of(values)


def _sequences(text: str) -> range:
    first, dash, last = text.partition("-")
    # Ranges of larger numbers have no length.
    if max(len(first), len(last)) > len(str(SEQUENCE)) or not first.isdecimal() or (dash and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a stream sequence or a range such as 3-9, found {text!r}")
    low, high = int(first), int(last if dash else first)
    if not 0 < low <= high < low + _MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(
            f"expected a range of 1 to {_MOST_SEQUENCES} stream sequences from 1 on, found {text!r}"
        )
    return range(low, high + 1)
