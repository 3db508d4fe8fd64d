# SPDX-License-Identifier: Apache-2.0
"""Every test starts with libvmem stopped and default settings, and must leave no region behind."""

import contextlib
import dis
import errno
import gc
import os
import subprocess
import sys
import traceback

import pytest

import vmem

MIB = 1 << 20
# How much slower than a quiet machine this one is, measured by the runner. Deadlines are longer by
# this factor.
PATIENCE = int(os.environ.get("TEST_PATIENCE", "1"))

DEFAULTS = {
    "device": "none",
    "host_budget": 64 * MIB,
    "device_budget": 32 * MIB,
    "staging_share": 50,
    "peer_spill_percent": 50,
    "block_size": 2 * MIB,
    "readahead": 8 * MIB,
    "transfer": "auto",
    "direct_io": "on",
    "compression": "none",
    "fault_timeout_ms": 10000,
    "writeback_interval": 5,
    "dirty_limit": 0,
    "ssd_budget": "1T",
    "evict_threads": 1,
    "io_threads": 1,
}


def start(**settings):
    gc.collect()
    vmem.shutdown()
    vmem.configure(**{**DEFAULTS, **settings})
    try:
        vmem.init()
    except vmem.Error as e:
        if e.errno in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
            pytest.skip(e.strerror)
        raise


def finish():
    gc.collect()
    assert vmem.stats().regions == 0, "the test left regions behind"
    vmem.shutdown()


@pytest.fixture
def host():
    """No device tier."""
    start()
    yield
    finish()


@pytest.fixture
def sim():
    """The simulated device: location 0."""
    start(device="sim", host_budget=128 * MIB)
    yield
    finish()


@pytest.fixture(params=["sim", "sim-handles"])
def sims(request):
    """Each of the simulated devices."""
    start(device=request.param, host_budget=128 * MIB)
    yield request.param
    finish()


@pytest.fixture(params=["host", "sim"])
def tiers(request):
    """Each kind of location that a model can be offloaded to."""
    start(device="sim" if request.param == "sim" else "none", host_budget=128 * MIB)
    yield request.param
    finish()


@pytest.fixture
def make_file(tmp_path):
    """Files on a disk, not in memory: tmpfs refuses O_DIRECT."""
    made = []

    def make(content, name="data.bin"):
        folder = os.path.join(os.environ.get("TMPDIR", "/var/tmp"), f"vmem-python-{os.getpid()}-{len(made)}")
        os.makedirs(folder)
        made.append(folder)
        path = os.path.join(folder, name)
        with open(path, "wb") as f:
            f.write(content)
        return path

    yield make
    for folder in made:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def python(code, **environment):
    """Runs code in another interpreter. Returns its output and how it ended."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        stdin=subprocess.DEVNULL,
    )


PACKAGE = os.path.dirname(vmem.__file__)


def may_be_interrupted(frame, ends):
    """Returns whether the frame belongs to the package. With `ends` it must also be inside a
    __del__, where Python prints exceptions; without, outside of one.
    """
    ours = frame.f_code.co_filename.startswith(PACKAGE)
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return ours and (frame is not None) == ends


@contextlib.contextmanager
def after_calls(act, ends=False):
    """Calls act() after each call that the package's code makes, and at the beginning of its
    functions. Before Python 3.12 it follows instructions; later versions do not report a function's
    instructions in its first call.
    """
    if hasattr(sys, "monitoring"):
        seen = sys.monitoring
        events = seen.events.CALL | seen.events.PY_START  # CALL: with C_RETURN

        def look(*_):
            if may_be_interrupted(sys._getframe(1), ends):
                act()

        seen.use_tool_id(4, "after_calls")
        try:
            seen.register_callback(4, seen.events.C_RETURN, look)
            seen.register_callback(4, seen.events.PY_START, look)
            seen.set_events(4, events)
            yield
        finally:
            seen.set_events(4, 0)
            seen.free_tool_id(4)
        return

    def begin(frame, event, _):
        if event != "call" or not may_be_interrupted(frame, ends):
            return None
        frame.f_trace_opcodes = True
        called = [False]

        def step(frame, event, _):
            if event == "opcode":
                was, called[0] = called[0], dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
                if was:
                    act()
            elif event == "exception":  # a call raised instead of returning
                called[0] = False
            return step

        return step

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted(work, at, ends=False):
    """Runs work() and raises what a signal handler would raise after the at-th call of the
    package's code, where Python runs handlers: the call has returned, and its result is lost.
    Returns the exception, or None if there are fewer calls. ends: counts only calls in a __del__.
    """
    came, calls = [], [0]

    def act():
        calls[0] += 1
        if calls[0] == at:
            came.append(KeyboardInterrupt())
            raise came[0]

    with contextlib.suppress(KeyboardInterrupt), after_calls(act, ends):
        work()
    for e in came:
        traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None
    return came[0] if came else None


def no_device_lease(*ranges):
    """Returns whether no live lease holds the ranges (else another location gives EBUSY or ENOMEM).
    Waits for leases that are ending.
    """
    try:
        with vmem.acquire(*ranges, location=vmem.HOST):
            return True
    except vmem.Error as e:
        assert e.errno == errno.EBUSY, e
        return False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Clears the frames of a failed test, which would hold its regions and make every later test
    fail.
    """
    yield
    if call.excinfo is not None:
        traceback.clear_frames(call.excinfo.tb)
        for frame, _ in traceback.walk_tb(call.excinfo.tb):
            frame.f_locals  # noqa: B018  a new look: the report's own is kept by the frame


def pytest_terminal_summary(terminalreporter):
    """Prints the lines that scripts/run-tests.sh counts."""
    stats = terminalreporter.stats
    for report in stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line("skipped: " + reason.replace("Skipped: ", "", 1))
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    terminalreporter.write_line(
        f"{len(stats.get('passed', []))} passed, {failed} failed, {len(stats.get('skipped', []))} skipped"
    )
