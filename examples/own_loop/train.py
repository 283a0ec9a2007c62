"""Retention in a training loop of one's own: the lines that say `retention` are all it takes."""

import argparse

import torch
from torch.utils.data import DataLoader

from craftcli import Retention, RetentionConfig, load_checkpoint
from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.demo.datasets import NEW, ensure_dataset
from craftcli.policies.lerobot.datasets import open_dataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("cache", help="what craft cache build wrote")
parser.add_argument("--policy", default=str(TEACHER_FOLDER), help="the policy that built it")
parser.add_argument("--dataset", help="folder of the new task's LeRobotDataset")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()

checkpoint = load_checkpoint(arguments.policy, device="cpu")
policy = checkpoint.policy.train()
root = arguments.dataset or str(ensure_dataset(NEW))
dataset = open_dataset(root, root=root, policy_config=policy.config)
loader = DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)

config = RetentionConfig(anchor_batch_size=8)
retention = Retention.open(arguments.cache, checkpoint, config, total_steps=arguments.steps)
step = 0
while step < arguments.steps:
    for batch in loader:
        loss, _ = policy(checkpoint.preprocess(batch))
        loss.backward()
        report = retention.apply(step)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step} {loss.item():.4f} L_ret={report.loss:.5f} λ={retention.lam:.3f}")
        step += 1
        if step == arguments.steps:
            break
