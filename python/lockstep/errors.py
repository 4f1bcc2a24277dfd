"""What can go wrong: one exception, and one class below it for what programs tell apart."""

from __future__ import annotations

import enum
from typing import Dict, Optional, Type


class Code(enum.IntEnum):
    """What kind of failure it is; the values are those of lockstep/c.h."""

    INVALID_ARGUMENT = 1
    INVALID_RANK = 2
    INVALID_WORLD_SIZE = 3
    SELF_SEND = 4
    NO_CONNECTION = 5
    SIZE_MISMATCH = 6
    TIMEOUT = 7
    CHANNEL_CLOSED = 8
    IO = 9
    PEER_LOST = 10
    ABORTED = 11
    COLLECTIVE_MISMATCH = 12
    NON_FINITE = 13
    AUTHENTICATION = 14
    VERSION_MISMATCH = 15
    UNEXPECTED_MESSAGE = 16
    MESSAGE_TOO_LARGE = 17
    STEP_MISMATCH = 18
    BLOCK_MISMATCH = 19
    COMPONENT_MISMATCH = 20
    REPLICA_MISMATCH = 21
    DEVICE = 22
    INTERNAL = 99


class Error(RuntimeError):
    """Something in the job or its surroundings went wrong. All workers get the same first cause.

    code     what kind of failure it is
    rank     the rank of the job that is at fault; None: none is
    culprit  its name as messages have it, such as "rank 2 (10.0.0.3:4711)"; None likewise
    """

    def __init__(self, text: str, code: Code = Code.INTERNAL, rank: Optional[int] = None, culprit: Optional[str] = None):
        super().__init__(text)
        self.code = code
        self.rank = rank
        self.culprit = f"rank {rank}" if culprit is None and rank is not None else culprit


class PeerLost(Error):
    """A worker died, was stopped or is out of reach."""


class TimeoutReached(Error, TimeoutError):
    """Something did not end by its deadline."""


class Aborted(Error):
    """A worker has called abort()."""


class Mismatch(Error):
    """Workers called different collectives, or the same with other sizes."""


class Damaged(Error, OSError):
    """A file cannot be read or written, or its hash is not what its manifest says."""

    def __str__(self) -> str:
        return str(self.args[0])


class Misuse(Error, ValueError):
    """Arguments that do not fit together: nothing has been done."""


_CLASSES: Dict[Code, Type[Error]] = {
    Code.PEER_LOST: PeerLost,
    Code.TIMEOUT: TimeoutReached,
    Code.ABORTED: Aborted,
    Code.COLLECTIVE_MISMATCH: Mismatch,
    Code.SIZE_MISMATCH: Mismatch,
    Code.IO: Damaged,
    Code.INVALID_ARGUMENT: Misuse,
    Code.INVALID_RANK: Misuse,
    Code.SELF_SEND: Misuse,
}


def make(code: int, rank: int, text: str) -> Error:
    """The exception for a code of the library."""
    try:
        known = Code(code)
    except ValueError:
        known = Code.INTERNAL
    return _CLASSES.get(known, Error)(text, known, rank if rank >= 0 else None)
