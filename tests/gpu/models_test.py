#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on a real GPU: tensors at one address on CPU and GPU, leases on torch's
streams, offloaded models of transformers beside the same models on the GPU. Prints a line per test;
the last line counts them.

    python3 -m pip install --no-index --target SITE build/wheel/*.whl     # after make wheel
    PYTHONPATH=SITE python3 tests/gpu/models_test.py [FILTER]

At most 1 GiB of managed memory is alive. Exit code 77: no torch or no GPU; 2: too little memory is
free.
"""

import errno
import gc
import os
import sys
import tempfile
import traceback

MIB = 1 << 20
TESTS = []


def test(function):
    TESTS.append(function)
    return function


def raises(code, call):
    try:
        call()
    except vmem.Error as e:
        assert e.errno == code, e
        return e.strerror
    raise AssertionError("it was not refused")


@test
def a_gpu_tensor_has_the_regions_address_and_sees_what_the_cpu_wrote():
    with vmem.alloc(64 * MIB) as region:
        cpu, gpu = vt.tensor(region, "float32"), vt.tensor(region, "float32", device="cuda")
        assert cpu.data_ptr() == gpu.data_ptr() == region.ptr and gpu.is_cuda
        cpu.copy_(torch.arange(cpu.numel(), dtype=torch.float32))
        region.evict()
        with vt.leased(gpu, access=vmem.READ | vmem.WRITE, device="cuda"):
            gpu.mul_(2)
        assert torch.equal(cpu, torch.arange(cpu.numel(), dtype=torch.float32) * 2)
        del cpu, gpu


@test
def leases_follow_the_current_stream():
    with vmem.alloc(32 * MIB) as region:
        t = vt.tensor(region, "float32", device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for i in range(20):
                with vt.leased(t, access=vmem.READ | vmem.WRITE, device="cuda"):
                    t.add_(1)
                region.prefetch(vmem.HOST)
        side.synchronize()
        assert (vt.tensor(region, "float32") == 20).all()
        del t


@test
def dlpack_and_the_cuda_array_interface_are_taken():
    with vmem.alloc(4 * MIB) as region:
        array = region.array("float32", (1024, 1024)).on(0)
        with region.acquire(vmem.READ | vmem.WRITE, 0, torch.cuda.current_stream()):
            t = torch.as_tensor(array, device="cuda")
            assert t.data_ptr() == region.ptr
            t.fill_(3)
            torch.cuda.synchronize()
            try:
                import cupy
            except ImportError:
                cupy = None
            if cupy is not None:
                assert float(cupy.from_dlpack(array).sum()) == 3 * MIB
            del t
        assert (region.numpy("float32") == 3).all()
        del array


@test
def every_type_has_its_gpu_tensor():
    with vmem.alloc(2 * MIB) as region:
        for name in ("bool", "int8", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "int64"):
            array = region.array(name, (8, 8), 256)
            with region.acquire(location=0, stream=torch.cuda.current_stream()):
                t = vt.tensor(array, device="cuda")
                assert str(t.dtype) == "torch." + name and t.shape == (8, 8)
                assert not t.view(torch.uint8).any()
            del t, array


def model_pair(arch, width=1024, layers=6):
    """Returns the same model twice: on the GPU, and mapped from a file."""
    config = common.config_of(arch, 1, width)
    setattr(config, "num_hidden_layers" if arch == "llama" else "n_layer", layers)
    bare = common.skeleton_of(config)
    tensors = common.random_tensors(bare)
    path = os.path.join(FOLDER, f"{arch}.safetensors")
    vt.save(tensors, path)
    plain = vt.assign(common.skeleton_of(config), {n: t.cuda() for n, t in tensors.items()})
    for module in plain.modules():
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.cuda()
    return plain, vt.assign(bare, vt.load(path)), path


def generate(model, tokens=6):
    torch.manual_seed(4)
    step = torch.randint(0, 8192, (2, 64), device="cuda")
    cache, logits = None, []
    with torch.no_grad():
        for _ in range(tokens):
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits.cpu())
    return logits


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def compare(arch, **arguments):
    plain, model, path = model_pair(arch)
    want = generate(plain)
    budget = os.path.getsize(path) // 4
    with vt.offload(model, device_budget=budget, **arguments) as handle:
        for _ in range(3):
            assert same(generate(model), want)
            stats = vmem.device_stats(0)
            assert stats.used_bytes <= stats.budget <= budget
        with vmem.acquire(*[(w.tensor, vmem.READ) for w in handle._plan.weights]):
            pass  # no device lease is left
    assert next(model.parameters()).device.type == "cpu"
    del model, handle


@test
def llama_gives_the_same_bits_with_a_quarter_of_the_memory():
    compare("llama")


@test
def gpt2_gives_the_same_bits_with_a_quarter_of_the_memory():
    compare("gpt2")


@test
def weights_at_odd_addresses_give_the_same_bits():
    plain, model, path = model_pair("llama", layers=2)
    want = generate(plain)
    del model
    with open(path, "rb") as f:
        head = int.from_bytes(f.read(8), "little")
        header, data = f.read(head), f.read()
    odd = header.rstrip(b" ")
    while (8 + len(odd)) % 16 != 8:  # an alignment that other writers leave half of the time
        odd += b" "
    with open(path, "wb") as f:
        f.write(len(odd).to_bytes(8, "little") + odd + data)
    from transformers import AutoModelForCausalLM

    with vt.init_empty_weights():
        again = AutoModelForCausalLM.from_config(plain.config).eval()
    vt.assign(again, vt.load(path))
    with vt.offload(again, device_budget="64MiB") as handle:
        assert same(generate(again), want) and same(generate(again), want)
    del again, handle


@test
def an_exception_inside_a_layer_releases_its_leases():
    _, model, _ = model_pair("llama", layers=2)
    with vt.offload(model, device_budget="64MiB") as handle, torch.no_grad():
        try:
            model(inputs_embeds=torch.zeros(1, 4, 7, dtype=torch.float16, device="cuda"))
            raise AssertionError("it computed")
        except RuntimeError:
            pass
        with vmem.acquire(*[(w.tensor, vmem.READ) for w in handle._plan.weights]):
            pass
        generate(model, 2)
    del model, handle


@test
def two_models_take_turns():
    plain_a, a, _ = model_pair("llama", layers=2)
    plain_b, b, _ = model_pair("gpt2", layers=2)
    want = generate(plain_a), generate(plain_b)
    with vt.offload(a, device_budget="64MiB"), vt.offload(b, device_budget="64MiB"):
        for _ in range(2):
            assert same(generate(a), want[0]) and same(generate(b), want[1])
    del a, b


@test
def a_model_on_the_second_gpu():
    if torch.cuda.device_count() < 2:
        return "one GPU"
    plain, model, _ = model_pair("llama", layers=2)
    want = generate(plain)
    with vt.offload(model, device_budget="64MiB", device="cuda:1"), torch.no_grad():
        ids = torch.randint(0, 8192, (2, 64), device="cuda:1")
        torch.manual_seed(4)
        ids = torch.randint(0, 8192, (2, 64), device="cuda").to("cuda:1")
        assert torch.equal(model(input_ids=ids).logits.cpu(), want[0])
    del model


@test
def transformers_generate_runs():
    plain, model, _ = model_pair("llama", layers=2)
    ids = torch.arange(32, device="cuda").view(1, -1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = plain.generate(ids, **options)
    with vt.offload(model, device_budget="64MiB"):
        assert torch.equal(model.generate(ids, **options), want)
    del model


@test
def a_budget_below_one_layer_names_it():
    _, model, _ = model_pair("llama", layers=2)
    words = raises(errno.ENOMEM, lambda: vt.offload(model, device_budget="2MiB"))
    assert "layers.0" in words and "MiB" in words, words
    del model


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for function in TESTS:
        if wanted not in function.__name__:
            continue
        try:
            why = function()
            gc.collect()
            assert vmem.stats().regions == 0, "it left regions behind"
            result = "skipped" if why else "passed"
        except Exception:
            traceback.print_exc()
            result, why = "failed", None
        gc.collect()
        counts[result] += 1
        print(f"{result:8} {function.__name__}{': ' + why if why else ''}", flush=True)
    print(", ".join(f"{n} {what}" for what, n in counts.items()), flush=True)
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    try:
        import torch

        import vmem
    except ImportError as e:
        print(f"skipped: {e}")
        sys.exit(77)
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        sys.exit(77)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import models_common as common

    import vmem.torch as vt

    torch.empty(1, device="cuda")
    common.require_managed(1 << 30)
    vmem.configure(host_budget="2GiB")
    with tempfile.TemporaryDirectory(prefix="vmem-models.", dir=os.environ.get("TMPDIR", "/var/tmp")) as FOLDER:
        sys.exit(main())
