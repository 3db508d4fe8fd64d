# SPDX-License-Identifier: Apache-2.0
"""Shared by models_bench.py and models_test.py: architectures with random weights, limits, the loop by hand."""

import concurrent.futures
import math
import os
import time

import torch

MOST_MANAGED = 8 << 30  # bytes of managed memory that a process may have alive


def managed_limit():
    """Returns the limit of managed memory: at most 8 GiB, and an eighth of the free memory of the
    device with the least. Unified memory beyond the memory of the card can hang the driver of the
    whole machine.
    """
    return min([MOST_MANAGED] + [torch.cuda.mem_get_info(d)[0] // 8 for d in range(torch.cuda.device_count())])


def require_managed(nbytes):
    limit = managed_limit()
    if nbytes > limit:
        print(f"refused: {nbytes / 2**30:.2f} GiB of managed memory wanted, the limit is {limit / 2**30:.2f} GiB "
              "(8 GiB, or 1/8 of free)", flush=True)
        raise SystemExit(2)


def config_of(arch, nbytes, width=4096):
    """Returns a config whose model has at least that many bytes in fp16."""
    if arch == "llama":
        from transformers import LlamaConfig

        layer = (4 * width * width + 3 * width * (width * 11 // 4 // 256 * 256)) * 2
        return LlamaConfig(hidden_size=width, intermediate_size=width * 11 // 4 // 256 * 256, vocab_size=8192,
                           num_hidden_layers=max(2, math.ceil(nbytes / layer)), num_attention_heads=width // 128,
                           num_key_value_heads=width // 128, max_position_embeddings=4096, tie_word_embeddings=False)
    from transformers import GPT2Config

    return GPT2Config(n_embd=width, n_layer=max(2, math.ceil(nbytes / (12 * width * width * 2))), n_head=width // 128,
                      vocab_size=8192, n_positions=4096)


def skeleton_of(config):
    from transformers import AutoModelForCausalLM

    import vmem.torch

    with vmem.torch.init_empty_weights():
        return AutoModelForCausalLM.from_config(config).eval()


def random_tensors(model, seed=1):
    """Makes fp16 tensors on the CPU for every parameter, on the GPU one by one."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = {}
    for name, p in model.named_parameters():
        t = torch.empty(p.shape, dtype=torch.float16, device="cuda")
        if p.dim() == 1:
            t.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            t.normal_(0, 0.02, generator=generator)
        made[name] = t.cpu()
    return made


def drop_from_cache(paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only clean pages can be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def files_in(folder):
    return [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names]


class DirectReader:
    """Reads parts of a file with O_DIRECT into pinned memory, by several threads."""

    PIECE = 8 << 20

    def __init__(self, path, threads=8):
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.size = os.fstat(self.fd).st_size
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)

    def read(self, buffer, offset, nbytes):
        """Returns futures. offset, and all of `buffer`, must be multiples of 4096."""
        view = memoryview(buffer.numpy())

        def piece(at):
            n = min(self.PIECE, nbytes - at)
            n += -n % 4096
            got = 0
            while got < n:
                more = os.preadv(self.fd, [view[at + got : at + n]], offset + at + got)
                if more == 0 or offset + at + got + more >= self.size:
                    break
                got += more

        return [self.pool.submit(piece, at) for at in range(0, nbytes, self.PIECE)]

    def close(self):
        self.pool.shutdown()
        os.close(self.fd)


def disk_limit(path, nbytes=2 << 30):
    """Returns the GB/s of direct reads from the same disk into pinned memory, in this run."""
    drop_from_cache([path])
    reader = DirectReader(path)
    nbytes = min(nbytes, reader.size) // reader.PIECE * reader.PIECE
    buffer = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    start = time.perf_counter()
    for at in range(0, nbytes, len(buffer)):
        for f in reader.read(buffer, at, min(len(buffer), nbytes - at)):
            f.result()
    seconds = time.perf_counter() - start
    reader.close()
    return nbytes / 1e9 / seconds


def copy_limit(nbytes=1 << 30):
    """Returns the GB/s of copies from pinned memory to the device."""
    host = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * nbytes / 1e9 / (time.perf_counter() - start)


class HandLoop:
    """The loop an expert writes: hooks on the blocks of the model, two pinned buffers, two device
    buffers, one copy stream. While a block computes, the next one is read into a pinned buffer and
    copied to the other device buffer.

    path: a safetensors file, from which each block is read every time. None: all blocks stay in
    pinned memory. Small weights, and weights outside the blocks, stay on the device.
    """

    def __init__(self, model, blocks, path=None):
        from vmem import _safetensors

        self.copies = torch.cuda.Stream()
        self.blocks = list(blocks)
        self.reader = DirectReader(path) if path else None
        header = _safetensors.read_header(path) if path else None
        names = {id(p): n for n, p in model.named_parameters()}
        self.parts = []  # per block: (parameter, offset in the buffer, bytes), first byte in the file, bytes
        for block in self.blocks:
            params = list(block.parameters())
            # The large parameters of a block, which are adjacent in the file; the small ones stay
            # on the device.
            large = [p for p in params if p.numel() * 2 >= 65536]
            if header is not None:
                places = {id(p): header.tensors[names[id(p)]] for p in large}
                first = min(e.begin for e in places.values()) // 4096 * 4096
                last = max(e.end for e in places.values())
                part = [(p, places[id(p)].begin - first, places[id(p)].end - places[id(p)].begin) for p in large]
                self.parts.append((part, first, last - first))
            else:
                at, part = 0, []
                for p in large:
                    part.append((p, at, p.numel() * 2))
                    at += p.numel() * 2 + -(p.numel() * 2) % 256
                self.parts.append((part, 0, at))
        size = max(n for _, _, n in self.parts) + 8192
        self.device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        count = 2 if path else len(self.blocks)
        self.pinned = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(count)]
        if not path:
            for (part, _, _), buffer in zip(self.parts, self.pinned):
                for p, at, n in part:
                    buffer[at : at + n] = p.data.contiguous().view(-1).view(torch.uint8)
        large = {id(p) for part, _, _ in self.parts for p, _, _ in part}
        for p in model.parameters():
            if id(p) not in large:
                p.data = p.data.cuda()
        for module in model.modules():
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = b.cuda()
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.used = [torch.cuda.Event() for _ in range(2)]
        self.loader = concurrent.futures.ThreadPoolExecutor(1)
        self.loading = {}
        self.hooks = []
        for i, block in enumerate(self.blocks):
            self.hooks.append(block.register_forward_pre_hook(lambda *_, i=i: self.before(i)))
            self.hooks.append(block.register_forward_hook(lambda *_, i=i: self.after(i)))
        self.turn = 0
        self.start(0)

    def load(self, i, slot):
        part, first, nbytes = self.parts[i]
        pinned = self.pinned[slot] if self.reader else self.pinned[i]
        if self.reader:
            self.copied[slot].synchronize()  # the previous copy from this pinned buffer
            for f in self.reader.read(pinned, first, nbytes):
                f.result()
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(self.used[slot])
            self.device[slot][:nbytes].copy_(pinned[:nbytes], non_blocking=True)
            self.copied[slot].record(self.copies)

    def start(self, i):
        slot = self.turn % 2
        self.turn += 1
        self.loading[i] = (slot, self.loader.submit(self.load, i, slot))

    def before(self, i):
        if i not in self.loading:
            self.start(i)
        slot, future = self.loading[i]
        future.result()
        torch.cuda.current_stream().wait_event(self.copied[slot])
        for p, at, n in self.parts[i][0]:
            p.data = self.device[slot][at : at + n].view(torch.float16).view(p.shape)
        self.start((i + 1) % len(self.blocks))

    def after(self, i):
        slot, _ = self.loading.pop(i)
        self.used[slot].record(torch.cuda.current_stream())

    def close(self):
        for hook in self.hooks:
            hook.remove()
        for _, future in self.loading.values():
            future.result()
        torch.cuda.synchronize()
        self.loader.shutdown()
        if self.reader:
            self.reader.close()


def blocks_of(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h
