"""conftest.py: fixtures of all tests, and the last line of a test run: N passed, N failed, N skipped.

A test of a program with its own cases (run_cases in test_programs.py) counts as its cases.
"""

import harness
import pytest
from harness import Process, make_shards


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Gives each test its own folder for the choices of --autotune."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    return make_shards(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def more_data(tmp_path_factory):
    """The folder of a data set of 30,000 words and its tokenizer of 300 tokens."""
    return make_shards(tmp_path_factory.mktemp("data") / "more", 30000)


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
            properties = dict(report.user_properties)
            cases = properties.get("cases", {"passed": outcome == "passed", "failed": outcome in ("failed", "error")})
            if outcome == "skipped":
                skips.append(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")
                continue
            passed += cases["passed"]
            failed += cases["failed"] if outcome == "passed" else max(1, cases["failed"])
            skips += [f"{report.nodeid}: {skip}" for skip in properties.get("skips", [])]
    print("", *[f"skipped: {skip}" for skip in skips], sep="\n")
    print(f"{passed} passed, {failed} failed, {len(skips)} skipped")
