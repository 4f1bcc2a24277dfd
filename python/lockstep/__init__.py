"""Lockstep: data-parallel training whose result does not depend on the workers, to the last bit.

    import lockstep, numpy

    with lockstep.join() as job:  # python -m lockstep run --workers 3 program.py
        data = numpy.full(4, job.rank, "float32")
        job.communicator.all_reduce(data)

join() makes this process a worker of a job, LaneSum adds up what the workers compute. docs/python.md has more."""

from ._library import library as _c
from .arrays import Type
from .checkpoint import Checkpoint, save
from .communicator import Buffer, CallOptions, Communicator, Op, Outcome, Work
from .errors import Aborted, Code, Damaged, Error, Mismatch, Misuse, PeerLost, TimeoutReached
from .hashes import blake3, blake3_many
from .job import Departure, Job, Regroup, Wishes, join, run_steps
from .lanes import LaneSum, Sum, accumulate, first_non_finite, lanes_of, partials_of, schedule

__version__: str = _c.lockstep_version().decode()
__all__ = [
    "Aborted", "Buffer", "CallOptions", "Checkpoint", "Code", "Communicator", "Damaged", "Departure", "Error", "Job", "LaneSum",
    "Mismatch", "Misuse", "Op", "Outcome", "PeerLost", "Regroup", "Sum", "TimeoutReached", "Type", "Wishes", "Work", "accumulate",
    "blake3", "blake3_many", "first_non_finite", "join", "lanes_of", "partials_of", "run_steps", "save", "schedule",
]
