#!/usr/bin/env python3
"""What PyTorch builds on process groups works over the backend lockstep: hooks that wait for collectives of their own, compiled
modules, sharded modules and their checkpoints, groups that are split off, meshes; what cannot work is refused with a reason."""
# ctest: TIMEOUT 200
# builds: release

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from torch_workers import expect_raises, need_torch, run_all


def make():
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def same_everywhere(tensors):
    import torch
    import torch.distributed as dist

    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor), (first, tensor)


def a_callback_waits_for_a_collective():
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("lockstep")
    n = dist.get_world_size()

    def again(future, times):
        asked = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return asked.then(lambda found: again(found, times - 1) if times > 1 else found.value()[0]).wait()

    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert first.then(lambda found: again(found, 3)).wait().tolist() == [n ** 4] * 3
    model = DistributedDataParallel(make(), bucket_cap_mb=100)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
                             powerSGD_hook.powerSGD_hook)
    for step in range(5):
        model(torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank() + step))).sum().backward()
    same_everywhere(parameter.grad for parameter in model.parameters())
    dist.destroy_process_group()


def compiled():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("lockstep")
    plain, model = make(), torch.compile(DistributedDataParallel(make()), backend="aot_eager")
    data = torch.ones(2, 8)
    for _ in range(3):
        model.zero_grad()
        model(data).sum().backward()
    plain(data).sum().backward()
    for ours, alone in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(ours.grad, alone.grad)
    dist.destroy_process_group()


def sharded():
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("lockstep")
    data = torch.ones(2, 8)
    plain = make()
    plain(data).sum().backward()
    old = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
    new = make()
    fully_shard(new)
    for model in (old, new):
        optimizer = torch.optim.Adam(model.parameters())
        model(data).sum().backward()
        optimizer.step()
        state, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": state, "optimizer": moments}, checkpoint_id=os.path.join(os.environ["FOLDER"], type(model).__name__))
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    assert FullyShardedDataParallel.optim_state_dict(old, torch.optim.Adam(old.parameters())) is not None
    assert torch.allclose(new[0].weight.grad.full_tensor(), plain[0].weight.grad)
    checkpoint.async_save({"model": state}, checkpoint_id=os.path.join(os.environ["FOLDER"], "later")).result()
    dist.destroy_process_group()


def groups():
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("lockstep", device_id=torch.device("cpu:0"))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    halves = dist.split_group(None, [[0, 1], [3, 2]])
    quarter = dist.split_group(halves, [[0]])  # of the first of each half
    assert (quarter is dist.GroupMember.NON_GROUP_MEMBER) == (rank in (1, 2))
    for group, expected in ((halves, (1, 1, 5, 5)), (mesh.get_group("rows"), (2, 4, 2, 4)), (mesh.get_group("columns"), (1, 1, 5, 5))):
        data = torch.tensor([rank])
        dist.all_reduce(data, group=group)
        assert data.item() == expected[rank], (data, expected)
    data = torch.tensor([rank])
    dist.broadcast(data, group=halves, group_src=0)
    assert data.item() == (0, 0, 3, 3)[rank] and halves.group_desc and dist.get_backend(halves) == "lockstep"
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.destroy_process_group()


def what_cannot_work_is_refused():
    import torch
    import torch.distributed as dist

    for mixture in ("cpu:lockstep,cuda:gloo", "cpu:gloo,cuda:lockstep"):
        expect_raises(ValueError, lambda: dist.init_process_group(mixture), "all devices", "new_group")
        assert not dist.is_initialized()
    dist.init_process_group("cpu:lockstep,cuda:lockstep")
    scaled = dist._make_nccl_premul_sum(2.0)
    expect_raises(ValueError, lambda: dist.all_reduce(torch.ones(1), scaled), "float32", "PREMUL_SUM")
    dist.destroy_process_group()


def main():
    need_torch()
    import torch

    run_all(2, a_callback_waits_for_a_collective)
    if int(torch.__version__.split(".")[0]) < 2:
        print("the rest needs PyTorch 2")
        return
    run_all(2, compiled)
    run_all(2, sharded)
    run_all(4, groups)
    run_all(1, what_cannot_work_is_refused)


if __name__ == "__main__":
    main()
