"""examples/torch/gpt.py with 3 workers, one of whom is lost where the test wants it; the others wait until somebody has come
in its place.

usage: gpt_with_losses.py PLACE RANK [arguments of gpt.py]

At PLACE the worker RANK of the first generation kills itself: `step` 10, `save`, when the checkpoint of step 20 is to be written,
or `saved`, when rank 0 has written it. The wait is at step 25, whose lanes are computed again until there are 3 workers."""

import os
import pathlib
import runpy
import signal
import sys
import time

import lockstep.torch

GPT = pathlib.Path(__file__).resolve().parents[3] / "examples" / "torch" / "gpt.py"
LOST_AT, WAIT_AT, WORKERS = 10, 25, 3
Exact = lockstep.torch.ExactDataParallel
place, victim = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 60
exact_sum, exact_save, save = Exact.sum, Exact.save, lockstep.save


def lose(job, here):
    if (place, victim, 1) == (here, job.rank, job.generation):
        os.kill(os.getpid(), signal.SIGKILL)


def sum_and_wait(self, step, compute):
    if step == LOST_AT:
        lose(self.job, "step")
    found = exact_sum(self, step, compute)
    while step == WAIT_AT and not self._wants_regroup and (self.job.generation == 1 or self.job.world_size < WORKERS):
        assert time.monotonic() < deadline, "nobody was lost, or nobody came instead"
        found = exact_sum(self, step, compute)
    return found


def save_with_losses(self, folder, step):
    lose(self.job, "save")

    def save_and_go(*arguments):
        save(*arguments)
        lose(self.job, "saved")

    lockstep.save = save_and_go
    exact_save(self, folder, step)


Exact.sum, Exact.save = sum_and_wait, save_with_losses
sys.argv = [str(GPT), *sys.argv[3:]]
runpy.run_path(str(GPT), run_name="__main__")
