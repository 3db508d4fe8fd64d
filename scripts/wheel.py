#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel.py FOLDER LIBRARY..: makes FOLDER/vmem-VERSION-py3-none-linux_x86_64.whl of python/vmem, libvmem and libraries
that lie beside it.
wheel.py --unpacked FOLDER: puts python/vmem and its metadata there, without a library: the system has one.

A wheel is a zip with a list of digests in it (PyPA's binary distribution format); nothing but Python is needed to make
one. The same files give the same wheel, byte for byte.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TAG = "py3-none-linux_x86_64"


def read(*path):
    with open(os.path.join(TOP, *path), "rb") as f:
        return f.read()


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
        "License: Apache-2.0; libnuma.so.1, where it lies beside the library: LGPL-2.1\nRequires-Python: >=3.9\n"
        "Provides-Extra: numpy\nRequires-Dist: numpy; extra == 'numpy'\n"
        "Provides-Extra: torch\nRequires-Dist: torch; extra == 'torch'\n"
        "Description-Content-Type: text/markdown\n\n"
    ).encode() + read("docs", "python.md")


def unpacked(folder):
    number = version()
    files = package()
    files[f"vmem-{number}.dist-info/METADATA"] = metadata(number)
    for path, data in files.items():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)


def main(folder, *libraries):
    files = package()
    for library in libraries:
        with open(library, "rb") as f:
            files["vmem/" + os.path.basename(library)] = f.read()
    number = version()
    info = f"vmem-{number}.dist-info"
    files[f"{info}/METADATA"] = metadata(number)
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: libvmem\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    files[f"{info}/LICENSE"] = read("LICENSE")
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"vmem-{number}-{TAG}.whl")
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
