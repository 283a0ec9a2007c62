"""Sharding a policy over several processes with FSDP2, unit by unit.

Every process holds a share of every parameter. A unit is gathered when its module is called and
released afterwards, in the backward pass too, so that the gathered memory is that of the largest
unit. What is in no unit belongs to the root, which stays gathered from the first forward pass of a
backward pass to its end: embeddings, norms, small heads, and weights that two modules share.
"""

from collections.abc import Collection, Iterable, Iterator

from torch import nn

from craftcli.errors import EXIT_USAGE, CraftError


def shard(root: nn.Module, units: Iterable[nn.Module]) -> None:
    """Replace the parameters by this process's share of them.

    Every unit must be called as a module wherever its parameters are used.
    """
    from torch.distributed.fsdp import fully_shard

    _require_one_dtype(root)
    for unit in separable(root, units):
        fully_shard(unit)
    fully_shard(root)


def separable(root: nn.Module, units: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The units that share no parameter with a module outside, inner ones first.

    A shared weight that was sharded in one unit would stay whole in the other, and no longer be the
    same.
    """
    chosen = {id(unit) for unit in units}
    uses: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), set()).add(id(module))
    for module in reversed(list(root.modules())):
        inside = {id(part) for part in module.modules()}
        if id(module) in chosen and all(uses[id(p)] <= inside for p in module.parameters()):
            yield module


def describe_units(units: Collection[nn.Module], policy_type: str) -> str | None:
    """A note if the policy is gathered as one unit; None if it has several."""
    if units:
        return None
    return (
        f"--parallel fsdp shards {policy_type} as one unit: all its parameters are gathered for a "
        "step, and only optimizer state and gradients are shared out. craft does not know which of "
        "its modules are called; an adapter names them in shard_units."
    )


def _require_one_dtype(root: nn.Module) -> None:
    dtypes = {p.dtype for p in root.parameters()}
    if len(dtypes) > 1:
        raise CraftError(
            "This policy cannot be sharded.",
            why=f"FSDP2 needs parameters of one dtype; it has {', '.join(map(str, dtypes))}.",
            fix="use --parallel ddp, or a float32 policy with --amp bf16.",
            exit_code=EXIT_USAGE,
        )
