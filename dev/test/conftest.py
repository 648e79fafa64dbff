"""conftest.py: fixtures of all tests, and the last line of a test run: N passed, N failed, N skipped.

A test of a program with its own cases (run_cases) counts as its cases.
"""

import re
import signal
from collections import defaultdict
from itertools import count

import harness
import pytest
from harness import LIMIT, STOP_SIGNALS, Process, execute, make_shards, make_text
from hosts import Hosts, no_hosts_because


@pytest.hookimpl(trylast=True)  # after -m and -k have left tests out
def pytest_collection_modifyitems(items):
    """Spreads the long tests over the run, between files: xdist gives each worker many tests in a row. The first tests
    of every function come first, because they build."""
    long = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("sanitizers")]
    short = [item for item in items if item not in long]
    turns, files = defaultdict(count), {}
    long.sort(key=lambda item: next(turns[item.function]))
    place = {item: n * len(short) / len(long) for n, item in enumerate(long)}
    place |= {item: files.setdefault(item.path, n) + 0.5 for n, item in enumerate(short)}
    items.sort(key=place.get)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Gives each test its own folder for the choices of --autotune."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_ignored_signals():
    """nohup and a shell's & have programs ignore SIGHUP or SIGINT, and so would those under test."""
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def start(tmp_path):
    """start(COMMAND..., env=..., cwd=...) runs a command in the background, until the test ends at the latest."""
    started = []

    def begin(*command, **keywords):
        started.append(Process(tmp_path, *command, **keywords))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def train_in_background(start):
    """As harness.train, but returns the Process, which goes on."""

    def begin(*options, by=harness.ONE, env=(), **keywords):
        return start(harness.train_command(*options, by=by, **keywords), env={**by.env, **dict(env)})

    return begin


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of a tiny data set of 6,000 words and its tokenizer of 300 tokens."""
    return make_shards(tmp_path_factory.mktemp("data") / "tiny", make_text(6000))


@pytest.fixture(scope="session")
def more_data(tmp_path_factory):
    """The folder of a data set of 30,000 words and its tokenizer of 300 tokens."""
    return make_shards(tmp_path_factory.mktemp("data") / "more", make_text(30000))


@pytest.fixture
def hosts(tmp_path):
    """hosts(N) makes N hosts, up to the end of the test."""
    if reason := no_hosts_because():
        pytest.skip(reason)
    made = []

    def make(n):
        made.append(Hosts(n, tmp_path))
        made[-1].up()
        return made[-1]

    yield make
    for group in made:
        group.down()


@pytest.fixture
def run_cases(record_property):
    """run_cases(COMMAND..., env=...) runs a program that must succeed, and reports its passed and skipped cases."""

    def run(*command, env=(), limit=4 * LIMIT):
        result = execute(*command, env=env, limit=limit)
        output = result.out + result.err
        counts = re.findall(r"^(\d+) passed, (\d+) failed", output, re.M)
        passed, failed = map(int, counts[-1]) if counts else (len(re.findall(f"^{word}  ", output, re.M))
                                                              for word in ("PASS", "FAIL"))
        skips = re.findall("^SKIP  (.*)$", output, re.M)
        if result.code == 0 and passed == failed == 0 and skips:
            pytest.skip(skips[0] + (f", and {len(skips) - 1} more" if len(skips) > 1 else ""))
        record_property("cases", {"passed": passed, "failed": failed})
        record_property("skips", skips)
        assert result.code == 0 and failed == 0, f"{command[0]}: exit code {result.code}\n{output[-6000:]}"

    return run


# ---- the last line


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    passed = failed = 0
    skips = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in reporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", ()))  # a module that fails as a whole has none
            cases = properties.get("cases", {"passed": outcome == "passed", "failed": outcome in ("failed", "error")})
            if outcome == "skipped":
                skips.append(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")
                continue
            passed += cases["passed"]
            failed += cases["failed"] if outcome == "passed" else max(1, cases["failed"])
            skips += [f"{report.nodeid}: {skip}" for skip in properties.get("skips", [])]
    print("", *[f"skipped: {skip}" for skip in skips], sep="\n")
    print(f"{passed} passed, {failed} failed, {len(skips)} skipped")
