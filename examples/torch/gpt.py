#!/usr/bin/env python3
"""A GPT in plain PyTorch, trained exactly: the last line is the same for any number of workers.

    python3 gpt.py
    torchrun --nproc-per-node 3 gpt.py
    python3 -m lockstep run --workers 3 gpt.py        # goes on when a worker is killed"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import lockstep.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--lanes", type=int, default=8, help="micro-batches of a step, which the workers share")
parser.add_argument("--batch", type=int, default=4, help="sequences of a lane")
parser.add_argument("--context", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--out", help="a folder for checkpoints; continues from the newest one there")
options = parser.parse_args()

VOCABULARY, HEADS, DROPOUT, SEED = 64, 4, 0.1, 1


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(DROPOUT))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // HEADS) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.drop(self.out(attention.transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width, layers, context):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


lockstep.torch.deterministic()
torch.manual_seed(SEED)
model = GPT(options.width, options.layers, options.context)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
exact = lockstep.torch.ExactDataParallel(model, optimizer, lanes=options.lanes, seed=SEED, verify_every=20)


def lane_loss(step, lane):
    """Sequences that count upwards by a random stride: the sum of the tokens' losses, and how many tokens."""
    random = exact.generator(step, lane)
    start = torch.randint(VOCABULARY, (options.batch, 1), generator=random)
    stride = torch.randint(1, 8, (options.batch, 1), generator=random)
    text = (start + stride * torch.arange(options.context + 1)) % VOCABULARY
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum"), options.batch * options.context


def train_step(step):
    sum = exact.sum(step, lambda lane: lane_loss(step, lane))
    optimizer.step()
    if exact.job.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {sum.loss:.4f}  {exact.job.world_size} workers", flush=True)


exact.run(options.steps, train_step, done=exact.resume(options.out) if options.out else 0, out=options.out, save_every=20)
exact.verify()
if exact.job.rank == 0:
    print(f"weights {exact.hash()}", flush=True)
