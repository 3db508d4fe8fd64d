# SPDX-License-Identifier: Apache-2.0
import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile

import pytest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make(folder, library):
    made = subprocess.run(
        [sys.executable, os.path.join(TOP, "scripts", "wheel.py"), str(folder), str(library)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return made.stdout.strip()


def clean_environment():
    """Without the paths that this suite was started with."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VMEM_LIBRARY")}


def test_a_wheel_lists_what_it_holds_and_is_made_the_same_again(tmp_path):
    library = tmp_path / "libvmem-tier.so.1"
    library.write_bytes(b"a library")
    one, two = make(tmp_path / "1", library), make(tmp_path / "2", library)
    with open(one, "rb") as a, open(two, "rb") as b:
        assert a.read() == b.read()
    assert os.path.basename(one).endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(one) as wheel:
        names = wheel.namelist()
        record = next(n for n in names if n.endswith("RECORD"))
        rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
        assert [r[0] for r in rows] == names
        for name, digest, size in rows:
            if name != record:
                data = wheel.read(name)
                assert int(size) == len(data)
                want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert digest == "sha256=" + want
        assert {"vmem/py.typed", "vmem/libvmem-tier.so.1", "vmem/torch/__init__.py"} <= set(names)
        assert not any("__pycache__" in n for n in names)


def test_unpacked_it_is_found_with_its_version_and_without_a_library(tmp_path):
    script = os.path.join(TOP, "scripts", "wheel.py")
    subprocess.run([sys.executable, script, "--unpacked", str(tmp_path)], check=True)
    assert not list(tmp_path.rglob("*.so*")) and not list(tmp_path.rglob("__pycache__"))
    code = "import importlib.metadata as m; print(m.version('vmem'), m.distribution('vmem').read_text('METADATA')[:21])"
    environment = dict(clean_environment(), PYTHONPATH=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    with open(os.path.join(TOP, "python", "vmem", "_version.py")) as f:
        assert f'"{ended.stdout.split()[0]}"' in f.read() and "Metadata-Version: 2.1" in ended.stdout


def test_a_wheel_installs_offline_into_a_fresh_environment_and_works(tmp_path):
    venv = tmp_path / "venv"
    make_venv = [sys.executable, "-m", "venv", str(venv)]
    made = subprocess.run(make_venv, capture_output=True, text=True, env=clean_environment())
    if made.returncode != 0:
        pytest.skip("this Python makes no virtual environments (python3-venv)")
    python = str(venv / "bin" / "python")
    library = tmp_path / "libvmem-tier.so.1"
    built = os.path.join(os.environ["BUILD"], "libvmem.so")
    subprocess.run(["strip", "--strip-debug", "-o", str(library), built], check=True)
    wheel = make(tmp_path, library)
    command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(command, check=True, env=clean_environment())
    code = """
import os, vmem
assert os.path.dirname(vmem.__file__).startswith(%r), vmem.__file__
vmem.configure(device="none", host_budget="32MiB")
with vmem.alloc("64MiB") as region:
    view = region.memoryview()
    for at in range(0, 64 << 20, 1 << 20): view[at] = at >> 20
    region.evict()
    assert all(view[at] == at >> 20 for at in range(0, 64 << 20, 1 << 20))
    del view
try:
    vmem.alloc(1 << 60)
except vmem.Error as e:
    print(vmem.__version__, e.strerror)
""" % str(venv)
    ended = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=str(tmp_path), env=clean_environment()
    )
    assert ended.returncode == 0 and "size" in ended.stdout, ended.stderr
