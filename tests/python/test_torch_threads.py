# SPDX-License-Identifier: Apache-2.0
"""Models are created and dropped while other threads request their budgets."""

import sys
import weakref

import pytest

import vmem
from conftest import MIB

torch = pytest.importorskip("torch", reason="torch is not installed")
from vmem.torch import _target  # noqa: E402


def test_the_budgets_of_models_are_added_while_other_threads_come_and_go(sim):
    class Model:
        pass

    models = [Model(), Model()]
    others = []

    def turn(frame, event, _):
        if frame.f_code.co_filename == weakref.__file__:
            others.append(Model())
            _target._asked[others[-1]] = (0, MIB)
            return turn
        return None

    for model in models:
        _target._asked[model] = (0, 4 * MIB)
    before = sys.gettrace()
    sys.settrace(turn)
    try:
        _target._set_budget()
    finally:
        sys.settrace(before)
        for model in models + others:
            _target._asked.pop(model, None)
    assert others and int(vmem.get("device_budget")) >= 8 * MIB
