# SPDX-License-Identifier: Apache-2.0
"""How a program can end, and what its shared files contain then."""

import errno
import os
import signal
import subprocess
import sys

import pytest

import vmem
from conftest import MIB, PATIENCE, python

STORES = """
import os, signal, sys, vmem
vmem.configure(host_budget="64MiB", device="none", writeback_interval=0)
region = vmem.map(os.environ["FILE"], mode="shared", host_only=True)
region.memoryview()[:] = b"k" * (8 << 20)
"""


def waiting(path, code):
    """Starts such a program, and returns when it has stored and waits."""
    child = subprocess.Popen(
        [sys.executable, "-c", STORES + code + "\nprint('ready', flush=True)\nsignal.pause()"],
        env={**os.environ, "FILE": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = child.stdout.readline()
    if line != "ready\n":
        pytest.fail(line + child.communicate(timeout=60 * PATIENCE)[1])
    return child


@pytest.fixture
def path(tmp_path):
    name = tmp_path / "file"
    name.write_bytes(bytes(8 * MIB))
    return str(name)


def whole(path):
    with open(path, "rb") as file:
        return file.read() == b"k" * (8 * MIB)


def test_an_interrupt_that_nobody_catches_loses_nothing(path, host):
    child = waiting(path, "")
    child.send_signal(signal.SIGINT)
    words = child.communicate(timeout=60 * PATIENCE)[1]
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in words
    assert whole(path)


def test_a_signal_that_flushes_loses_nothing(path, host):
    child = waiting(path, "vmem.flush_on(signal.SIGTERM, signal.SIGHUP)")
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60 * PATIENCE) == -signal.SIGTERM
    child.communicate()
    assert whole(path)


def test_os_exit_after_a_flush_loses_nothing(path, host):
    done = python(STORES + "vmem.flush(); os._exit(7)", FILE=path)
    assert done.returncode == 7, done.stderr
    assert whole(path)


def test_an_exception_and_sys_exit_lose_nothing(path, host):
    for code in ("raise ValueError", "sys.exit(3)"):
        with open(path, "r+b") as file:
            file.write(bytes(8 * MIB))
        python(STORES + code, FILE=path)
        assert whole(path), code


def test_signals_of_another_kind_are_refused(host):
    for numbers, why in (([signal.SIGSEGV], errno.EINVAL), ([], errno.EINVAL), ([signal.SIGINT], errno.EBUSY)):
        with pytest.raises(vmem.Error) as e:
            vmem.flush_on(*numbers)
        assert e.value.errno == why
