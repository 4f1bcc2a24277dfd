#!/usr/bin/env python3
"""A convolutional network in plain PyTorch, trained exactly: the last line is the same for any number of workers.

    python3 conv.py
    torchrun --nproc-per-node 3 conv.py"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import lockstep.torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--lanes", type=int, default=8, help="micro-batches of a step, which the workers share")
parser.add_argument("--batch", type=int, default=8, help="images of a lane")
parser.add_argument("--channels", type=int, default=16)
options = parser.parse_args()

CLASSES, SIZE, SEED = 4, 16, 1

lockstep.torch.deterministic()
torch.manual_seed(SEED)
width = options.channels
model = nn.Sequential(
    nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width * (SIZE // 4) ** 2, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
exact = lockstep.torch.ExactDataParallel(model, optimizer, lanes=options.lanes, seed=SEED, numbers=1)


def lane_loss(step, lane):
    """Noisy stripes; the class is their direction. Loss, number of images, and how many were told right."""
    random = exact.generator(step, lane)
    label = torch.randint(CLASSES, (options.batch,), generator=random)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    ways = torch.stack([x, y, x + y, x - y])
    images = torch.sin(ways[label].float())[:, None] + 0.5 * torch.randn(options.batch, 1, SIZE, SIZE, generator=random)
    logits = model(images)
    return F.cross_entropy(logits, label, reduction="sum"), options.batch, (logits.argmax(1) == label).sum()


def train_step(step):
    sum = exact.sum(step, lambda lane: lane_loss(step, lane))
    optimizer.step()
    if exact.job.rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {sum.loss:.4f}  right {sum.numbers[0] / sum.count:.0%}", flush=True)


exact.run(options.steps, train_step)
exact.verify()
if exact.job.rank == 0:
    print(f"weights {exact.hash()}", flush=True)
