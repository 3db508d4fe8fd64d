#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel.py FOLDER LIBRARY.. [--licences FILE..]: makes FOLDER/vmem-VERSION-py3-none-PLATFORM.whl of
python/vmem, the pages of docs, libvmem and the libraries beside it. The licences are those of the
code linked into these.
wheel.py --unpacked FOLDER: puts python/vmem and its metadata there, without a library, for use with
the system's.

A wheel is a zip that contains a list of digests (PyPA's binary distribution format). Only Python is
needed to make one. The same files give a byte-identical wheel.

PLATFORM is manylinux_2_N_x86_64 (PEP 600) if the libraries need nothing else from outside; N comes
from the newest symbol of the C library that they need. Otherwise it is linux_x86_64, and a line says
why.
"""

import base64
import hashlib
import os
import re
import struct
import sys
import zipfile

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Parts of the C library: present on every system of its version.
C_LIBRARY = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2",
}  # fmt: skip


def read(*path):
    with open(os.path.join(TOP, *path), "rb") as f:
        return f.read()


def needs(elf):
    """Returns what a shared library needs: names of libraries, and versions of symbols as (library,
    version)."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return None
    (table,), (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names, versions = [], []

    def text(section, at):
        begin = headers[headers[section][6]][4] + at
        return elf[begin : elf.index(b"\0", begin)].decode()

    for i, (_, kind, _, _, begin, length, _, entries, _, _) in enumerate(headers):
        if kind == 6:  # SHT_DYNAMIC
            for at in range(begin, begin + length, 16):
                tag, value = struct.unpack_from("<qQ", elf, at)
                if tag == 1:  # DT_NEEDED
                    names.append(text(i, value))
        elif kind == 0x6FFFFFFE:  # SHT_GNU_verneed
            at = begin
            for _ in range(entries):
                _, symbols, file, first, further = struct.unpack_from("<HHIII", elf, at)
                one = at + first
                for _ in range(symbols):
                    _, _, _, name, following = struct.unpack_from("<IHHII", elf, one)
                    versions.append((text(i, file), text(i, name)))
                    one += following
                at += further
    return names, versions


def platform(libraries):
    """Returns the platform for the wheel's name, and why it is not a better one ("")."""
    newest = (2, 17)
    for library, data in libraries.items():
        found = needs(data)
        if found is None:
            return "linux_x86_64", f"{library} is no library for x86-64"
        for name in found[0]:
            if name not in C_LIBRARY and name not in libraries:
                return "linux_x86_64", f"{library} needs {name}, which is not in the wheel"
        for name, symbol in found[1]:
            if name in libraries:
                continue
            number = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", symbol)
            if symbol == "GLIBC_ABI_DT_RELR":
                newest = max(newest, (2, 36))
            elif number is None:
                return "linux_x86_64", f"{library} needs {symbol} of {name}"
            else:
                newest = max(newest, (int(number[1]), int(number[2])))
    return f"manylinux_{newest[0]}_{newest[1]}_x86_64", ""


def plain_links(page, there):
    """Removes links to files that the wheel lacks; links to vmem.h, which it has, become its
    path."""
    page = page.replace("](../include/vmem/vmem.h)", "](vmem.h)")

    def keep(link):
        target = link[2].split("#")[0]
        return link[0] if "://" in target or not target or target in there else link[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s]*)\)", keep, page)


def pages():
    """Returns the documents for users who have only the wheel: messages and docstrings refer to
    them."""
    names = sorted(f for f in os.listdir(os.path.join(TOP, "docs")) if f.endswith(".md"))
    files = {f"vmem/docs/{n}": plain_links(read("docs", n).decode(), {*names, "vmem.h"}).encode() for n in names}
    files["vmem/docs/vmem.h"] = read("include", "vmem", "vmem.h")
    return files


def version():
    header = read("include", "vmem", "vmem.h").decode()
    found = ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR"))
    if f'"{found}"' not in read("python", "vmem", "_version.py").decode():
        sys.exit(f"wheel: vmem.h says version {found}, python/vmem/_version.py another")
    return found


def package():
    files = {}
    for base, folders, names in os.walk(os.path.join(TOP, "python", "vmem")):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            path = os.path.relpath(os.path.join(base, name), os.path.join(TOP, "python"))
            files[path] = read("python", path)
    return files


def metadata(number):
    return (
        f"Metadata-Version: 2.1\nName: vmem\nVersion: {number}\n"
        "Summary: One address range over GPU memory, host memory and NVMe\n"
        "License: Apache-2.0; of what is linked into the library, or lies beside it: see the folder licenses\n"
        "Requires-Python: >=3.9\n"
        "Provides-Extra: numpy\nRequires-Dist: numpy; extra == 'numpy'\n"
        "Provides-Extra: torch\nRequires-Dist: torch; extra == 'torch'\n"
        "Description-Content-Type: text/markdown\n\n"
        "(The pages that are named here are in the package, in the folder vmem/docs.)\n\n"
    ).encode() + plain_links(read("docs", "python.md").decode(), ()).encode()


def unpacked(folder):
    number = version()
    files = package()
    files[f"vmem-{number}.dist-info/METADATA"] = metadata(number)
    for path, data in files.items():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)


def licence_name(path):
    """Converts /usr/share/doc/liblz4-dev/copyright to liblz4-dev.txt."""
    folder, name = os.path.split(os.path.abspath(path))
    return (os.path.basename(folder) if name == "copyright" else name) + ".txt"


def main(folder, *words):
    libraries, licences = words, ()
    if "--licences" in words:
        at = words.index("--licences")
        libraries, licences = words[:at], words[at + 1 :]
        if not licences:
            print("wheel: no licences of what is linked in were found here: not to be handed on", file=sys.stderr)
    files = {**package(), **pages()}
    beside = {}
    for library in libraries:
        with open(library, "rb") as f:
            beside[os.path.basename(library)] = f.read()
    files.update({"vmem/" + name: data for name, data in beside.items()})
    system, why = platform(beside)
    if why:
        print(f"wheel: for machines like this one only: {why}", file=sys.stderr)
    tag = f"py3-none-{system}"
    number = version()
    info = f"vmem-{number}.dist-info"
    files[f"{info}/METADATA"] = metadata(number)
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: libvmem\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/licenses/LICENSE"] = read("LICENSE")
    for path in licences:
        with open(path, "rb") as f:
            files[f"{info}/licenses/{licence_name(path)}"] = f.read()
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"vmem-{number}-{tag}.whl")
    with zipfile.ZipFile(path + ".part", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if ".so" in name else 0o644) << 16
            wheel.writestr(entry, data)
    os.replace(path + ".part", path)
    print(path)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    unpacked(sys.argv[2]) if sys.argv[1] == "--unpacked" else main(*sys.argv[1:])
