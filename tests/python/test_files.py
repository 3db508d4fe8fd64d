# SPDX-License-Identifier: Apache-2.0
"""Bytes between regions and files, docstrings, and advice by name."""

import inspect
import io
import os
import shutil
import subprocess
import sys

import pytest
import vmem

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SIZE = 24 << 20  # has an odd end, and exceeds the budget of the unprivileged program below


def pattern(size):
    return bytes(range(251)) * (size // 251 + 1)


def test_bytes_go_to_and_come_from_files_by_path_and_by_object(tmp_path):
    want = pattern(SIZE + 5)[: SIZE + 5]
    path = tmp_path / "bytes"
    path.write_bytes(want)
    with vmem.alloc(SIZE + 5, host_only=True) as region:
        assert region.read_from(path) == SIZE + 5
        region.evict()
        assert region.write_to(tmp_path / "again") == SIZE + 5
        assert (tmp_path / "again").read_bytes() == want
        sink = io.BytesIO()
        assert region[100:3000000].write_to(sink) == 2999900 and sink.getvalue() == want[100:3000000]
        with open(path, "rb") as file:  # buffered, from the current position
            file.seek(7)
            assert region[:10].read_from(file) == 10
            assert bytes(region[:10].memoryview()) == want[7:17]
        assert region.read_from(io.BytesIO(b"end"), offset=SIZE) == 3  # short, because the file ends
        assert bytes(region[SIZE : SIZE + 5].memoryview()) == b"end" + want[SIZE + 3 :]
        assert region.write_to(io.BytesIO(), offset=SIZE + 5) == 0
        with pytest.raises(ValueError):
            region.write_to(io.BytesIO(), offset=SIZE + 6)
    with vmem.map(path) as mapped, pytest.raises(TypeError):
        mapped.read_from(io.BytesIO(b"x"))


def test_a_file_that_fails_ends_the_lease():
    class Full(io.RawIOBase):
        def write(self, _):
            raise OSError(28, "no space")

    with vmem.alloc("4MiB", host_only=True) as region:
        with pytest.raises(OSError):
            region.write_to(Full())
        region.evict()
        assert region.query().host_bytes == 0


UNPRIVILEGED = """
import os, sys, vmem
vmem.configure(host_budget="16MiB", device="none", ssd_path=sys.argv[1])
folder = sys.argv[1]
with vmem.alloc(%d, host_only=True) as region:
    assert region.read_from(folder + "/in") == region.nbytes
    assert region.query().ssd_bytes > 0
    region.evict()
    assert region.write_to(folder + "/out") == region.nbytes
    try:
        import numpy as np
    except ImportError:
        sys.exit(0)
    region.evict()
    a = region.numpy("uint8")
    with open(folder + "/out.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(a))
        region.write_to(file)
    part = region[: 4 << 20]
    with part.acquire():
        part.numpy().tofile(folder + "/part")
    assert (np.load(folder + "/out.npy") == np.fromfile(folder + "/in", "uint8")).all()
""" % SIZE


def test_an_ordinary_user_reads_and_writes_files(tmp_path):
    """With an unprivileged userfaultfd, read(2) and write(2) on absent blocks fail. These calls
    must not.
    """
    (tmp_path / "in").write_bytes(pattern(SIZE)[:SIZE])
    command = [sys.executable, "-c", UNPRIVILEGED, str(tmp_path)]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("setpriv is not installed")
        command = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", *command]
        probe = [*command[:5], "cat", os.environ["VMEM_LIBRARY"]]
        os.chmod(tmp_path, 0o777)
        for base in tmp_path.parents:
            if base.name.startswith("pytest-"):
                os.chmod(base, 0o711)
        if subprocess.run(probe, capture_output=True).returncode != 0:
            pytest.skip("an ordinary user cannot read the library here")
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with open(tmp_path / "in", "rb") as one, open(tmp_path / "out", "rb") as two:
        assert one.read() == two.read()


def test_advice_by_name_number_and_member():
    with vmem.alloc("4MiB", host_only=True) as region:
        for advice in ("sequential", "RANDOM", "dont-need", "will_need", vmem.Advice.COLD, 16):
            region.advise(advice)
        with pytest.raises(ValueError, match="'sequentail' is not known; there are: .*sequential"):
            region.advise("sequentail")
        with pytest.raises(vmem.Error):
            region.advise(99)


def test_every_call_has_a_docstring():
    without = []
    for name in vmem.__all__:
        what = getattr(vmem, name)
        if not callable(what):
            continue
        if not what.__doc__:
            without.append(name)
        if inspect.isclass(what):
            for member, value in vars(what).items():
                if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
                    continue
                if not value.__doc__:
                    without.append(f"{name}.{member}")
    assert not without
