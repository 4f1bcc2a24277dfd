#!/usr/bin/env python3
"""A Llama's training step in PyTorch, as the peer of `lockstep bench step`: fused attention, fused AdamW, clipping
by the global norm; eager on a CPU, compiled on a GPU. Starts from the weights of --weights (f32, tensors in Hugging
Face's order), so that its losses must be ours. Reads numbers of seconds from standard input, one a line; answers each
with one JSON object. As a rank of a world (RANK, WORLD_SIZE, ...) it is the peer of `lockstep train --workers`: --steps steps of
DistributedDataParallel over Gloo, --batch sequences per rank, and one JSON object from rank 0."""

import argparse
import json
import os
import sys
import time

SHAPES = {  # vocab, hidden, layers, heads, kv_heads, intermediate, context
    "tiny": (4096, 256, 6, 8, 4, 768, 256),
    "small": (8192, 512, 8, 8, 8, 1408, 512),
    "124m": (50304, 768, 12, 12, 12, 2048, 1024),
    "350m": (32768, 1024, 24, 16, 4, 4096, 1024),
}

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", choices=SHAPES, default="tiny")
arguments.add_argument("--batch", type=int, default=8)
arguments.add_argument("--threads", type=int, default=1)
arguments.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
arguments.add_argument("--weights", required=True)
arguments.add_argument("--tokens", help="train on these 16-bit tokens and print every loss, instead of timing")
arguments.add_argument("--steps", type=int, default=10, help="of a world of ranks, or over --tokens")
arguments.add_argument("--warmup", type=int, default=0, help="of the learning rate, over --tokens")
options = arguments.parse_args()
os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when the library loads

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

torch.set_num_threads(options.threads)
torch.set_float32_matmul_precision("high" if options.precision == "bf16" else "highest")
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, CONTEXT = SHAPES[options.model]
HEAD = HIDDEN // HEADS
EPS = 1e-5


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Block(nn.Module):
    """Parameters are declared in the order of the weights file."""

    def __init__(self):
        super().__init__()
        self.query = linear(HIDDEN, HIDDEN)
        self.key = linear(HIDDEN, KV_HEADS * HEAD)
        self.value = linear(HIDDEN, KV_HEADS * HEAD)
        self.output = linear(HIDDEN, HIDDEN)
        self.gate = linear(HIDDEN, INTERMEDIATE)
        self.up = linear(HIDDEN, INTERMEDIATE)
        self.down = linear(INTERMEDIATE, HIDDEN)
        self.input_norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_norm = nn.RMSNorm(HIDDEN, eps=EPS)

    def forward(self, x, cos, sin):
        batch, context, _ = x.shape

        def heads(layer, count):
            return layer(normed).view(batch, context, count, HEAD).transpose(1, 2)

        normed = self.input_norm(x)
        query = rotate(heads(self.query, HEADS), cos, sin)
        key = rotate(heads(self.key, KV_HEADS), cos, sin)
        attended = functional.scaled_dot_product_attention(
            query, key, heads(self.value, KV_HEADS), is_causal=True, enable_gqa=KV_HEADS < HEADS)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, context, HIDDEN))
        normed = self.post_attention_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.head = linear(HIDDEN, VOCAB)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angles = torch.arange(CONTEXT).float()[:, None] * frequencies.float()
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load(model, path):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    weights = torch.frombuffer(data, dtype=torch.float32)
    at = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(weights[at:at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
    if at != weights.numel():
        sys.exit(f"{path}: has {weights.numel()} values, the model {at}")


def make_optimizer(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": norms, "weight_decay": 0.0}], lr=3e-4, betas=(0.9, 0.95),
                             eps=1e-8, weight_decay=0.1, fused=True)


def take_step(model, optimizer, tokens, targets):
    with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
        loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = loss.item()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return loss


def run_rank(model):
    """Every sequence is the same period of CONTEXT tokens, so that it does not matter which rank has which."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    period = torch.tensor([((i * 2654435761 & 0xFFFFFFFF) >> 8) % VOCAB for i in range(CONTEXT)])
    tokens = period.repeat(options.batch, 1)
    targets = period.roll(-1).repeat(options.batch, 1)
    losses, seconds = [], []
    for _ in range(options.steps):
        begin = time.perf_counter()
        losses.append(take_step(model, optimizer, tokens, targets))
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        print(json.dumps({"version": torch.__version__, "losses": losses, "seconds": seconds}), flush=True)
    torch.distributed.destroy_process_group()


def main():
    model = Llama()
    load(model, options.weights)
    if "WORLD_SIZE" in os.environ:
        return run_rank(model)
    model.to(options.device)
    compiled = torch.compile(model) if options.device == "cuda" else model
    optimizer = make_optimizer(model)
    count = options.batch * CONTEXT
    stream = torch.tensor([((i * 2654435761 & 0xFFFFFFFF) >> 8) % VOCAB for i in range(count + 1)])
    tokens = stream[:-1].view(options.batch, CONTEXT).to(options.device)
    targets = stream[1:].view(options.batch, CONTEXT).to(options.device)

    def step(tokens=tokens, targets=targets):
        return take_step(compiled, optimizer, tokens, targets)

    if options.tokens:
        with open(options.tokens, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint16).long()
        for i in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-4 * min(1.0, (i + 1) / max(1, options.warmup))
            part = text[i * count:(i + 1) * count + 1].to(options.device)
            loss = step(part[:-1].view(options.batch, CONTEXT), part[1:].view(options.batch, CONTEXT))
            print(json.dumps({"step": i + 1, "loss": loss}), flush=True)
        return
    losses = [step() for _ in range(3)]
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        times = []
        while len(times) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        median = sorted(times)[(len(times) - 1) // 2]
        print(json.dumps({"version": torch.__version__, "median_ms": median * 1e3, "min_ms": min(times) * 1e3,
                          "tokens_per_s": count / median, "loss": losses[0], "loss_third": losses[2],
                          "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0}),
              flush=True)


if __name__ == "__main__":
    main()
