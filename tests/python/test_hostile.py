# SPDX-License-Identifier: Apache-2.0
"""Hostile files of another user, read by an ordinary user and by root; numbers that do not fit into
C types; environment variables of a program that runs with more rights than the user who started it.
"""

import errno
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys

import pytest

import vmem
from conftest import MIB, PATIENCE
from vmem import _safetensors as st

MALLORY, ALICE = 61511, 61512

# A name that sets a terminal's title, reverses the rest of the line, and ends the line.
STEERS = "\033]0;owned\007\u202etxt.exe\n\u2066\udc9b31m\u200b"


def steers(text):
    return [c for c in text if not c.isprintable()]


def let_others_in(tmp_path):
    for base in [tmp_path, *tmp_path.parents]:
        if base == tmp_path or base.name.startswith("pytest-"):
            os.chmod(base, 0o755)


def hostile_files(folder):
    """load() refuses each of them. None may hang, take much memory or time, or control the
    terminal.
    """

    def write(name, content):
        path = os.path.join(folder, name)
        with open(path, "wb") as f:
            f.write(content)
        return path

    def tensors(name, header):
        text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogateescape")
        return write(name, struct.pack("<Q", len(text)) + text)

    def index(name, weights):
        return write(name + ".safetensors.index.json", json.dumps({"weight_map": weights}).encode())

    huge = os.path.join(folder, "huge.safetensors.index.json")
    with open(huge, "wb") as f:
        os.truncate(f.fileno(), 1 << 40)  # which costs its author nothing
    pipe = os.path.join(folder, "pipe.safetensors")
    os.mkfifo(pipe)
    listed = os.path.join(folder, "pipe.safetensors.index.json")
    os.mkfifo(listed)
    endless = os.path.join(folder, "endless.safetensors.index.json")
    os.symlink("/dev/zero", endless)
    long = "x" * (4 * MIB)
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    return [
        huge,
        pipe,
        listed,
        endless,
        tensors("name.safetensors", {STEERS: 5}),
        tensors("twice.safetensors", b'{"%s":1,"%s":1}' % ((long.encode(),) * 2)),
        tensors("overlap.safetensors", {long: entry, long + "y": entry}),
        tensors("numbers.safetensors", b'{"a":{"shape":[' + b"1e999999999," * 300000 + b"1],"),
        tensors("deep.safetensors", b'{"a":' + b"[" * (4 * MIB)),
        write(STEERS + ".safetensors", b"short"),
        index("elsewhere", {STEERS: STEERS}),
        index("long", {long: long}),
        index("up", {"a": "../" + STEERS}),
    ]


LOAD = """
import resource, sys, time
from vmem import FormatError, Error, _safetensors
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sys.argv[1:]:
    began = time.monotonic()
    try:
        _safetensors.headers(path)
    except Error as e:  # in what Python prints of it, too
        said = str(e)
        assert not [c for c in said + e.strerror if not c.isprintable()], ascii(said)
        assert len(said) < 2000, len(said)
    else:
        raise AssertionError("loaded")
    assert time.monotonic() - began < 20, path[:200]
"""


@pytest.mark.parametrize("reader", [ALICE, 0], ids=["another-user", "root"])
def test_files_that_another_user_made_are_refused_at_once_and_steer_no_terminal(reader, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become two users")
    folder = str(tmp_path / "place")
    os.mkdir(folder)
    paths = hostile_files(folder)
    for path in [folder, *paths]:
        os.chown(path, MALLORY, MALLORY, follow_symlinks=False)
    let_others_in(tmp_path)
    for path in paths:
        if not os.path.islink(path):
            os.chmod(path, 0o644)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, *paths],
        user=reader,
        group=reader,
        extra_groups=[],
        capture_output=True,
        timeout=100 * PATIENCE,
        cwd="/",
        stdin=subprocess.DEVNULL,
    )
    if b"PermissionError" in ran.stderr.split(b"AssertionError")[0] and b"import" in ran.stderr:
        pytest.skip("the package cannot be read by other users here")
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")[-4000:]


def test_words_of_failures_steer_no_terminal_and_survive_a_pickle():
    for made in (vmem.Error(errno.EIO, STEERS), vmem.FormatError(STEERS)):
        for error in (made, pickle.loads(pickle.dumps(made))):
            assert not steers(str(error)) and not steers(error.strerror) and "owned" in error.strerror
            assert error.errno in (errno.EIO, errno.EINVAL) and type(error) is type(made)
    kept = "Größe \u05e9\u05dc\u05d5\u05dd 漢字\u3000\U0001f469\u200d\U0001f4bb"
    assert vmem.Error(errno.EIO, kept).strerror == kept


def test_a_region_of_a_name_that_is_no_text_is_mapped_and_shown_without_it(host, make_file):
    path = make_file(bytes(8192))
    strange = os.path.join(os.path.dirname(path), STEERS.replace("/", ""))
    os.rename(path, strange)
    with vmem.map(strange) as region:
        assert not steers(repr(region)) and not steers(repr(region.array()))
        with pytest.raises(vmem.Error) as e:
            region.prefetch(location=99)
        assert not steers(str(e.value))


def test_what_is_no_file_is_not_waited_for(host, tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null"):
        with pytest.raises(vmem.Error) as e:
            vmem.map(path)
        assert e.value.errno == errno.EINVAL
        with pytest.raises(vmem.FormatError):
            st.headers(path)


# ctypes truncates numbers: 2**32 became location 0, 2**64 + 4096 the address 4096.
BEYOND = [2**31, 2**32, 2**32 - 1, -(2**31) - 1, 2**64, 2**64 + 1, 10**400]


@pytest.mark.parametrize("number", BEYOND, ids=lambda n: str(n) if n < 10**30 else "long")
def test_a_number_that_c_cannot_have_is_refused_wherever_it_is_given(host, number):
    with vmem.alloc(MIB) as region:
        for call in (region.prefetch, region.evict, region.acquire, lambda location: region.advise("hot", location)):
            with pytest.raises((ValueError, vmem.Error)):
                call(location=number)
        with pytest.raises(ValueError):
            vmem.device_stats(number)
        for what in (region, (region, number)):
            with pytest.raises((ValueError, vmem.Error)):
                vmem.acquire(what, access=number)
        with pytest.raises(ValueError):
            region.advise(number)
        assert region.query().host_bytes == 0, "something was moved all the same"
    for wanted in ({"advice": number}, {"block_size": number}):
        with pytest.raises((ValueError, vmem.Error)):
            vmem.alloc(MIB, **wanted)


@pytest.mark.parametrize("number", [2**64, 2**64 + (1 << 40), -1, 10**400], ids=lambda n: str(n)[:30])
def test_an_address_that_c_cannot_have_is_refused(host, number):
    with pytest.raises(ValueError):
        vmem.alloc(MIB, address=number)
    with vmem.alloc(MIB) as region:
        with pytest.raises(ValueError):
            region.prefetch(location=vmem.HOST, stream=number)
        fake = type("Fake", (), {"nbytes": MIB, "__array_interface__": {"data": (number, False)}})()
        for call in (vmem.acquire, vmem.prefetch, vmem.query, vmem.sync, vmem.evict):
            with pytest.raises(ValueError):
                call(fake)


def test_text_is_not_cut_at_a_nul(host):
    before = vmem.get("readahead")
    for call in (
        lambda: vmem.set("readahead", "4MiB\0nonsense"),
        lambda: vmem.set("readahead\0nonsense", "4MiB"),
        lambda: vmem.get("readahead\0nonsense"),
        lambda: vmem.alloc(MIB, codec="lz4\0nonsense"),
        lambda: vmem.alloc(MIB, name="a\0b"),
    ):
        with pytest.raises(ValueError, match="NUL"):
            call()
    with pytest.raises(TypeError, match="a str, not int"):
        vmem.get(3)
    assert vmem.get("readahead") == before


@pytest.mark.parametrize("path", [STEERS.replace("\n", "").replace("\udc9b", ""), "/" + STEERS.replace("\udc9b", "")])
def test_a_library_that_cannot_be_loaded_is_named_without_steering_a_terminal(path):
    ran = subprocess.run(
        [sys.executable, "-c", "try:\n  import vmem\nexcept ImportError as e: print(str(e))"],
        env={**os.environ, "VMEM_LIBRARY": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        timeout=60 * PATIENCE,
    )
    said = ran.stdout.decode("utf-8").rstrip("\n")
    assert ran.returncode == 0 and said.startswith("libvmem was not found"), (said, ran.stderr)
    assert not steers(said) and "owned" in said, ascii(said)


def test_a_program_with_more_rights_loads_no_library_that_its_starter_names(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a program that runs as root")
    python = str(tmp_path / "python")
    shutil.copy(os.path.realpath(sys.executable), python)
    os.chmod(python, 0o4755)
    package = os.path.dirname(os.path.dirname(vmem.__file__))
    code = (
        f"import sys, ctypes; sys.path.insert(0, {package!r}); sys.path[1:1] = {sys.path!r}\n"
        "get = ctypes.CDLL(None).getauxval; get.restype = ctypes.c_ulong\n"
        "if not get(23): print('no rights'); sys.exit()\n"
        "try:\n  import vmem\n  print('loaded', vmem._lib.lib._name)\n"
        "except ImportError as e: print(e)\n"
    )
    let_others_in(tmp_path)
    ran = subprocess.run(
        [python, "-I", "-c", code],
        env={**os.environ, "VMEM_LIBRARY": "/tmp/evil.so", "PYTHONHOME": sys.base_prefix},
        user=ALICE,
        group=ALICE,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60 * PATIENCE,
    )
    if "no rights" in ran.stdout or (ran.returncode != 0 and "encodings" in ran.stderr):
        pytest.skip("no Python with set-user-ID can be made here")
    assert ran.stdout, ran.stderr
    assert "evil" not in ran.stdout.split("Set VMEM_LIBRARY")[0], ran.stdout
