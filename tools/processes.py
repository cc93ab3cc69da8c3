"""A pytest plugin: ``--processes=6`` runs tests in so many processes, which are forked once all tests are collected.

Collecting takes as long as some hundred tests, and its modules as much memory as a server, so that one process does it
for all. Each process gets a test when it is about to begin its last one; the tests of one group go to one process. A
process that ends during a test fails that test, and another takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import warnings
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import pytest

from tools.marks import SHARED, group_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

# The test that runs, and the next one: a fixture of a module or session stays where the next test uses it too.
_AHEAD = 2
# After so many tests the fixtures of the session begin anew, but for groups: a nats-server takes more for each test the
# more streams others have left there. Of 24 tests it took 1.5 s of processor time as the first, 3.9 s after 300 others.
_FRESH = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("project").addoption(
        "--processes", metavar="NUMBER", type=int, default=1, help="run the tests in so many processes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes, where that is wanted and there are some."""
    config = session.config
    processes = min(config.getoption("--processes"), len(session.items))
    if processes < _AHEAD or config.option.collectonly or session.testsfailed:
        return None
    _Run(session, processes).run()
    return True


def turns(items: Iterable[pytest.Item], *, in_order: bool) -> deque[list[int]]:
    """Return the numbers of the tests that run one after the other in one process.

    Those that share what is slow to start begin first. The others begin in their order where there is one, else the
    longest first.
    """
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(group_of(item) or item.nodeid, []).append(number)
    if in_order:
        return deque(numbers for _, numbers in sorted(groups.items(), key=lambda group: group[0] not in SHARED))
    return deque(sorted(groups.values(), key=len, reverse=True))


class _Process:
    """A forked process as the first one sees it."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.number = number
        self.given: deque[int] = deque()
        self.connection, inner = Pipe()
        # What an earlier buffer holds would be written by both.
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Of a process with several threads: the other one is that of pyarrow's allocator, which knows forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self.connection.close()
            _run_tests(session, number, inner)
        inner.close()

    def give(self, numbers: Iterable[int] | None) -> None:
        """Give the process more tests, or tell that there are no more."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(numbers)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code or, below zero, the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Run:
    """Hands out tests and passes on what is reported of them."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self._session = session
        self._hook = session.config.hook
        self._left = turns(session.items, in_order=bool(session.config.getoption("--order")))
        self._started = 0
        self._size = processes
        self._running: dict[Connection, _Process] = {}
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            # Tests of several files end in turn.
            reporter.showfspath = False

    def run(self) -> None:
        """Run all tests; an exception ends the processes."""
        # Their bases are in one folder, which is made once.
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # noqa: SLF001
        # What all have in common isn't looked through, and so not copied, by each.
        gc.collect()
        gc.freeze()
        try:
            for _ in range(self._size):
                self._start()
            while self._running:
                for ready in wait(list(self._running)):
                    self._receive(self._running[ready])  # type: ignore[index]
        except KeyboardInterrupt:
            # All of them were interrupted.
            raise
        except BaseException:
            for process in self._running.values():
                os.kill(process.pid, signal.SIGTERM)
            raise
        finally:
            for process in self._running.values():
                process.connection.close()
                process.wait()
            gc.unfreeze()

    def _start(self) -> None:
        process = _Process(self._session, self._started)
        self._started += 1
        self._running[process.connection] = process
        self._give(process)

    def _give(self, process: _Process) -> None:
        while len(process.given) < _AHEAD and self._left:
            numbers = self._left.popleft()
            process.given.extend(numbers)
            process.give(numbers)
        if not self._left:
            process.give(None)

    def _receive(self, process: _Process) -> None:
        try:
            kind, *values = process.connection.recv()
        except (EOFError, OSError):
            self._ended(process)
            return
        if kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=values[0])
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, category, file, line, *others = values
            message = warnings.WarningMessage(text, category, file, line)
            names = ("when", "nodeid", "location")
            self._hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, **dict(zip(names, others, strict=True))}
            )
        elif kind == "done":
            item = self._session.items[process.given.popleft()]
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            self._give(process)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _ended(self, process: _Process) -> None:
        del self._running[process.connection]
        code = process.wait()
        if not process.given:
            if code:
                raise self._session.Failed(f"process {process.number} ended with {code} after its last test")
            return
        item = self._session.items[process.given.popleft()]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"the process of this test ended with {code}", "call"
        )
        self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if process.given:
            self._left.appendleft(list(process.given))
        if self._left:
            self._start()


class _Sender:
    """Sends what one process reports to the first one."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        # Those of before are known.
        if when == "runtest":
            of = warning_message
            text = str(of.message)
            self._connection.send(("warning", text, of.category, of.filename, of.lineno, when, nodeid, location))


def _run_tests(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run the tests that the first process gives, and end this one."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        config = session.config
        plugins = config.pluginmanager
        # pytest's own plugins print, and write files, in the first process.
        own = [plugin for _, plugin in plugins.list_name_plugin() if plugin and _belongs_to_pytest(plugin)]
        plugins.unregister(name="terminalreporter")
        plugins.register(_Sender(config, connection))
        _capture_anew(plugins.get_plugin("capturemanager"))
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined] # noqa: SLF001
        factory._basetemp = factory.getbasetemp() / f"process-{number}"  # noqa: SLF001
        factory._basetemp.mkdir()  # noqa: SLF001
        with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
            _run_given(session, connection)
            code = 0
        # Where a test was interrupted, its fixtures are still there.
        session._setupstate.teardown_exact(None)  # noqa: SLF001
        plugins.subset_hook_caller("pytest_sessionfinish", own)(session=session, exitstatus=code)
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_given(session: pytest.Session, connection: Connection) -> None:
    given: deque[int] = deque()
    tests = 0
    more = True
    while more or given:
        while more and len(given) < _AHEAD:
            numbers = connection.recv()
            more = numbers is not None
            given.extend(numbers or ())
        if given:
            item = session.items[given.popleft()]
            following = session.items[given[0]] if given else None
            group = group_of(item)
            tests += 1
            # An Airflow that no test needs any more takes a quarter of a core.
            if following and (group_of(following) != group or (group is None and tests >= _FRESH)):
                following, tests = None, 0
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("done",))


def _capture_anew(manager: Any) -> None:
    """Write what tests print to a file of this process."""
    manager.stop_global_capturing()
    manager.start_global_capturing()
    manager.suspend_global_capture()


def _belongs_to_pytest(plugin: Any) -> bool:
    return str(getattr(plugin, "__name__", type(plugin).__module__)).startswith("_pytest.")
