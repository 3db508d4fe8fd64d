# SPDX-License-Identifier: Apache-2.0
"""Folders of models give the same weights as transformers, or are refused."""

import json
import os
import shutil

import pytest

import vmem

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
import vmem.torch as vt  # noqa: E402

NAME = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def made(seed):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def folder(tmp_path):
    """Makes two folders: a model in several files with an index, saved first, and a model in one
    file, saved later.
    """
    made(1).save_pretrained(tmp_path / "old", max_shard_size="20KB")
    made(2).save_pretrained(tmp_path / "new")
    return tmp_path


def copy(source, target, *names):
    for name in names or os.listdir(source):
        shutil.copy(source / name, target / name)


def compare(folder):
    """Returns True if the weights are the same, False if we or transformers refuse."""
    try:
        got = vt.load(folder)
    except vmem.Error:
        return False
    try:
        want = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    except (OSError, ValueError, RuntimeError, KeyError):
        return False
    assert not [n for n in want if n not in got or not torch.equal(got[n], want[n])]
    return True


def test_a_file_an_index_and_both(host, folder):
    assert compare(folder / "old") and compare(folder / "new")
    both = folder / "both"
    both.mkdir()
    copy(folder / "old", both)
    copy(folder / "new", both)
    assert compare(both)
    first = vt.load(both)[NAME]
    assert torch.equal(first, made(2).state_dict()[NAME])
    for name in os.listdir(folder / "old"):  # a stale index without its files
        if name != INDEX and name.endswith(".safetensors"):
            os.unlink(both / name)
    assert compare(both)
    os.unlink(both / "model.safetensors")
    with pytest.raises(vmem.Error, match="no such file beside"):
        vt.load(both)
    del first


def test_configurations_that_name_a_file(host, folder):
    copy(folder / "new", folder / "old", "model.safetensors")
    config = json.loads((folder / "old" / "config.json").read_text())
    for chosen in (INDEX, "model.safetensors", "../new/model.safetensors"):
        (folder / "old" / "config.json").write_text(json.dumps({**config, "transformers_weights": chosen}))
        assert compare(folder / "old") == (not chosen.startswith(".."))


def test_an_index_that_is_wrong_gives_the_same_or_is_refused(host, folder):
    old = folder / "old"
    index = json.loads((old / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2

    def changed(**entries):
        weights = {n: f for n, f in {**index["weight_map"], **entries}.items() if f is not None}
        (old / INDEX).write_text(json.dumps({**index, "weight_map": weights}))
        return compare(old)

    assert changed(**{NAME: None})  # in a file that the index uses for others
    wrong = next(f for f in files if f != index["weight_map"][NAME])
    assert not changed(**{NAME: wrong})
    assert not changed(**{NAME: "../old/" + index["weight_map"][NAME]})
    assert not changed(none="none.safetensors")
    shutil.copy(old / files[0], old / "again.safetensors")
    assert not changed(**{next(n for n, f in index["weight_map"].items() if f == files[0]): "again.safetensors"})
