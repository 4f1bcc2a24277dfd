#!/usr/bin/env python3
"""Every collective that the backend lockstep claims gives what torch.distributed promises, on 2 and 3 workers, for all types of
elements; what is coalesced or asynchronous ends once; memory of the CPU is not copied."""
# ctest: TIMEOUT 300
# builds: release

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from torch_workers import expect_raises, need_torch, run_all

REALS = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "int16")
TYPES = (*REALS, "bool", "complex64", "complex128")
INTEGERS = ("int32", "int64", "uint8", "int8", "int16", "bool")


def maker(name):
    """Numbers as a tensor of a type; complex ones have an imaginary part."""
    import torch

    dtype = getattr(torch, name)
    factor = 1 + 2j if dtype.is_complex else 1
    return lambda *values: torch.tensor([factor * value for value in values]).to(dtype)


def same(got, expected):
    import torch

    assert got.dtype == expected.dtype and torch.equal(got, expected), (got, expected)


def memory_is_not_copied():
    import torch

    from lockstep.torch.memory import CONVERTED, Memory

    for name in TYPES:
        tensor = maker(name)(1, 2, 3, 4)
        assert Memory([tensor]).view.address == tensor.data_ptr(), name
        assert Memory([tensor[:1], tensor[1:]]).view.address == tensor.data_ptr(), name
        if tensor.dtype not in CONVERTED:
            assert Memory([tensor], reduces=True).view.address == tensor.data_ptr(), name
    assert Memory([torch.ones(2, 3).t()]).view.address != 0


def reductions():
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllreduceOptions

    dist.init_process_group("lockstep")
    rank, n = dist.get_rank(), dist.get_world_size()
    everybody = range(1, n + 1)
    for name in TYPES:
        make = maker(name)
        product = 2 if n == 2 else 6
        ops = [(dist.ReduceOp.SUM, sum(everybody))]
        if name not in ("complex64", "complex128"):
            ops += [(dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, n), (dist.ReduceOp.PRODUCT, product)]
        for op, expected in ops:
            for asynchronous in (False, True):
                data = make(rank + 1, 0)
                work = dist.all_reduce(data, op, async_op=asynchronous)
                assert not asynchronous or work.wait()
                same(data, make(expected, 0))
                data = make(rank + 1, 0)
                work = dist.reduce(data, n - 1, op, async_op=asynchronous)
                assert not asynchronous or work.wait()
                same(data, make(expected if rank == n - 1 else rank + 1, 0))
        total = sum(everybody)
        out = make(0)
        dist.reduce_scatter(out, [make(rank + 1 + part) for part in range(n)])
        same(out, make(total + n * rank))
        one_each = make(*(rank + 1 + part for part in range(n)))
        dist.reduce_scatter_tensor(out.zero_(), one_each)
        same(out, make(total + n * rank))
        group = dist.distributed_c10d._get_default_group()
        data = [make(rank + 1), make(rank + 2, 0)]
        group.allreduce_coalesced(data).wait()
        same(data[0], make(total)), same(data[1], make(total + n, 0))
        outs = [make(0), make(0)]
        group.reduce_scatter_tensor_coalesced(outs, [one_each, one_each]).wait()
        same(outs[0], make(total + n * rank)), same(outs[1], make(total + n * rank))
    mean = maker("float32")(rank + 1)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean, maker("float32")(sum(everybody) / n))
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    expect_raises(ValueError, lambda: group.allreduce([maker("complex64")(1)], options), "complex64")
    dist.destroy_process_group()


def bits():
    import functools
    import operator

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllreduceCoalescedOptions

    dist.init_process_group("lockstep")
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    for name in INTEGERS:
        make = maker(name)
        own = [make((rank + 5) % 7, 1), make(rank)]
        for op, function in ((dist.ReduceOp.BAND, operator.and_), (dist.ReduceOp.BOR, operator.or_), (dist.ReduceOp.BXOR, operator.xor)):
            expected = [functools.reduce(function, parts) for parts in zip(*([make((r + 5) % 7, 1), make(r)] for r in range(n)))]
            data = own[0].clone()
            dist.all_reduce(data, op)
            same(data, expected[0])
            data = own[0].clone()
            dist.reduce(data, 1, op)
            same(data, expected[0] if rank == 1 else own[0])
            # Rank r gets part r of everybody.
            parts = [[make((r + part) % 7, part) for part in range(n)] for r in range(n)]
            mine = functools.reduce(function, [each[rank] for each in parts])
            out = make(0, 0)
            dist.reduce_scatter(out, parts[rank], op)
            same(out, mine)
            dist.reduce_scatter_tensor(out.zero_(), torch.cat(parts[rank]), op)
            same(out, mine)
            options = AllreduceCoalescedOptions()
            options.reduceOp = op
            data = [each.clone() for each in own]
            group.allreduce_coalesced(data, options).wait()
            same(data[0], expected[0]), same(data[1], expected[1])
    data = torch.ones(4, 5, dtype=torch.int32).t()  # not contiguous
    dist.all_reduce(data, dist.ReduceOp.BXOR)
    same(data, torch.full((5, 4), n % 2, dtype=torch.int32))
    expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND), "float32")
    expect_raises(ValueError, lambda: dist.reduce(torch.ones(1), 0, dist.ReduceOp.BOR), "float32")
    expect_raises(ValueError, lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * n, dist.ReduceOp.BOR), "float32")
    out = torch.zeros(rank + 1, dtype=torch.int64)
    dist.reduce_scatter(out, [torch.full((r + 1,), 1 << rank) for r in range(n)], dist.ReduceOp.BOR)
    same(out, torch.full((rank + 1,), (1 << n) - 1))
    # The call returns before the others have come.
    token, data = torch.zeros(1), torch.tensor([1 << rank])
    if rank == 0:
        work = dist.all_reduce(data, dist.ReduceOp.BOR, async_op=True)
        dist.send(token, 1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(token, 0)
        dist.all_reduce(data, dist.ReduceOp.BOR)
    same(data, torch.tensor([(1 << n) - 1]))
    dist.destroy_process_group()


def the_timeout_of_the_call_holds():
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllreduceOptions

    import lockstep

    dist.init_process_group("lockstep")
    dist.barrier()
    if dist.get_rank() == 1:
        expect_raises(lockstep.Error, lambda: dist.recv(torch.zeros(1), 0), "rank 1")
        return
    options = AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp.BOR, timedelta(seconds=0.3)
    group = dist.distributed_c10d._get_default_group()
    expect_raises(lockstep.TimeoutReached, lambda: group.allreduce([torch.tensor([1])], options).wait(), "rank 1")


def exchanges():
    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    for name in TYPES:
        make = maker(name)
        everybody = make(*range(1, n + 1))

        def zeros(count=n, size=1):
            return [make(*[0] * size) for _ in range(count)]

        data = make(rank + 1, rank)
        dist.broadcast(data, n - 1)
        same(data, make(n, n - 1))
        parts = zeros()
        dist.all_gather(parts, make(rank + 1))
        same(torch.cat(parts), everybody)
        whole = make(*[0] * n)
        dist.all_gather_into_tensor(whole, make(rank + 1))
        same(whole, everybody)
        parts = zeros() if rank == n - 1 else None
        dist.gather(make(rank + 1), parts, n - 1)
        assert parts is None or torch.equal(torch.cat(parts), everybody)
        data = make(0)
        dist.scatter(data, [make(r + 1) for r in range(n)] if rank == 0 else None)
        same(data, make(rank + 1))
        parts = zeros()
        dist.all_to_all(parts, [make(rank + 2 * r) for r in range(n)])
        same(torch.cat(parts), make(*(r + 2 * rank for r in range(n))))
        whole = make(*[0] * n)
        dist.all_to_all_single(whole, make(*(rank + 2 * r for r in range(n))))
        same(whole, make(*(r + 2 * rank for r in range(n))))
        # Rank r gets r + 1 elements of everybody.
        whole = make(*[0] * (n * (rank + 1)))
        dist.all_to_all_single(whole, torch.cat([make(*[rank + r] * (r + 1)) for r in range(n)]), [rank + 1] * n, [r + 1 for r in range(n)])
        same(whole, torch.cat([make(*[r + rank] * (rank + 1)) for r in range(n)]))
        lists = [zeros() for _ in range(2)]
        group.allgather_coalesced([[lists[0][r], lists[1][r]] for r in range(n)], [make(rank + 1), make(rank + 1)]).wait()
        same(torch.cat(lists[0]), everybody), same(torch.cat(lists[1]), everybody)
        outs = zeros(2, n)
        group.allgather_into_tensor_coalesced(outs, [make(rank + 1), make(rank + 1)]).wait()
        same(outs[0], everybody), same(outs[1], everybody)
        received = make(0)
        sent = dist.isend(make(rank + 1), (rank + 1) % n)
        assert dist.recv(received, (rank - 1) % n) == (rank - 1) % n and sent.wait()
        same(received, make((rank - 1) % n + 1))
    # Of unlike lengths, and not contiguous.
    parts = [torch.zeros(r + 1) for r in range(n)]
    group.allgather([parts], [torch.full((rank + 1,), float(rank))]).wait()
    same(torch.cat(parts), torch.cat([torch.full((r + 1,), float(r)) for r in range(n)]))
    expected = torch.arange(6.0).view(2, 3).t()
    data = expected if rank == 0 else torch.zeros(2, 3).t()
    dist.broadcast(data, 0)
    same(data, expected)
    expect_raises(ValueError, lambda: dist.all_to_all_single(torch.zeros(n + 1), torch.zeros(n + 1)), "evenly")
    dist.destroy_process_group()


def objects_groups_and_works():
    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered = [None] * n
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": r} for r in range(n)]
    listed = [("from", rank)]
    dist.broadcast_object_list(listed, n - 1)
    assert listed == [("from", n - 1)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else [None] * n)
    assert mine == [f"for {rank}"]
    gathered = [None] * n if rank == 0 else None
    dist.gather_object("x" * rank, gathered)
    assert gathered is None or gathered == ["x" * r for r in range(n)]
    dist.distributed_c10d._get_default_group().monitored_barrier()
    dist.distributed_c10d._get_default_group().monitored_barrier(wait_all_ranks=True)

    backwards = dist.new_group([n - 1, 0])
    if rank in (0, n - 1):
        data = torch.tensor([rank + 1])
        dist.all_reduce(data, group=backwards)
        assert data.item() == n + 1
        dist.broadcast(data.fill_(rank), 0, group=backwards)
        assert data.item() == 0
    # Works end in any order of waiting, and their futures with them.
    data = [torch.full((1000,), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(each, async_op=True) for each in data]
    futures = [work.get_future() for work in works]
    for i in reversed(range(20)):
        works[i].wait()
        assert works[i].is_completed() and works[i].is_success() and data[i][-1] == n * i + sum(range(n))
        assert futures[i].wait()[0] is data[i] or torch.equal(futures[i].wait()[0], data[i])
    # What is called between start and end is one work.
    group = dist.distributed_c10d._get_default_group()
    group._start_coalescing(torch.device("cpu"))
    data, received = [torch.ones(2), torch.ones(3)], torch.zeros(1)
    for each in data:
        dist.all_reduce(each, async_op=True)
    dist.irecv(received, (rank - 1) % n)
    dist.isend(torch.tensor([float(rank)]), (rank + 1) % n)
    work = group._end_coalescing(torch.device("cpu"))
    work.get_future().wait()
    assert work.wait() and work.is_completed() and data[0][0] == n and data[1][2] == n and received.item() == (rank - 1) % n
    # It has not ended before the last of them.
    group._start_coalescing(torch.device("cpu"))
    if rank == 0:
        dist.irecv(received, 1)
    work = group._end_coalescing(torch.device("cpu"))
    assert work.is_completed() == (rank != 0)
    dist.barrier()
    if rank == 1:
        dist.send(torch.tensor([7.0]), 0)
    work.wait()
    assert rank != 0 or received.item() == 7
    dist.destroy_process_group()


def ended_works_keep_no_tensor():
    """A tensor is its caller's alone once its collective has been waited for, also beside a message that is still expected."""
    import weakref

    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    expected = torch.zeros(1)
    message = dist.irecv(expected, (dist.get_rank() - 1) % dist.get_world_size())
    seen = []
    for asynchronous in (False, True):
        data = torch.ones(10)
        seen.append(weakref.ref(data))
        work = dist.all_reduce(data, async_op=asynchronous)
        assert not asynchronous or work.wait()
        parts = [torch.ones(10) for _ in range(dist.get_world_size())]
        seen += [weakref.ref(part) for part in parts]
        work = dist.all_gather(parts, data, async_op=asynchronous)
        assert not asynchronous or work.wait()
        del data, parts, work
    assert [tensor() for tensor in seen] == [None] * len(seen), seen
    # What nobody waits for stays until it has ended.
    for _ in range(200):
        dist.all_reduce(torch.ones(10), async_op=True)
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    assert len(dist.distributed_c10d._get_default_group()._works) < 80
    dist.send(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())
    assert message.wait() and expected.item() == 1
    dist.destroy_process_group()


def sparse():
    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    rank, n = dist.get_rank(), dist.get_world_size()

    def make(r, dtype):
        # Rank 0 has nothing; the others have a row twice, and one that all have.
        if r == 0:
            return torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2, dtype=dtype), (5, 2))
        return torch.sparse_coo_tensor([[r, r, 4]], torch.tensor([[1, 2], [3, 4], [r, r]], dtype=dtype), (5, 2))

    for dtype in (torch.float32, torch.float64, torch.int64):
        expected = sum(make(r, dtype).to_dense() for r in range(n))
        for asynchronous in (False, True):
            data = make(rank, dtype)
            work = dist.all_reduce(data, async_op=asynchronous)
            assert not asynchronous or work.wait()
            same(data.to_dense(), expected)
    expect_raises(ValueError, lambda: dist.all_reduce(make(1, torch.float32), dist.ReduceOp.MAX), "sparse")
    expect_raises(ValueError, lambda: dist.broadcast(make(1, torch.float32), 0), "dense")
    dist.destroy_process_group()


def main():
    need_torch()
    memory_is_not_copied()
    for workers in (2, 3):
        for each in (reductions, bits, exchanges, objects_groups_and_works, ended_works_keep_no_tensor, sparse, the_timeout_of_the_call_holds):
            run_all(workers, each)


if __name__ == "__main__":
    main()
