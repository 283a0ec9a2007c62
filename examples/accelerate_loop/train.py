"""Retention in a loop that accelerate runs, in one process or in several."""

import argparse
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.data import DataLoader

from craftcli import Retention, RetentionConfig, load_checkpoint
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.policies.lerobot.datasets import open_dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("cache", help="what craft cache build wrote")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--cpu", action="store_true")
arguments = parser.parse_args()

unused = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(kwargs_handlers=[unused], cpu=arguments.cpu)
checkpoint = load_checkpoint(str(TEACHER_FOLDER), device=str(accelerator.device))
root = str(ensure_dataset(NEW))
dataset = open_dataset(root, root=root, policy_config=checkpoint.policy.config)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(checkpoint.policy.parameters(), lr=3e-4)
policy, optimizer, loader = accelerator.prepare(checkpoint.policy, optimizer, loader)
config = RetentionConfig(anchor_batch_size=8)
how = {"accelerator": accelerator, "total_steps": arguments.steps}
retention = Retention.open(arguments.cache, checkpoint, config, **how)
for step, batch in enumerate(islice(loader, arguments.steps)):
    loss, _ = policy(checkpoint.preprocess(batch))
    accelerator.backward(loss)
    report = retention.apply(step)
    accelerator.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"{step} {loss.item():.4f} L_ret={report.loss:.5f} λ={retention.lam:.3f}")
