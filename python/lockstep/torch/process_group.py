"""The backend "lockstep" of torch.distributed."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Dict

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..communicator import FORGOTTEN, Op
from .memory import Memory
from .work import Completer, Then, Work

OPS = (
    (ReduceOp.SUM, Op.SUM),
    (ReduceOp.AVG, Op.MEAN),
    (ReduceOp.MIN, Op.MIN),
    (ReduceOp.MAX, Op.MAX),
    (ReduceOp.PRODUCT, Op.PRODUCT),
)
# Of truth values: a sum is true if any is, a product if all are.
OF_BOOL = {Op.SUM: Op.MAX, Op.MAX: Op.MAX, Op.MIN: Op.MIN, Op.PRODUCT: Op.MIN}
BITWISE = (
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
)
DEVICES = [torch.device("cpu"), torch.device("cuda")]


def _op_of(op, dtype):
    for theirs, ours in OPS:
        if op == theirs:
            found = OF_BOOL.get(ours) if dtype == torch.bool else ours
            if found is None or (dtype.is_complex and found not in (Op.SUM, Op.MEAN)):
                break
            return found
    raise ValueError(f"lockstep cannot reduce tensors of type {dtype} with {getattr(op, 'op', op)}")


def _bitwise(op, dtype):
    function = next((function for theirs, function in BITWISE if op == theirs), None)
    if function is not None and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"lockstep cannot reduce tensors of type {dtype} with {getattr(op, 'op', op)}")
    return function


def _only(tensors):
    if len(tensors) != 1:
        raise ValueError(f"lockstep takes one tensor per process, not {len(tensors)}")
    return tensors[0]


class ProcessGroup(dist.ProcessGroup):
    """The processes of one lockstep communicator.

    Collectives are asynchronous: they run on a thread of the library in the order in which they were called. A worker
    that is lost, or that calls something else than the others, is named by the error that all of them raise."""

    def __init__(self, job, communicator, rank: int, size: int, timeout: timedelta, store=None):
        super().__init__(rank, size)
        self.job = job
        self.communicator = communicator
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._completer = Completer()
        self._works: Dict[Work, None] = {}  # in the order of their calls
        self._coalesced = None  # the works since _start_coalescing()

    def getBackendName(self):
        return "lockstep"

    def _get_backend_name(self):
        return "lockstep"

    def name(self):
        return "lockstep"

    # Newer PyTorch asks a group for its name, and keeps it here.
    def _set_group_name(self, name):
        self._name = name

    def _set_group_desc(self, description):
        self._description = description

    @property
    def group_name(self):
        return self._name

    def getGroupName(self):
        return self._name

    @property
    def group_desc(self):
        return self._description

    def getGroupDesc(self):
        return self._description

    # Newer PyTorch asks a group for what stands behind it on a kind of device: it is the group itself.
    supports_coalescing = False
    supports_splitting = True
    _device_types = DEVICES

    def _get_backend(self, device):
        return self

    def eager_connect_single_device(self, device):
        pass  # all are connected

    def get_group_store(self):
        return self._store

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """Those of `ranks`, ranks of this group, form one; whoever is none of them gets None."""
        if self._rank not in ranks:
            return None
        communicator = self.communicator.subgroup(ranks, label=group_name)
        group = ProcessGroup(None, communicator, ranks.index(self._rank), len(ranks), timeout or self._timeout, self._store)
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def set_timeout(self, timeout):
        self._timeout = timeout

    # Each call of a batch starts at once; the bracket gives one work for all of them.
    def _start_coalescing(self, *device):
        self._coalesced = []

    def _end_coalescing(self, *device):
        works, self._coalesced = self._coalesced, None
        return self._together(works, []) if works else self._keep(Work(None, (), (), [], self._completer))

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return 0

    def _start(self, collective, *arguments, result, inputs=(), outputs=(), opts=None):
        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        native = collective(*arguments, wait=False, timeout=timeout.total_seconds())
        return self._keep(Work(native, inputs, outputs, result, self._completer))

    def _start_message(self, message, data, *arguments, result, source=-1, **memory):
        """A message ends whenever its other side comes, so its future waits behind no collective."""
        native = message(data.view, *arguments, wait=False, timeout=self._timeout.total_seconds())
        return self._keep(Work(native, result=result, completer=None, source=source, **memory))

    def _keep(self, work):
        """Memory stays where it is until its collective has ended, whether or not the caller keeps the work. Callers
        in C++ of older PyTorch keep no reference to a work made in Python either, and wait for it later; so the last
        ones that nobody has waited for stay in any case."""
        for forgotten in list(self._works)[:-FORGOTTEN]:
            if forgotten.is_completed():
                self._works.pop(forgotten, None)
        work.stay_in(self._works)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Collectives. Names and arguments are those of torch.distributed.ProcessGroup.

    def broadcast(self, tensors, opts=BroadcastOptions()):
        root = opts.rootRank == self._rank
        data = Memory([_only(tensors)], fill=root)
        return self._start(self.communicator.broadcast, data.view, opts.rootRank, result=tensors, opts=opts, inputs=(data,),
                           outputs=() if root else (data,))

    def allreduce(self, tensors, opts=AllreduceOptions()):
        tensor = _only(tensors)
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, opts)
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors, opts=AllreduceCoalescedOptions()):
        function = _bitwise(opts.reduceOp, tensors[0].dtype)
        if function is not None:
            return self._reduce_bits(tensors, function, opts)
        op = _op_of(opts.reduceOp, tensors[0].dtype)
        data = Memory(tensors, reduces=True)
        return self._start(self.communicator.all_reduce, data.view, op, result=tensors, opts=opts, outputs=(data,))

    def _reduce_bits(self, tensors, function, opts, root=None):
        """Everybody's bits travel; whoever gets the result, all or the root, combines them when they have come."""
        data, receives = Memory(tensors), root in (None, self._rank)
        everybody = torch.empty((self._size if receives else 0, sum(tensor.numel() for tensor in tensors)), dtype=tensors[0].dtype)

        def combine():
            parts = functools.reduce(function, everybody).split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts):
                tensor.detach().copy_(part.view(tensor.shape))

        out = Memory([everybody]).view if receives else None
        call, *arguments = (self.communicator.all_gather, out) if root is None else (self.communicator.gather, out, root)
        return self._start(call, data.view, *arguments, result=tensors, opts=opts, inputs=(data,), outputs=(Then(combine),) if receives else ())

    def _allreduce_sparse(self, tensor, opts):
        """Everybody gets everybody's entries, and adds them in the order of ranks when they have come. The call itself
        waits until everybody has said how many entries it has."""
        if opts.reduceOp != ReduceOp.SUM:
            raise ValueError("lockstep adds up sparse tensors, and reduces them in no other way")
        own = tensor.coalesce()
        indices, values = own.indices().cpu().contiguous(), own.values().cpu().contiguous()
        counts = torch.empty(self._size, dtype=torch.int64)
        self._allgather([counts], torch.tensor([values.shape[0]]), opts, []).wait()
        all_indices = [indices.new_empty((indices.shape[0], int(n))) for n in counts]
        all_values = [values.new_empty((int(n), *values.shape[1:])) for n in counts]

        def add():
            parts = [torch.sparse_coo_tensor(*entries, tensor.shape) for entries in zip(all_indices, all_values)]
            tensor.copy_(functools.reduce(torch.add, parts).coalesce().to(tensor.device))

        return self._together([self._allgather(all_indices, indices, opts, []), self._allgather(all_values, values, opts, [])],
                              [tensor], (Then(add),))

    def reduce(self, tensors, opts=ReduceOptions()):
        function = _bitwise(opts.reduceOp, _only(tensors).dtype)
        if function is not None:
            return self._reduce_bits(tensors, function, opts, opts.rootRank)
        op = _op_of(opts.reduceOp, tensors[0].dtype)
        data = Memory(tensors, reduces=True)
        root = opts.rootRank == self._rank
        return self._start(self.communicator.reduce, data.view, data.view, op, opts.rootRank, result=tensors, opts=opts, inputs=(data,),
                           outputs=(data,) if root else ())

    def allgather(self, output_tensors, input_tensors, opts=AllgatherOptions()):
        return self._allgather(_only(output_tensors), _only(input_tensors), opts, output_tensors)

    def _allgather_base(self, output, tensor, opts=AllgatherOptions()):
        return self._allgather([output], tensor, opts, [output])

    def _allgather(self, outputs, tensor, opts, result):
        data, everybody = Memory([tensor]), Memory(outputs, fill=False)
        counts = (everybody.counts()) if len(outputs) > 1 else None
        return self._start(self.communicator.all_gather, data.view, everybody.view, counts, result=result, opts=opts,
                           inputs=(data,), outputs=(everybody,))

    def allgather_coalesced(self, output_lists, inputs, opts=AllgatherOptions()):
        return self._together([self._allgather([outputs[i] for outputs in output_lists], tensor, opts, [tensor])
                               for i, tensor in enumerate(inputs)], output_lists)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=AllgatherOptions()):
        return self._together([self._allgather_base(*pair, opts) for pair in zip(outputs, inputs)], outputs)

    def _together(self, works, result, then=()):
        """The works of one call as one work."""
        return self._keep(Work.of_all(works, result, then))

    def gather(self, output_tensors, input_tensors, opts=GatherOptions()):
        data = Memory([_only(input_tensors)])
        outputs = (Memory(_only(output_tensors), fill=False),) if opts.rootRank == self._rank else ()
        return self._start(self.communicator.gather, data.view, outputs[0].view if outputs else None, opts.rootRank,
                           result=output_tensors, opts=opts, inputs=(data,), outputs=outputs)

    def gather_single(self, output, tensor, opts=GatherOptions()):
        return self.gather([[output]] if opts.rootRank == self._rank else [], [tensor], opts)

    def scatter(self, output_tensors, input_tensors, opts=ScatterOptions()):
        data = Memory([_only(output_tensors)], fill=False)
        inputs = (Memory(_only(input_tensors)),) if opts.rootRank == self._rank else ()
        return self._start(self.communicator.scatter, inputs[0].view if inputs else None, data.view, opts.rootRank, result=output_tensors, opts=opts,
                           inputs=inputs, outputs=(data,))

    def reduce_scatter(self, output_tensors, input_tensors, opts=ReduceScatterOptions()):
        return self._reduce_scatter(_only(output_tensors), _only(input_tensors), opts)

    def _reduce_scatter_base(self, output, tensor, opts=ReduceScatterOptions()):
        return self._reduce_scatter(output, [tensor], opts)

    def _reduce_scatter(self, output, inputs, opts):
        function = _bitwise(opts.reduceOp, output.dtype)
        if function is not None:
            return self._reduce_scatter_bits(output, inputs, function, opts)
        op = _op_of(opts.reduceOp, output.dtype)
        everybody, data = Memory(inputs, reduces=True), Memory([output], reduces=True, fill=False)
        counts = (everybody.counts()) if len(inputs) > 1 else None
        return self._start(self.communicator.reduce_scatter, everybody.view, data.view, op, counts, result=[output],
                           opts=opts, inputs=(everybody,), outputs=(data,))

    def _reduce_scatter_bits(self, output, inputs, function, opts):
        """Everybody gets everybody's bits of its own part, and combines them when they have come."""
        data, parts = Memory(inputs), torch.empty((self._size, output.numel()), dtype=output.dtype)
        received = Memory([parts])

        def combine():
            output.detach().copy_(functools.reduce(function, parts).view(output.shape))

        counts = data.counts() if len(inputs) > 1 else None
        return self._start(self.communicator.all_to_all, data.view, received.view, counts, [received.view.count // self._size] * self._size,
                           result=[output], opts=opts, inputs=(data,), outputs=(Then(combine),))

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=ReduceScatterOptions()):
        return self._together([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs)], outputs)

    def alltoall(self, output_tensors, input_tensors, opts=AllToAllOptions()):
        source, target = Memory(input_tensors), Memory(output_tensors, fill=False)
        return self._alltoall(source, target, (source.counts()), (target.counts()), output_tensors, opts)

    def alltoall_base(self, output, tensor, output_rows, input_rows, opts=AllToAllOptions()):
        source, target = Memory([tensor]), Memory([output], fill=False)
        return self._alltoall(source, target, self._counts(tensor, source, input_rows),
                              self._counts(output, target, output_rows), [output], opts)

    def _alltoall(self, source, target, send_counts, recv_counts, result, opts):
        return self._start(self.communicator.all_to_all, source.view, target.view, send_counts, recv_counts, result=result,
                           opts=opts, inputs=(source,), outputs=(target,))

    def _counts(self, tensor, memory, rows):
        """Elements per rank: so many rows of the tensor, or equal parts."""
        total = tensor.shape[0]
        if not rows:
            if total % self._size:
                raise ValueError(f"{total} rows cannot be split evenly among {self._size} processes")
            return None
        if len(rows) != self._size or sum(rows) != total:
            raise ValueError(f"the sizes {list(rows)} do not split {total} rows among {self._size} processes")
        return ([count * memory.view.count // total if total else 0 for count in rows])

    def send(self, tensors, to, tag):
        data = Memory([_only(tensors)])
        return self._start_message(self.communicator.send, data, to, tag, result=tensors, inputs=(data,))

    def recv(self, tensors, source, tag):
        data = Memory([_only(tensors)], fill=False)
        return self._start_message(self.communicator.recv, data, source, tag, result=tensors, source=source, outputs=(data,))

    def recv_anysource(self, tensors, tag):
        data = Memory([_only(tensors)], fill=False)
        return self._start_message(self.communicator.recv_any, data, tag, result=tensors, outputs=(data,))

    def barrier(self, opts=BarrierOptions()):
        return self._start(self.communicator.barrier, result=[], opts=opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """As every collective it names all who are missing when the time is up, with `wait_all_ranks` and without."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # The names of newer PyTorch.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
    gather_into_tensor = gather_single

    # The end.

    def abort(self):
        self.communicator.abort("torch.distributed aborts the process group")

    def shutdown(self):
        """In good order: waits for all processes of the job, if this is the default group."""
        self._completer.close()
        self._works.clear()
        if self.job is not None:
            job, self.job = self.job, None
            job.close()

    def __del__(self):
        try:
            self.shutdown()
        except Exception:
            pass  # nobody is left to hear it; collectives have told before
