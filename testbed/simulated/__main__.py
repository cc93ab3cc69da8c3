"""Plays worlds, and prints what became of them: ``python -m testbed.simulated 0:1000``."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from testbed.simulated.shrinking import shrink
from testbed.simulated.world import play_world

_MOST_FINDINGS = 10
_CALM = 4


def main(seeds: str, seconds: float = 0.0) -> int:
    """Play the worlds of some seeds, and shrink those that find a problem.

    :param seeds: the first one, a colon, and the one after the last; with another colon and a number in steps of it, so
        that several processes share them
    :param seconds: of processor time, after which no further world begins; 0 for all
    :return: 1 where a world has found a problem
    """
    first, last, step = (*map(int, seeds.split(":")), 1)[:3]
    counts: Counter[str] = Counter()
    findings = 0
    began = time.process_time()
    for seed in range(first, last, step):
        if seconds and time.process_time() - began > seconds:
            break
        calm = seed % _CALM == 0
        outcome = play_world(seed, calm=calm)
        counts += outcome.counts
        counts["worlds"] += 1
        if outcome.problems:
            findings += 1
            small = shrink(outcome)
            print("\n".join([*small.story, f"seed {seed}: {'; '.join(outcome.problems)}"]))
            print(json.dumps({"what": "", "seed": seed, "plan": small.plan.fields()}), flush=True)
            if findings == _MOST_FINDINGS:
                break
    pace = counts["worlds"] * 60 / (time.process_time() - began)
    print(f"{pace:.0f} worlds a minute of CPU, {dict(counts)}, {findings} with problems")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:])))
