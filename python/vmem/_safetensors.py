# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, read and written: 8 bytes of length (little-endian), so many bytes of JSON, then the tensors.

Every number of a header is checked before anything is mapped; a refusal names the file, the tensor and the numbers.
https://github.com/huggingface/safetensors (Format) is what is followed; the sub-byte types are not supported.
"""

from __future__ import annotations

import errno
import io
import json
import os
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from ._dtypes import BY_SAFETENSORS, DType
from ._lib import LARGEST, MAX_DIMENSIONS, Error, FormatError, open_regular, product, short

MAX_HEADER = 100_000_000  # bytes, the format's own limit


class Entry(NamedTuple):
    dtype: DType
    shape: Tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class Header(NamedTuple):
    path: str
    file: io.FileIO  # open: what is mapped is the file that was checked, whatever has its name by then
    size: int  # of the file, bytes
    metadata: Dict[str, str]
    tensors: Dict[str, Entry]  # in the order of the file's bytes


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {short(name)} is there twice")
        found[name] = value
    return found


def _number(digits: str) -> int:
    if len(digits) > 20:  # no size in bytes has more, and to read millions of digits takes minutes
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _json(path: str, text: bytes, what: str) -> Dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_int=_number)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: {what} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {what} is a JSON {type(value).__name__}, not an object")
    return value


def _entry(path: str, name: str, value: Any, start: int, data: int) -> Entry:
    def bad(words: str) -> FormatError:
        return FormatError(f"{path}: tensor {short(name)}: {words}")

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise bad("its header has no dtype, shape and data_offsets")
    dtype = BY_SAFETENSORS.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise bad(f"dtype {short(value['dtype'])} is not supported; there are: {', '.join(sorted(BY_SAFETENSORS))}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not all(_whole(n) for n in shape):
        raise bad(f"shape {short(shape)} is not a list of whole numbers")
    if len(shape) > MAX_DIMENSIONS:
        raise bad(f"its shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise bad(f"data_offsets {short(offsets)} are not two whole numbers")
    begin, end = offsets
    strides = product([n or 1 for n in shape], dtype.itemsize, LARGEST)  # must fit where there are no bytes, too
    nbytes = 0 if strides is not None and 0 in shape else strides
    if nbytes is None or end - begin != nbytes:
        needs = f"more than {LARGEST}" if nbytes is None else str(nbytes)
        raise bad(
            f"{dtype.safetensors} {short(shape)} needs {needs} bytes, its data_offsets {begin} to {end} hold "
            f"{end - begin}"
        )
    if end > data:
        raise bad(f"its bytes end at {start + end}, but the file has {start + data}: it is truncated")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _read(path: str, file: io.FileIO, length: int) -> bytes:
    text = b""
    while len(text) < length:
        more = file.read(length - len(text))
        if not more:
            raise FormatError(f"{path}: became shorter while it was read")
        text += more
    return text


def read_header(path: str) -> Header:
    """Reads and checks a file's header. FormatError; OSError when the file cannot be read."""
    file, size = open_regular(path)
    try:
        return _read_header(path, file, size)
    except BaseException:
        file.close()
        raise


def _read_header(path: str, file: io.FileIO, size: int) -> Header:
    first = file.read(8)
    if len(first) < 8:
        raise FormatError(f"{path}: has {size} bytes; a safetensors file has at least 8 and a header")
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER:
        raise FormatError(f"{path}: the header's length is {length}, above {MAX_HEADER}: no safetensors file")
    if length > size - 8:
        raise FormatError(
            f"{path}: the header needs {length} bytes, the file has {size - 8} after its length: it is truncated"
        )
    text = _read(path, file, length)
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: the header does not begin with '{{': no safetensors file")
    header = _json(path, text, "the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{path}: __metadata__ is not an object of strings")
    start = 8 + length
    tensors = {name: _entry(path, name, value, start, size - start) for name, value in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    last, at = None, start
    for name, entry in ordered.items():
        if entry.begin < at:
            raise FormatError(
                f"{path}: tensors {short(last)} and {short(name)} overlap: one ends at byte {at}, the other begins "
                f"at {entry.begin}"
            )
        if entry.begin > at:
            gap = entry.begin - at
            raise FormatError(
                f"{path}: tensor {short(name)} begins at byte {entry.begin}, {gap} bytes after what is before it"
            )
        last, at = name, entry.end
    if at != size:
        raise FormatError(f"{path}: {size - at} bytes follow the last tensor, which ends at byte {at}")
    return Header(path, file, size, metadata, ordered)


def read_index(path: str) -> Dict[str, List[str]]:
    """The files of an index (model.safetensors.index.json), as paths, and the tensors wanted from each."""
    file, size = open_regular(path)
    with file:
        if size > MAX_HEADER:
            raise FormatError(f"{path}: has {size} bytes, above {MAX_HEADER}: no index of safetensors files")
        index = _json(path, _read(path, file, size), "the index")
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise FormatError(f"{path}: has no weight_map that names tensors and their files")
    folder = os.path.dirname(path)
    wanted: Dict[str, List[str]] = {}
    for name, beside in weights.items():
        named = isinstance(beside, str) and beside != "" and "\0" not in beside
        if not named or os.path.isabs(beside) or ".." in beside.split("/"):
            raise FormatError(
                f"{path}: tensor {short(name)} is in {short(beside)}: no file name inside the index's folder"
            )
        where = os.path.join(folder, beside)
        if where not in wanted and not os.path.isfile(where):
            raise Error(
                errno.ENOENT, f"{path}: tensor {short(name)} is in {short(beside)}: no such file beside the index"
            )
        wanted.setdefault(where, []).append(name)
    return wanted


def headers(path: Any) -> List[Tuple[Header, Optional[List[str]]]]:
    """The checked headers of what load() was given, and the names wanted from each (None: all)."""
    if isinstance(path, (list, tuple)):
        wanted: Dict[str, Optional[List[str]]] = {os.fspath(p): None for p in path}
        if not wanted:
            raise ValueError("the list of files is empty")
    else:
        path = os.fspath(path)
        if os.path.isdir(path):
            path = _in_folder(path)
        wanted = dict(read_index(path)) if path.endswith(".json") else {path: None}
    found: List[Tuple[Header, Optional[List[str]]]] = []
    try:
        _read_all(path, wanted, found)
    except BaseException:
        for header, _ in found:
            header.file.close()
        raise
    return found


def _read_all(
    path: Any, wanted: Dict[str, Optional[List[str]]], found: List[Tuple[Header, Optional[List[str]]]]
) -> None:
    owner: Dict[str, str] = {}
    for file, names in wanted.items():
        header = read_header(file)
        found.append((header, names))
        for name in header.tensors if names is None else names:
            if name not in header.tensors:
                raise FormatError(
                    f"{path}: says that tensor {short(name)} is in {short(file)}, which does not hold it"
                )
            if name in owner:
                raise FormatError(f"tensor {short(name)} is in {short(owner[name])} and in {short(file)}")
            owner[name] = file


def _in_folder(folder: str) -> str:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if os.path.exists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    files = sorted(f for f in os.listdir(folder) if f.endswith((".safetensors", ".safetensors.index.json")))
    if len(files) != 1:
        raise Error(
            errno.ENOENT,
            f"{folder}: has neither model.safetensors.index.json nor model.safetensors, and {len(files)} other "
            "safetensors files; name the file, the files or the index",
        )
    return os.path.join(folder, files[0])


def make_header(
    tensors: Iterable[Tuple[str, DType, Tuple[int, ...]]], metadata: Dict[str, str], align: int
) -> bytes:
    """The first bytes of a file whose tensors follow in this order; the data begins at a multiple of `align`."""
    entries: Dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        entries[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)  # the format pads with blanks
    return struct.pack("<Q", len(text)) + text
