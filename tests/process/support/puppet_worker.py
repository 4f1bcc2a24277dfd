#!/usr/bin/env python3
"""A worker that joins, takes its shard and stands still where it is told, so that a test can kill or stop it there.

Prints "paused" and waits: before its payload, in the middle of it, or after it. Alive all the while, as far as
its protocol has signs of life: in the middle of a frame there are none.
"""

import argparse
import select
import sys

import gradient_client

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--own", action="store_true")
parser.add_argument("--pause", choices=["before", "middle", "after"], required=True)
parser.add_argument("--elements", type=int, required=True)
options = parser.parse_args()

host, port = options.address.rsplit(":", 1)
worker = gradient_client.join((host, int(port)), "puppet", options.own)
shard = worker.connection.receive("ShardAssignment")
total = shard.shard_end - shard.shard_start
numbers = {"loss": 1.0, "correct": 0, "total": total}
frame = gradient_client.encode("GradientPayload", step=shard.step, worker_id=worker.worker_id,
                               gradients=[0.5] * options.elements, **numbers)
if options.pause != "before":
    if options.own:
        worker.connection.send("Totals", step=shard.step, **numbers)
    worker.connection.send_bytes(frame if options.pause == "after" else frame[:len(frame) // 2])
print("paused", flush=True)
beat = worker.welcome.timeout_ms / 5000 if options.own and options.pause != "middle" else None
while not select.select([sys.stdin], [], [], beat)[0]:
    worker.connection.alive()
