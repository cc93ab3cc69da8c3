"""Plays worlds, and prints what became of them: ``python -m testbed.simulated 0:1000``."""

from __future__ import annotations

import sys
import time
from collections import Counter

from testbed.simulated.world import play_world

_MOST_FINDINGS = 10


def main(seeds: str) -> int:
    """Play the worlds of some seeds.

    :param seeds: the first one, a colon, and the one after the last
    :return: 1 where a world has found a problem
    """
    first, last = map(int, seeds.split(":"))
    counts: Counter[str] = Counter()
    findings = 0
    began = time.process_time()
    for seed in range(first, last):
        outcome = play_world(seed, calm=seed % 4 == 0)
        counts += outcome.counts
        if outcome.problems:
            findings += 1
            print("\n".join([*outcome.story, f"seed {seed}: {'; '.join(outcome.problems)}"]))
            if findings == _MOST_FINDINGS:
                break
    pace = (last - first) * 60 / (time.process_time() - began)
    print(f"{last - first} worlds, {pace:.0f} a minute of CPU, {dict(counts)}, {findings} with problems")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
