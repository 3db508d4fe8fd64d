#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Language models whose weights do not fit into the device memory they may use. Compares libvmem
with accelerate and with a loop written by hand, in one run and with the same device memory. Results
are compared bit for bit with the model fully on the GPU.

    models_bench.py [--arch llama,gpt2] [--bytes 6GiB] [--width 4096] [--share 4] [--ways full,vmem,..] [--prompt 512]
                    [--tokens 6] [--folder DIR] [-o FILE]

The weights are random (transformers' architectures from a config, fp16) and saved as safetensors in
--folder, which must be on a disk. Each way runs in a process of its own. Device memory for weights:
bytes / share. accelerate's disk_offload and cpu_offload, and the loop by hand, use one layer, or
two.

cold    every pass reads the weights from the disk: the page cache is dropped before each (posix_fadvise); libvmem has
        a host budget of 2 GiB and reads with O_DIRECT
steady  the steady state: page cache warm, weights in host memory if the way keeps them there

Prints a line for each figure and a Markdown table at the end: tokens/s, median of the passes after
the first. Needs a GPU, torch, transformers, accelerate, safetensors, and the package vmem (make
wheel). Uses at most 8 GiB of managed memory and an eighth of the free device memory. Exits with 2
if it would need more, with 77 if it cannot run here.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

WAYS = {
    "full": "fully on the GPU",
    "vmem": "libvmem, from disk",
    "vmem-host": "libvmem, page cache as host memory (direct_io=off)",
    "vmem-anon": "libvmem, weights in anonymous memory",
    "hand": "by hand: two pinned buffers, from disk",
    "hand-host": "by hand: pinned host memory",
    "disk_offload": "accelerate disk_offload",
    "cpu_offload": "accelerate cpu_offload",
    "device_map": "accelerate device_map, GPU + disk",
    "device_map-cpu": "accelerate device_map, GPU + CPU",
}
FROM_DISK = ("vmem", "hand", "disk_offload", "device_map")


def say(line):
    print(line, flush=True)


def size(text):
    import vmem

    return vmem.parse_size(text)


# ---- one way, in a process of its own --------------------------------------------------------------------------------


def passes(model, args, reference, before):
    """Runs prefill and decode. Returns the seconds of each, and whether all logits equal the
    reference bit for bit.
    """
    import torch

    torch.manual_seed(3)
    ids = torch.randint(0, 8192, (1, args.prompt), device="cuda")
    seconds, logits, equal = [], [], True
    with torch.no_grad():
        cache, step = None, ids
        for i in range(args.tokens + 1):
            before()
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            cache = out.past_key_values
            logits.append(out.logits[0].cpu())
            if reference is not None:
                equal = equal and torch.equal(logits[-1], reference[i])
            step = (reference[i] if reference is not None else logits[-1])[-1:].argmax(-1).view(1, 1).cuda()
    return seconds, logits, equal


def worker(args):
    import torch
    from transformers import AutoConfig

    import models_common as common
    import vmem

    path = os.path.join(args.folder, "model.safetensors")
    total = os.path.getsize(path)
    budget = total // args.share // (2 << 20) * (2 << 20)
    reference_path = os.path.join(args.folder, "reference.pt")
    reference = None if args.way == "full" else torch.load(reference_path)
    scratch = os.path.join(args.folder, "scratch-" + args.way)
    model = common.skeleton_of(AutoConfig.from_pretrained(args.folder))
    closes, cached = [], [path]
    torch.empty(1, device="cuda")
    # cuDNN's attention compiles a plan for every length of the context, which is slow, and its
    # first answer differs from later ones in the last bits.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.way.startswith("vmem"):
        import vmem.torch

        vmem.configure(host_budget="2GiB" if args.way == "vmem" else 5 * total // 2, direct_io=args.way != "vmem-host")
        common.require_managed(total)
        tensors = vmem.torch.load(path)
        if args.way == "vmem-anon":
            common.require_managed(total + (64 << 20))
            # frees the region of the file before the new one is made
            tensors = {n: t.clone() for n, t in tensors.items()}
        vmem.torch.assign(model, tensors)
        del tensors
        handle = vmem.torch.offload(model, device_budget=budget)
        closes.append(handle.remove)
    elif args.way.startswith("hand"):
        from safetensors.torch import load_file

        vmem.torch.assign(model, load_file(path))
        loop = common.HandLoop(model, common.blocks_of(model), path if args.way == "hand" else None)
        closes.append(loop.close)
    else:
        from safetensors.torch import load_file

        if args.way.startswith("device_map"):
            from accelerate import infer_auto_device_map, load_checkpoint_and_dispatch

            no_split = [type(common.blocks_of(model)[0]).__name__]
            rest = 0 if args.way == "device_map" else 2 * total
            most = {0: budget, "cpu": rest}
            places = infer_auto_device_map(model.half(), max_memory=most, no_split_module_classes=no_split)
            model = load_checkpoint_and_dispatch(
                model, path, device_map=places, offload_folder=scratch, dtype=torch.float16
            )
        else:
            device = torch.device("cuda:0")
            vmem.torch.assign(model, load_file(path, device="cuda:0" if args.way == "full" else "cpu"))
            if args.way == "full":
                for module in model.modules():
                    for name, b in module._buffers.items():
                        module._buffers[name] = None if b is None else b.cuda()
            elif args.way == "disk_offload":
                from accelerate import disk_offload

                model = disk_offload(model, scratch, execution_device=device)
            else:
                from accelerate import cpu_offload

                model = cpu_offload(model, execution_device=device)
    model.eval()
    if os.path.isdir(scratch):
        cached += common.files_in(scratch)

    def cold():
        common.drop_from_cache(cached)

    counted = device_in_bytes()
    plans = [("cold", cold)] if args.way in FROM_DISK else []
    plans.append(("steady", lambda: None))
    # Load the kernels and let libvmem learn the order.
    passes(model, argparse.Namespace(prompt=args.prompt, tokens=1), None, lambda: None)
    for kind, before in plans:
        torch.cuda.reset_peak_memory_stats()
        if counted is not None:
            counted = device_in_bytes()
        seconds, logits, equal = passes(model, args, reference, before)
        if args.way == "full":
            torch.save(logits, reference_path)
        row = {
            "way": args.way, "kind": kind, "prefill": args.prompt / seconds[0],
            "decode": 1 / statistics.median(seconds[1:]),
            "decode_low": 1 / max(seconds[1:]), "decode_high": 1 / min(seconds[1:]),
            "decode_gbs": total / 1e9 / statistics.median(seconds[1:]),
            "equal": None if args.way == "full" else equal,
            "device_gib": (torch.cuda.max_memory_allocated() + vmem_device_bytes()) / 2**30,
        }  # fmt: skip
        if counted is not None:
            row["moved"] = (device_in_bytes() - counted) / (len(seconds) * total)
        say("ROW " + json.dumps(row))
    for close in closes:
        close()


def device_in_bytes():
    """Returns the bytes that libvmem moved to the device, if it is used."""
    import vmem
    from vmem import _memory

    return vmem.device_stats(0).in_bytes if list(_memory.live.values()) else None


def vmem_device_bytes():
    import vmem
    from vmem import _memory

    return vmem.device_stats(0).budget if list(_memory.live.values()) else 0


# ---- all of them ---------------------------------------------------------------------------------------------------


def prepare(args, arch, folder):
    import models_common as common
    import vmem.torch

    config = common.config_of(arch, args.bytes, args.width)
    model = common.skeleton_of(config)
    tensors = common.random_tensors(model)
    path = os.path.join(folder, "model.safetensors")
    vmem.torch.save(tensors, path, metadata={"format": "pt"})
    config.save_pretrained(folder)
    total = os.path.getsize(path)
    common.require_managed(total)
    return config, total, common.disk_limit(path), common.copy_limit()


def run_way(args, folder, way):
    command = ["timeout", "-k", "3", str(args.timeout), sys.executable, os.path.abspath(__file__), "--worker", way,
    "--folder", folder, "--share", str(args.share),
               "--prompt", str(args.prompt), "--tokens", str(args.tokens)]  # fmt: skip
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as process:
        for line in process.stdout:
            if line.startswith("ROW "):
                rows.append(json.loads(line[4:]))
                r = rows[-1]
                say(f"  {WAYS[way]}, {r['kind']}: prefill {r['prefill']:.1f} tokens/s, decode {r['decode']:.3f} "
                    f"tokens/s ({r['decode_gbs']:.2f} GB/s of weights), equal {r['equal']}")
            else:
                say("  | " + line.rstrip())
        code = process.wait()
    if code != 0:
        say(f"  {WAYS[way]}: FAILED ({code})")
        rows.append({"way": way, "kind": "failed", "code": code})
    return rows


def show(arch, config, total, share, disk, copy, rows):
    layers = getattr(config, "num_hidden_layers", 0)
    say(f"\n{arch}: {layers} layers, {total / 2**30:.2f} GiB of fp16 weights, device budget 1/{share}; limits in this "
        f"run: disk {disk:.2f} GB/s, pinned copy {copy:.1f} GB/s\n")
    say("| way | | prefill, tokens/s | decode, tokens/s (low to high) | weights, GB/s | moved to the device / model | "
        "device, GiB | equal |")
    say("|---|---|---|---|---|---|---|---|")
    for r in rows:
        if r["kind"] == "failed":
            say(f"| {WAYS[r['way']]} | failed ({r['code']}) | | | | | | |")
            continue
        moved = f"{r['moved']:.2f}" if "moved" in r else "-"
        equal = {None: "-", True: "yes", False: "NO"}[r["equal"]]
        say(f"| {WAYS[r['way']]} | {r['kind']} | {r['prefill']:.1f} | **{r['decode']:.3f}** ({r['decode_low']:.3f} to "
            f"{r['decode_high']:.3f}) | {r['decode_gbs']:.2f} | {moved} | {r['device_gib']:.2f} | {equal} |")
    by = {(r["way"], r["kind"]): r for r in rows}

    def ratio(words, a, b, wanted, limit=None):
        top, bottom = by.get(a), limit or (by.get(b) or {}).get("decode_gbs")
        if top and bottom:
            say(f"- {words}: {top['decode_gbs'] / bottom:.2f} ({wanted} wanted)")

    say("")
    ratio("libvmem from cold disk / accelerate disk_offload", ("vmem", "cold"), ("disk_offload", "cold"), 2.5)
    ratio("libvmem from host memory / accelerate cpu_offload", ("vmem-host", "steady"), ("cpu_offload", "steady"), 4)
    ratio("libvmem from cold disk / loop by hand", ("vmem", "cold"), ("hand", "cold"), 1.0)
    ratio("libvmem from host memory / loop by hand", ("vmem-host", "steady"), ("hand-host", "steady"), 1.0)
    ratio("libvmem from cold disk / disk", ("vmem", "cold"), None, 0.95, disk)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="llama,gpt2")
    parser.add_argument("--bytes", default="6GiB")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden layers, a multiple of 256")
    parser.add_argument("--share", type=int, default=4)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--folder", default=os.environ.get("TMPDIR", "/var/tmp"))
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one way")
    parser.add_argument("-o", "--json", help="also write the figures there")
    parser.add_argument("--worker", dest="way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"no way {sorted(unknown)}; there are {list(WAYS)}")
    try:
        import torch
        import transformers

        import vmem.torch
    except ImportError as e:
        say(f"SKIPPED: {e}")
        return 77
    if not torch.cuda.is_available():
        say("SKIPPED: torch sees no GPU")
        return 77
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.way:
        worker(args)
        return 0
    args.bytes = size(args.bytes)
    say(f"{torch.cuda.get_device_name(0)}; torch {torch.__version__}, transformers {transformers.__version__}, vmem "
        f"{vmem.__version__}")
    results, failed = [], False
    for arch in args.arch.split(","):
        folder = tempfile.mkdtemp(prefix="vmem-models.", dir=args.folder)
        try:
            say(f"{arch}: making {args.bytes / 2**30:.2f} GiB of weights in {folder}")
            config, total, disk, copy = prepare(args, arch, folder)
            torch.cuda.empty_cache()
            ways = args.ways.split(",")
            rows = run_way(args, folder, "full")
            if rows[-1]["kind"] != "failed":  # the other ways are compared with it
                rows += [r for way in ways if way != "full" for r in run_way(args, folder, way)]
            show(arch, config, total, args.share, disk, copy, rows)
            ours = [r for r in rows if r["way"].startswith(("vmem", "full"))]
            failed = failed or any(r["kind"] == "failed" or r.get("equal") is False for r in ours)
            results.append({"arch": arch, "bytes": total, "disk_gbs": disk, "copy_gbs": copy, "rows": rows})
            if args.json:
                with open(args.json, "w", encoding="utf-8") as f:
                    json.dump(results, f, indent=1)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
