"""conftest.py: fixtures of all tests, and the last line of a test run: N passed, N failed, N skipped.

A test of a program with its own cases (run_cases) counts as its cases.
"""

import re
import subprocess

import harness
import pytest
from harness import LIMIT, ROOT, Process, environment, make_shards, text_of
from hosts import hosts

__all__ = ["hosts"]


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


@pytest.fixture
def run_cases(record_property):
    """run_cases(COMMAND..., env=...) runs a program that must succeed, and reports its passed and skipped cases."""

    def run(*command, env=(), limit=4 * LIMIT):
        try:
            done = subprocess.run([str(word) for word in command], env=environment(env), cwd=ROOT, timeout=limit,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as expired:
            pytest.fail(f"{command[0]} still runs after {limit} s: {text_of(expired.stdout or b'')[-4000:]}")
        output = text_of(done.stdout)
        counts = re.findall(r"^(\d+) passed, (\d+) failed", output, re.M)
        passed, failed = map(int, counts[-1]) if counts else (len(re.findall("^PASS  ", output, re.M)),
                                                              len(re.findall("^FAIL  ", output, re.M)))
        skips = re.findall("^SKIP  (.*)$", output, re.M)
        record_property("cases", {"passed": passed, "failed": failed})
        record_property("skips", skips)
        assert done.returncode == 0 and failed == 0, f"{command[0]}: exit code {done.returncode}\n{output[-6000:]}"
        if passed == 0 and skips:
            record_property("skips", [])
            pytest.skip(skips[0] + (f", and {len(skips) - 1} more" if len(skips) > 1 else ""))

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
