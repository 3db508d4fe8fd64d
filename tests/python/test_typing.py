# SPDX-License-Identifier: Apache-2.0
"""What editors and type checkers see: every public call has types and a docstring."""

import importlib
import inspect
import os
import typing

import pytest

import vmem


FOLDER = os.path.dirname(vmem.__file__)


def modules():
    found = [vmem]
    try:
        found.append(importlib.import_module("vmem.torch"))
    except ImportError:
        pass
    return found


def calls():
    """Yields (name, function) of each module's public calls, and of its classes' own methods and
    properties.
    """
    for module in modules():
        for name in module.__all__:
            what = getattr(module, name)
            if inspect.isclass(what):
                for base in what.__mro__:
                    if not base.__module__.startswith("vmem"):
                        continue
                    for member, value in vars(base).items():
                        value = value.fget if isinstance(value, property) else value
                        # Methods that Python adds to dataclasses and named tuples are not ours.
                        if inspect.isfunction(value) and value.__code__.co_filename.startswith(FOLDER):
                            yield f"{module.__name__}.{name}.{member}", value
            elif callable(what):
                yield f"{module.__name__}.{name}", what


CALLS = dict(calls())
# Methods that every class has need no docstring.
USUAL = {"__init__", "__repr__", "__enter__", "__exit__", "__del__", "__reduce__"}


def test_the_calls_are_found():
    some = {"vmem.alloc", "vmem.Region.free", "vmem.Region.prefetch", "vmem.Array.__dlpack__", "vmem.Lease.held"}
    assert some <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_every_call_says_what_it_does(name):
    member = name.rpartition(".")[2]
    if member not in USUAL and (not member.startswith("_") or member.startswith("__")):
        assert len(CALLS[name].__doc__ or "") > 5, f"{name} has no docstring"


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_its_types(name):
    function = CALLS[name]
    signature = inspect.signature(function)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
    assert not bare and signature.return_annotation is not signature.empty, f"{name}: {bare or 'return'}"
    assert set(typing.get_type_hints(function)) >= {p for p in signature.parameters if p != "self"}


def test_every_class_and_module_says_what_it_is():
    for module in modules():
        assert module.__doc__
        for name in module.__all__:
            what = getattr(module, name)
            assert not inspect.isclass(what) or (what.__doc__ and "Built-in" not in what.__doc__), name
