#!/usr/bin/env python3
"""What users of PyTorch use today, on weights of the same size. One is accelerate's disk_offload
and cpu_offload: a forward pass through linear layers whose weights come from disk or host memory
each time. The other is safetensors' load_file.

    peers_bench.py [--bytes 2GiB] [--layer 32MiB] [--rounds 3] [--folder DIR] [--rows 16] [-o FILE]

Prints a Markdown table: median GB/s of the weights (GB = 1e9 bytes), lowest to highest, CPU cores
used per GB/s. "cold": the files were dropped from the page cache before (posix_fadvise). "warm":
they were read just before. Uses plain device memory only, no managed memory. Exit code 77: torch, a
GPU, accelerate or safetensors is missing; if only one of the last two is missing, the other is
measured first.
"""
import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

DTYPE_BYTES = 2  # fp16


def say(line):
    print(line, flush=True)


def size(text):
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(number[-1:], 1)
    return int(float(number.rstrip("kmg")) * factor)


def drop_from_cache(folder):
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages can be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cpu_seconds():
    t = os.times()
    return t.user + t.system


class Table:
    def __init__(self):
        self.rows = []

    def measure(self, what, rounds, weight_bytes, work, before=None):
        """work() returns when the weights have been used on the GPU; before() is not timed."""
        rates, cores = [], []
        for _ in range(rounds):
            if before is not None:
                before()
            cpu, start = cpu_seconds(), time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            gigabytes = weight_bytes / 1e9
            rates.append(gigabytes / seconds)
            cores.append((cpu_seconds() - cpu) / gigabytes)
        row = {
            "what": what,
            "unit": "GB/s",
            "median": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
            "cores_per_gbs": statistics.median(cores),
            "samples": rates,
        }
        self.rows.append(row)
        print(f"{what}: {row['median']:.2f} GB/s", file=sys.stderr, flush=True)

    def show(self):
        say("| what | GB/s | cores per GB/s |")
        say("|---|---|---|")
        for r in self.rows:
            spread = f"({r['low']:.2f} to {r['high']:.2f})"
            say(f"| {r['what']} | **{r['median']:.2f}** {spread} | {r['cores_per_gbs']:.2f} |")


def make_model(torch, n, layers):
    with torch.device("cpu"):
        model = torch.nn.Sequential(*[torch.nn.Linear(n, n, bias=False, dtype=torch.float16) for _ in range(layers)])
    model.eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def forward(torch, model, x):
    with torch.no_grad():
        y = model(x)
    torch.cuda.synchronize()
    return y


def offloads(torch, table, args, n, layers, total):
    from accelerate import cpu_offload, disk_offload

    x = torch.randn(args.rows, n, dtype=torch.float16, device="cuda")
    model = make_model(torch, n, layers)
    folder = tempfile.mkdtemp(prefix="vmem-peers.", dir=args.folder)
    try:
        model = disk_offload(model, folder, execution_device=torch.device("cuda:0"))
        forward(torch, model, x)  # warms up the products
        table.measure("accelerate disk_offload, cold", args.rounds, total, lambda: forward(torch, model, x),
                      lambda: drop_from_cache(folder))
        forward(torch, model, x)
        table.measure("accelerate disk_offload, page cache warm", args.rounds, total, lambda: forward(torch, model, x))
        del model
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gc.collect()
    model = cpu_offload(make_model(torch, n, layers), execution_device=torch.device("cuda:0"))
    forward(torch, model, x)
    table.measure("accelerate cpu_offload", args.rounds, total, lambda: forward(torch, model, x))
    del model
    gc.collect()
    torch.cuda.empty_cache()


def loads(torch, table, args, n, layers, total):
    from safetensors.torch import load_file, save_file

    folder = tempfile.mkdtemp(prefix="vmem-peers.", dir=args.folder)
    try:
        path = os.path.join(folder, "weights.safetensors")
        save_file({f"layer.{i}": torch.randn(n, n).to(torch.float16) for i in range(layers)}, path)
        gc.collect()

        def load():
            tensors = load_file(path, device="cuda:0")
            torch.cuda.synchronize()
            return len(tensors)

        load()
        table.measure("safetensors load_file to the GPU, cold", args.rounds, total, load,
                      lambda: drop_from_cache(folder))
        load()
        table.measure("safetensors load_file to the GPU, page cache warm", args.rounds, total, load)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=size, default=size("2GiB"), help="weights altogether")
    parser.add_argument("--layer", type=size, default=size("32MiB"), help="weights of a layer, fp16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16, help="rows of the input: few, so that moving is the work")
    parser.add_argument("--folder", default=os.environ.get("TMPDIR", "/var/tmp"))
    parser.add_argument("-o", "--json", help="also write the figures there")
    args = parser.parse_args()
    if args.bytes > size("4GiB"):
        parser.error("at most 4GiB")
    try:
        import torch
    except ImportError as e:
        say(f"SKIPPED: {e}")
        return 77
    if not torch.cuda.is_available():
        say("SKIPPED: torch sees no GPU")
        return 77
    n = int((args.layer // DTYPE_BYTES) ** 0.5)
    layers = max(1, args.bytes // (n * n * DTYPE_BYTES))
    total = layers * n * n * DTYPE_BYTES
    versions = {"torch": torch.__version__}
    for name in ("accelerate", "safetensors"):
        try:
            versions[name] = __import__(name).__version__
        except (ImportError, AttributeError):
            versions[name] = "not installed"
    say(f"{torch.cuda.get_device_name(0)}; {versions}; {layers} layers of {n} x {n} fp16, {total / 1e9:.2f} GB, "
        f"median of {args.rounds}\n")
    table = Table()
    missing = False
    for part in (offloads, loads):
        try:
            part(torch, table, args, n, layers, total)
        except ImportError as e:
            say(f"skipped: {e}")
            missing = True
    table.show()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"device": torch.cuda.get_device_name(0), "versions": versions, "bytes": total, "layers": layers,
                       "rounds": args.rounds, "rows": table.rows}, f, indent=1)
    return 77 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
