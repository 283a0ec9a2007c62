"""What craft asks of the policy."""

from typing import override

from lerobot.utils.constants import OBS_STATE

from craftcli.choices import OutputKind, Pooling
from craftcli.policies.base import Features, LayerStack, PolicyAdapter, PolicyOutput
from craftcli.policies.taps import tap
from craftcli.policies.tokens import action_masks, counted_actions


class MixerAdapter(PolicyAdapter):
    """One stack, a token for every action; nothing is drawn at random."""

    policy_types, stack_names = ("mixer",), ("layers",)
    default_stack, default_layers = "layers", (-2, -1)
    default_pooling, token_kinds = Pooling.ACTION_TOKENS, frozenset({"action"})
    output_kind = OutputKind.VECTORS

    @override
    def stacks(self, policy):
        return {"layers": LayerStack.of_modules(policy.layers)}

    @override
    def input_keys(self, policy, batch, request):
        return (OBS_STATE,)

    @override
    def compute_dtype(self, policy):
        return policy.head.weight.dtype

    @override
    def features(self, policy, batch, request):
        every = counted_actions({}, policy.config.chunk_size, of=batch[OBS_STATE])
        stack, output = self.stack(policy, request.stack or self.default_stack), None
        with tap(stack, request.layers, stop=not request.output) as hidden:
            output = PolicyOutput(values=policy.actions(batch[OBS_STATE]), mask=every)
        return Features(hidden=hidden, masks=action_masks(every), output=output)
