# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the safetensors format: 8 bytes of length (little-endian), that many bytes of
JSON, then the tensors.

Every number of a header is checked before anything is mapped; an error names the file, the tensor
and the numbers. The reader accepts and refuses what the library safetensors does
(https://github.com/huggingface/safetensors, Format). It also refuses types of less than a byte, and
shapes that torch cannot have (more than 64 dimensions, strides beyond 63 bits).
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from ._dtypes import BY_SAFETENSORS, DType
from ._lib import LARGEST, MAX_DIMENSIONS, Error, FormatError, open_regular, product, short

MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_DEPTH = 126  # of an entry's lists and objects, the limit of the library's JSON
_FIELDS = ("dtype", "shape", "data_offsets")


class Entry(NamedTuple):
    dtype: DType
    shape: Tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class Header(NamedTuple):
    path: str
    file: io.FileIO  # kept open, so that the checked file is mapped even if its name changes
    size: int  # bytes of the file
    metadata: Dict[str, str]
    tensors: Dict[str, Entry]  # in the order of the file's bytes


class _Object(Dict[str, Any]):
    """A JSON object. If a name occurs twice, the last value counts and the others are in
    `hidden`."""

    hidden: Sequence[Tuple[str, Any]] = ()

    def twice(self, *names: str) -> Optional[str]:
        """Returns one of the names that occur twice."""
        return next((name for name, _ in self.hidden if name in names), None)


def _object(pairs: List[Tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) != len(pairs):
        last = {name: i for i, (name, _) in enumerate(pairs)}
        made.hidden = [pair for i, pair in enumerate(pairs) if last[pair[0]] != i]
    return made


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"a number of {len(digits)} digits is out of range")
    return value


def _number(digits: str) -> Union[int, float]:
    # A size in bytes has at most 20 digits, and parsing millions of digits takes minutes. A size is
    # never "-0".
    return _real(digits) if len(digits) > 20 or digits == "-0" else int(digits)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _json(path: str, text: bytes, what: str) -> _Object:
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_number,
            parse_float=_real,
            parse_constant=_no_number,
        )
        if b"\\u" in text:  # half of a surrogate pair is not a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: {what} is not JSON: {e}") from None
    if not isinstance(value, _Object):
        raise FormatError(f"{path}: {what} is a JSON {type(value).__name__}, not an object")
    return value


def _depth(value: Any) -> int:
    """Returns the nesting depth of lists and objects."""
    depth, level = 0, [value]
    while any(isinstance(v, (list, dict)) for v in level):
        level = [w for v in level if isinstance(v, (list, dict)) for w in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return depth


def _bad(path: str, name: str, words: str) -> FormatError:
    return FormatError(f"{path}: tensor {short(name)}: {words}")


def _fields(path: str, name: str, value: Any) -> Tuple[DType, List[int], int, int]:
    """Returns dtype, shape and data_offsets of an entry, with their types checked."""

    def bad(words: str) -> FormatError:
        return _bad(path, name, words)

    if not isinstance(value, _Object) or not value.keys() >= set(_FIELDS):
        raise bad("its header has no dtype, shape and data_offsets")
    if value.twice(*_FIELDS) is not None:
        raise bad(f"its header has {value.twice(*_FIELDS)} twice")
    if len(value) > len(_FIELDS) and _depth(value) > MAX_DEPTH:
        raise bad(f"its header is nested deeper than {MAX_DEPTH}")
    dtype = BY_SAFETENSORS.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise bad(f"dtype {short(value['dtype'])} is not supported; there are: {', '.join(sorted(BY_SAFETENSORS))}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not all(_whole(n) for n in shape):
        raise bad(f"shape {short(shape)} is not a list of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise bad(f"data_offsets {short(offsets)} are not two whole numbers")
    return dtype, shape, offsets[0], offsets[1]


def _entry(path: str, name: str, value: Any, start: int, data: int) -> Entry:
    dtype, shape, begin, end = _fields(path, name, value)
    if len(shape) > MAX_DIMENSIONS:
        raise _bad(path, name, f"its shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    strides = product([n or 1 for n in shape], dtype.itemsize, LARGEST)  # must fit even if there are no bytes
    nbytes = 0 if strides is not None and 0 in shape else strides
    if nbytes is None or end - begin != nbytes:
        needs = f"more than {LARGEST}" if nbytes is None else str(nbytes)
        words = f"needs {needs} bytes, its data_offsets {begin} to {end} hold {end - begin}"
        raise _bad(path, name, f"{dtype.safetensors} {short(shape)} {words}")
    if end > data:
        raise _bad(path, name, f"its bytes end at {start + end}, but the file has {start + data}: it is truncated")
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
    if not text.lstrip(b" \t\r\n").startswith(b"{"):
        raise FormatError(f"{path}: the header does not begin with '{{': no safetensors file")
    header = _json(path, text, "the header")
    if header.twice("__metadata__") is not None:
        raise FormatError(f"{path}: the header has __metadata__ twice")
    for name, hidden in header.hidden:
        _fields(path, name, hidden)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # null: none
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
    return Header(path, file, size, dict(metadata), ordered)


def _read_json(path: str, what: str) -> _Object:
    file, size = open_regular(path)
    with file:
        if size > MAX_HEADER:
            raise FormatError(f"{path}: has {size} bytes, above {MAX_HEADER}: no {what}")
        return _json(path, _read(path, file, size), f"the {what}")


def _beside(path: str, named: Any, why: str) -> str:
    """Returns the path of a file named by `path`. It must be in the same folder, because the files
    may come from strangers."""
    proper = isinstance(named, str) and named != "" and "\0" not in named
    if not proper or os.path.isabs(named) or ".." in named.split("/"):
        raise FormatError(f"{path}: {why} {short(named)}: no file name inside its folder")
    where = os.path.join(os.path.dirname(path), named)
    if not os.path.isfile(where):
        raise Error(errno.ENOENT, f"{path}: {why} {short(named)}: no such file beside it")
    return where


def read_index(path: str) -> Dict[str, List[str]]:
    """Returns the paths of an index's files (model.safetensors.index.json), with the tensors that
    each should contain."""
    weights = _read_json(path, "index of safetensors files").get("weight_map")
    if not isinstance(weights, _Object) or not weights:
        raise FormatError(f"{path}: has no weight_map that names tensors and their files")
    if weights.hidden:
        raise FormatError(f"{path}: its weight_map has tensor {short(weights.hidden[0][0])} twice")
    found: Dict[str, List[str]] = {}
    for name, named in weights.items():
        if isinstance(named, str) and named in found:
            found[named].append(name)
        else:
            _beside(path, named, f"tensor {short(name)} is in")
            found[named] = [name]
    return {os.path.join(os.path.dirname(path), named): names for named, names in sorted(found.items())}


def headers(path: Any) -> List[Header]:
    """Returns the checked headers for load(): for an index, those of all its files with all their
    tensors."""
    if isinstance(path, (list, tuple)):
        named: Dict[str, List[str]] = {os.fsdecode(p): [] for p in path}
        if not named:
            raise ValueError("the list of files is empty")
    else:
        path = os.fsdecode(path)
        if os.path.isdir(path):
            path = _in_folder(path)
        named = read_index(path) if path.endswith(".json") else {path: []}
    found: List[Header] = []
    try:
        _read_all(path, named, found)
    except BaseException:
        for header in found:
            header.file.close()
        raise
    return found


def _read_all(path: Any, named: Dict[str, List[str]], found: List[Header]) -> None:
    owner: Dict[str, str] = {}
    for file, names in named.items():
        header = read_header(file)
        found.append(header)
        for name in names:
            if name not in header.tensors:
                raise FormatError(
                    f"{path}: says that tensor {short(name)} is in {short(file)}, which does not hold it"
                )
        for name in header.tensors:
            if name in owner:
                raise FormatError(f"tensor {short(name)} is in {short(owner[name])} and in {short(file)}")
            owner[name] = file


SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # of a distributed checkpoint
OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def _in_folder(folder: str) -> str:
    """Returns the file or index that transformers' from_pretrained(folder) loads; refuses one that
    cannot be mapped. If transformers finds none, returns the only safetensors file in the
    folder."""

    def there(name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name))

    files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
    if any(SHARD.fullmatch(f) for f in files):
        raise Error(errno.ENOTSUP, f"{folder}: holds a distributed checkpoint ({files[0]}, ..); name the files")
    if there("adapter_config.json") and not there("config.json"):
        raise Error(errno.ENOTSUP, f"{folder}: holds an adapter of a model that is elsewhere; name the file")
    if there("config.json"):
        config = os.path.join(folder, "config.json")
        chosen = _read_json(config, "model's configuration").get("transformers_weights")
        if chosen is not None:
            where = _beside(config, chosen, "transformers_weights is")
            if not where.endswith((".safetensors", ".safetensors.index.json")):
                raise Error(errno.ENOTSUP, f"{config}: transformers_weights is {short(chosen)}: no safetensors file")
            return where
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if there(name):
            return os.path.join(folder, name)
    for name in OTHERS:
        if there(name):
            raise Error(
                errno.ENOTSUP,
                f"{folder}: its model is in {name}, which cannot be mapped, and {len(files)} other safetensors files "
                "are beside it; convert it, or name the file, the files or the index",
            )
    if len(files) != 1:
        raise Error(
            errno.ENOENT,
            f"{folder}: has neither model.safetensors nor model.safetensors.index.json, and {len(files)} other "
            "safetensors files; name the file, the files or the index",
        )
    return os.path.join(folder, files[0])


def make_header(
    tensors: Iterable[Tuple[str, DType, Tuple[int, ...]]], metadata: Dict[str, str], align: int
) -> bytes:
    """Returns the first bytes of a file with these tensors in this order; the data begins at a
    multiple of `align`."""
    entries: Dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = len(text) + -(8 + len(text)) % align  # the format pads with blanks
    if length > MAX_HEADER:
        raise ValueError(f"the header of {len(entries)} entries has {length} bytes, above the format's {MAX_HEADER}")
    return struct.pack("<Q", length) + text.ljust(length)


def check_text(name: str, text: Any) -> None:
    """Raises TypeError if it is not text, ValueError if the format cannot hold it. The message uses
    `name`."""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {short(text)}, a {type(text).__name__}; safetensors files have strings there")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {short(text)}: half of a surrogate pair is no character") from None


def check_metadata(metadata: Any) -> Dict[str, str]:
    """Returns a copy. TypeError: it is not a dictionary of strings."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is a {type(metadata).__name__}; give a dictionary of strings")
    for key, value in metadata.items():
        check_text("a key of the metadata", key)
        check_text(f"metadata {short(key)}", value)
    return dict(metadata)


def check_name(name: Any) -> None:
    """Raises TypeError or ValueError for an invalid tensor name."""
    check_text("the name of a tensor", name)
    if name == "__metadata__":
        raise ValueError("a tensor cannot be called '__metadata__': the format keeps the metadata there")


def check_written(path: str, names: Iterable[Tuple[str, DType, Tuple[int, ...]]], metadata: Dict[str, str]) -> None:
    """Reads a file's header back. FormatError: it has other tensors or metadata."""
    header = read_header(path)
    header.file.close()
    says = [(name, entry.dtype, entry.shape) for name, entry in header.tensors.items()]
    # The order of tensors without bytes does not matter.
    if sorted(says) != sorted(names) or header.metadata != metadata:
        raise FormatError(f"{path}: was written, and its header says something else; nothing was replaced")
