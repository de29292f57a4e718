"""Fit y = 3x with DistributedDataParallel over gloo; every rank must end with the same weight."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    x = torch.rand(32, 1)
    loss = ((model(x) - 3 * x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weight = model.module.weight.item()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: weight {weight:.4f}", flush=True)
dist.destroy_process_group()
assert abs(weight - 3) < 0.1
