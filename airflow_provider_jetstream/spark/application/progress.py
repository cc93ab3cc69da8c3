"""How far Spark is, for the task's log."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark import SparkContext

log = logging.getLogger(__name__)

_SECONDS = 5.0


@contextmanager
def logged_stages(context: SparkContext) -> Iterator[None]:
    """Write every few seconds what runs, where anything changed.

    :param context: the running application
    """
    over = threading.Event()
    telling = threading.Thread(target=_tell, args=(context, over), daemon=True)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join(_SECONDS)


def _tell(context: SparkContext, over: threading.Event) -> None:
    told = ""
    while not over.wait(_SECONDS):
        try:
            now = stages(context)
        except Exception:
            # The context may have gone in this moment, which shows in several ways; whoever works with it tells.
            log.debug("The stages couldn't be asked for", exc_info=True)
            return
        if now and now != told:
            log.info("%s", now)
        told = now


def stages(context: SparkContext) -> str:
    """Describe the stages that run now.

    :param context: the running application
    :return: a sentence for each; nothing where none runs
    """
    tracker = context.statusTracker()
    found = (tracker.getStageInfo(number) for number in sorted(tracker.getActiveStageIds()))
    return "; ".join(
        f"stage {stage.stageId}: {stage.numCompletedTasks} of {stage.numTasks} tasks done,"
        f" {stage.numActiveTasks} running" + (f", {stage.numFailedTasks} failed" if stage.numFailedTasks else "")
        for stage in found
        if stage
    )
