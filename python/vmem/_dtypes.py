# SPDX-License-Identifier: Apache-2.0
"""Element types by name, with their names in NumPy, DLPack, torch and safetensors."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional


class DType(NamedTuple):
    name: str  #: also torch's name
    itemsize: int  #: bytes
    typestr: Optional[str]  #: NumPy's array interface; None: NumPy has no such type
    dl_code: int  #: DLDataTypeCode
    safetensors: str
    letter: Optional[str] = None  #: of a memoryview's format; None: it has none


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6

_ALL = (
    DType("bool", 1, "|b1", _BOOL, "BOOL", "?"),
    DType("uint8", 1, "|u1", _UINT, "U8", "B"),
    DType("int8", 1, "|i1", _INT, "I8", "b"),
    DType("uint16", 2, "<u2", _UINT, "U16", "H"),
    DType("int16", 2, "<i2", _INT, "I16", "h"),
    DType("float16", 2, "<f2", _FLOAT, "F16"),
    DType("bfloat16", 2, None, _BFLOAT, "BF16"),
    DType("uint32", 4, "<u4", _UINT, "U32", "I"),
    DType("int32", 4, "<i4", _INT, "I32", "i"),
    DType("float32", 4, "<f4", _FLOAT, "F32", "f"),
    DType("uint64", 8, "<u8", _UINT, "U64", "L"),
    DType("int64", 8, "<i8", _INT, "I64", "l"),
    DType("float64", 8, "<f8", _FLOAT, "F64", "d"),
    DType("complex64", 8, "<c8", _COMPLEX, "C64"),
    DType("float8_e4m3fn", 1, None, 10, "F8_E4M3"),
    DType("float8_e4m3fnuz", 1, None, 11, "F8_E4M3FNUZ"),
    DType("float8_e5m2", 1, None, 12, "F8_E5M2"),
    DType("float8_e5m2fnuz", 1, None, 13, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, None, 14, "F8_E8M0"),
)

BY_NAME: Dict[str, DType] = {d.name: d for d in _ALL}
BY_SAFETENSORS: Dict[str, DType] = {d.safetensors: d for d in _ALL}


def dtype_of(what: Any) -> DType:
    """From a name ("float32"), a DType, a torch.dtype, or anything that numpy.dtype() accepts."""
    if isinstance(what, DType):
        return what
    name = str(what)
    if name.startswith("torch."):
        name = name[len("torch.") :]
    if name not in BY_NAME and what is not None and not isinstance(what, str):  # None would be float64
        try:
            import numpy

            known = numpy.dtype(what)
            name = known.name if known.isnative else known.str  # the name does not tell the byte order
        except (ImportError, TypeError):
            pass
    found = BY_NAME.get(name)
    if found is None:
        raise TypeError(f"dtype {what!r} is not known; there are: {', '.join(sorted(BY_NAME))}")
    return found
