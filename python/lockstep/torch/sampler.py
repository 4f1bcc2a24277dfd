"""Which samples of a dataset a lane trains on."""

from __future__ import annotations

from typing import List, Optional

import torch

from .determinism import lane_generator


class LaneSampler:
    """sampler(step, lane) are the indices of a lane's batch, whichever worker computes it.

    An epoch takes all `samples` in an order of its own, but for those that do not fill a batch. It takes the place of
    DistributedSampler, whose shares depend on the number of workers."""

    def __init__(self, samples: int, batch: int, lanes: int, seed: int = 0):
        if batch < 1 or samples < batch:
            raise ValueError(f"{samples} samples do not fill a batch of {batch}")
        self._samples, self._batch, self._lanes, self._seed = samples, batch, lanes, seed
        self._epoch: Optional[int] = None
        self._order = torch.empty(0)

    def __call__(self, step: int, lane: int) -> List[int]:
        """Steps count from 1, lanes from 0."""
        if step < 1 or not 0 <= lane < self._lanes:
            raise ValueError(f"there is no lane {lane} of step {step}: steps count from 1, lanes from 0 to {self._lanes - 1}")
        epoch, place = divmod((step - 1) * self._lanes + lane, self._samples // self._batch)
        if epoch != self._epoch:
            self._order = torch.randperm(self._samples, generator=lane_generator(self._seed, epoch, -1))  # no lane's own numbers
            self._epoch = epoch
        return self._order[place * self._batch:(place + 1) * self._batch].tolist()
