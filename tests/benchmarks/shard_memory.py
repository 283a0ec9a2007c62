"""Memory per GPU of a pi05 of real size: DDP and FSDP2, full fine-tuning and LoRA, 4 and 8 GPUs.

    uv run python tests/benchmarks/shard_memory.py

No GPU and no weights: the policy is built on torch's meta device, its units are those that
`--parallel fsdp` gathers, and the rest is arithmetic. Everything is float32, as `--amp bf16` trains
it; activations are left out, which depend on the batch and are the same in every row. With P
parameters of which T are trained, N GPUs, R of them in the root and U in the largest unit (r and u
of them trained), bytes per GPU are

    weights      4 P        in every process with DDP, 4 P / N with FSDP2
    gradients    4 T        likewise
    Adam         8 T        likewise
    stash        4 T        likewise: the task gradient, in steps of two backward passes only
    buckets      4 T        DDP's copies of the gradients
    gathered     4 P + 8 T            FSDP2 as one unit: all weights, their gradients, and the input
                                      of the exchange
                 4 (R + 2 U) + 8 (r + u)   FSDP2 by units: root, the unit in use and the next one

LeRobot's own step has no stash. With accelerate's FSDP2 it is one unit unless the user names layers
to wrap, and pi05 never calls its layers.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch
from torch import nn

from craftcli.engine.sharding import separable
from craftcli.policies.families.pi05 import Pi05Adapter

GB = 1e9
LORA_TARGETS = ("q_proj", "v_proj")


class Policy(nn.Module):
    """What the adapter reads of a policy."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = PI05Pytorch(PI05Config())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of parameters, of which `trained_*` are trained."""

    whole: int
    trained: int
    root: int
    trained_root: int
    unit: int
    trained_unit: int

    def ddp(self, *, stash: bool) -> float:
        """Gigabytes per GPU with a whole copy on each."""
        return (4 * self.whole + (16 + 4 * stash) * self.trained) / GB

    def fsdp(self, gpus: int, *, by_units: bool, stash: bool) -> float:
        """Gigabytes per GPU with a share on each, and what is gathered."""
        share = (4 * self.whole + (12 + 4 * stash) * self.trained) / gpus
        gathered = 4 * self.whole + 8 * self.trained
        if by_units:
            weights = 4 * (self.root + 2 * self.unit)
            gathered = weights + 8 * (self.trained_root + self.trained_unit)
        return (share + gathered) / GB


def count(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers distinct parameters have."""
    return sum({id(p): p.numel() for p in parameters}.values())


def measure(rank: int = 0) -> Sizes:
    """The sizes of pi05, trained in full, or with LoRA weights of a rank at its projections."""
    policy = Policy()
    units = list(separable(policy, Pi05Adapter().shard_units(policy)))
    whole, in_units = count(policy.parameters()), count(p for u in units for p in u.parameters())
    largest = max(count(unit.parameters()) for unit in units)
    if not rank:
        root = whole - in_units
        return Sizes(
            whole=whole,
            trained=whole,
            root=root,
            trained_root=root,
            unit=largest,
            trained_unit=largest,
        )
    targets = [m for name, m in policy.named_modules() if name.endswith(LORA_TARGETS)]
    lora = [rank * sum(m.weight.shape) for m in targets if isinstance(m, nn.Linear)]
    return Sizes(
        whole=whole + sum(lora),
        trained=sum(lora),
        root=whole - in_units,
        trained_root=0,
        unit=largest,
        trained_unit=max(lora),
    )


def rows(sizes: Sizes, gpus: int) -> dict[str, float]:
    """Gigabytes per GPU by way of training."""
    return {
        "LeRobot's step, DDP": sizes.ddp(stash=False),
        "craft, DDP": sizes.ddp(stash=True),
        "LeRobot's step, FSDP2 as one unit": sizes.fsdp(gpus, by_units=False, stash=False),
        "craft, FSDP2 as one unit (before)": sizes.fsdp(gpus, by_units=False, stash=True),
        "craft, FSDP2 by units, steps of one pass": sizes.fsdp(gpus, by_units=True, stash=False),
        "craft, FSDP2 by units": sizes.fsdp(gpus, by_units=True, stash=True),
    }


def main() -> None:
    """Print the sizes and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA weights")
    rank = parser.parse_args().rank
    full, lora = measure(), measure(rank)
    for name, sizes in (("full", full), (f"LoRA r={rank}", lora)):
        print(f"{name}: {sizes}")
    print(f"| GB per GPU | full, 4 GPUs | 8 GPUs | LoRA r={rank}, 4 GPUs | 8 GPUs |")
    print("|---|---|---|---|---|")
    columns = [rows(sizes, gpus) for sizes in (full, lora) for gpus in (4, 8)]
    for way in columns[0]:
        print(f"| {way} | " + " | ".join(f"{column[way]:.1f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
