# SPDX-License-Identifier: Apache-2.0
import base64
import csv
import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import zipfile

import pytest

import vmem

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make(folder, library, *more):
    made = subprocess.run(
        [sys.executable, os.path.join(TOP, "scripts", "wheel.py"), str(folder), str(library), *more],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return made.stdout.strip()


def clean_environment():
    """Returns the environment without the paths that this suite was started with."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VMEM_LIBRARY")}


def test_a_wheel_lists_what_it_holds_and_is_made_the_same_again(tmp_path):
    library = tmp_path / "libvmem-tier.so.1"
    library.write_bytes(b"a library")
    (tmp_path / "liblz4-dev").mkdir()
    licences = [tmp_path / "liblz4-dev" / "copyright", tmp_path / "LGPL-2.1"]
    for licence in licences:
        licence.write_text("as you like")
    one, two = (make(tmp_path / n, library, "--licences", *map(str, licences)) for n in "12")
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
        for licence in ("LICENSE", "liblz4-dev.txt", "LGPL-2.1.txt"):
            assert any(n.endswith(f".dist-info/licenses/{licence}") for n in names), licence
        assert {"vmem/py.typed", "vmem/libvmem-tier.so.1", "vmem/torch/__init__.py"} <= set(names)
        assert not any("__pycache__" in n for n in names)


def wheel_module():
    spec = importlib.util.spec_from_file_location("wheel", os.path.join(TOP, "scripts", "wheel.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_a_library_needs_is_what_the_linker_says_of_it():
    found = False
    for path in (os.path.join(os.environ["BUILD"], "libvmem.so"), "/usr/lib/x86_64-linux-gnu/libnuma.so.1"):
        if not os.path.exists(path):
            continue
        found = True
        with open(path, "rb") as f:
            names, versions = wheel_module().needs(f.read())
        said = subprocess.run(["readelf", "-dVW", path], check=True, capture_output=True, text=True).stdout
        assert sorted(names) == sorted(re.findall(r"\(NEEDED\).*\[(.*)\]", said)) != []
        assert sorted({v for _, v in versions}) == sorted(set(re.findall(r"Name: (\S+) +Flags", said))) != []
    assert found


def test_the_platform_is_the_newest_version_that_is_needed_or_this_machines_own(monkeypatch):
    wheel = wheel_module()
    said = {}
    monkeypatch.setattr(wheel, "needs", lambda data: said[data])
    said["a"] = (["libc.so.6", "libb.so.1"], [("libc.so.6", "GLIBC_2.9"), ("libb.so.1", "B_7")])
    said["b"] = (["libm.so.6"], [("libm.so.6", "GLIBC_2.2.5")])
    assert wheel.platform({"a.so": "a", "libb.so.1": "b"}) == ("manylinux_2_17_x86_64", "")
    said["b"] = (["libm.so.6"], [("libm.so.6", "GLIBC_2.34"), ("libm.so.6", "GLIBC_2.5")])
    assert wheel.platform({"a.so": "a", "libb.so.1": "b"}) == ("manylinux_2_34_x86_64", "")
    said["b"] = ([], [("libc.so.6", "GLIBC_ABI_DT_RELR")])
    assert wheel.platform({"a.so": "a", "libb.so.1": "b"}) == ("manylinux_2_36_x86_64", "")
    assert wheel.platform({"a.so": "a"}) == ("linux_x86_64", "a.so needs libb.so.1, which is not in the wheel")
    said["b"] = (["libc.so.6"], [("libc.so.6", "GLIBC_PRIVATE")])
    assert wheel.platform({"libb.so.1": "b"})[0] == "linux_x86_64"
    said["b"] = None
    assert "no library" in wheel.platform({"libb.so.1": "b"})[1]


def links(text):
    return {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link} - {""}


def test_pages_that_come_with_a_wheel_link_to_nothing_that_does_not(tmp_path):
    library = tmp_path / "libvmem-tier.so.1"
    library.write_bytes(b"a library")
    with zipfile.ZipFile(make(tmp_path, library)) as wheel:
        names = set(wheel.namelist())
        pages = [n for n in names if n.startswith("vmem/docs/") and n.endswith(".md")]
        assert {"vmem/docs/python.md", "vmem/docs/settings.md", "vmem/docs/device-tier.md"} <= set(pages)
        assert all(f"vmem/docs/{link}" in names for page in pages for link in links(wheel.read(page).decode()))
        assert "vmem.h" in links(wheel.read("vmem/docs/python.md").decode())
        assert not links(wheel.read(next(n for n in names if n.endswith("METADATA"))).decode())


def test_every_page_that_a_message_names_comes_with_a_wheel():
    """Checks the strings of the library and of the package."""
    pages = wheel_module().pages()
    named = set()
    for base, _, files in [*os.walk(os.path.join(TOP, "lib")), *os.walk(os.path.join(TOP, "python", "vmem"))]:
        for file in files:
            if file.endswith((".cpp", ".h", ".py")):
                with open(os.path.join(base, file), encoding="utf-8") as f:
                    code = re.sub(r"^\s*(//|#).*$", "", f.read(), flags=re.MULTILINE)
                named |= set(re.findall(r"\b([a-z-]+\.md)\b", code))
    assert "settings.md" in named
    assert {f"vmem/docs/{page}" for page in named} <= pages.keys()


def test_a_message_names_a_page_that_exists(monkeypatch):
    from vmem import _lib

    with pytest.raises(vmem.Error, match="there is no setting") as e:
        vmem.set("no_such_setting", "1")
    named = re.search(r"(\S*settings\.md) lists", e.value.strerror)
    assert os.path.isabs(named[1]) and os.path.exists(named[1])
    monkeypatch.setattr(_lib, "_PAGES", ())
    with pytest.raises(vmem.Error, match=r"; vmem-settings\(7\) lists"):
        vmem.set("no_such_setting", "1")


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
