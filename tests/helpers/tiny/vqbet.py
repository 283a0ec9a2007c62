"""VQ-BeT with one camera, its action codes settled."""

from pathlib import Path
from typing import Any

import torch
from lerobot.policies.vqbet.configuration_vqbet import VQBeTConfig
from lerobot.policies.vqbet.modeling_vqbet import VQBeTPolicy
from torch import Tensor

from tiny.family import Family, hooked, own_forward
from tiny.world import CAMERAS, input_features, output_features, save

OBSERVED, QUERIES, CHUNK = 2, 3, 4


def policy(**settings: Any) -> VQBeTPolicy:
    torch.manual_seed(0)
    made = VQBeTPolicy(
        VQBeTConfig(
            device="cpu",
            push_to_hub=False,
            input_features=input_features(cameras=1),
            output_features=output_features(),
            pretrained_backbone_weights=None,
            use_group_norm=True,
            crop_shape=None,
            n_obs_steps=OBSERVED,
            n_action_pred_token=QUERIES,
            action_chunk_size=CHUNK,
            spatial_softmax_num_keypoints=4,
            vqvae_n_embed=4,
            vqvae_embedding_dim=8,
            vqvae_enc_hidden_dim=16,
            gpt_block_size=16,
            gpt_input_dim=16,
            gpt_output_dim=16,
            gpt_hidden_dim=16,
            gpt_n_layer=2,
            gpt_n_head=2,
            **settings,
        )
    )
    # What LeRobot does after the first phase of training, in which only the codes are learnt.
    quantizer = made.vqbet.action_head.vqvae_model
    quantizer.discretized.fill_(True)
    quantizer.vq_layer.freeze_codebook.fill_(True)
    return made


def make(folder: Path) -> Path:
    return save(folder, policy())


# Image, state and query of the first step, the same of the second, two more queries.
_BY_KIND = [0, 3, 1, 4, 2, 5, 6, 7]


def _reference(policy: Any, batch: dict[str, Any], _stack: str) -> dict[int, Tensor]:
    names = [f"vqbet.policy.transformer.h.{i}" for i in range(2)]
    seen = hooked(policy, names, own_forward(policy, batch))
    return {layer: states[:, _BY_KIND] for layer, states in seen.items()}


VQBET = Family(
    name="vqbet",
    camera=CAMERAS[0],
    make=make,
    reference=_reference,
    reached={"gpt": ("vqbet.rgb_encoder", "vqbet.state_projector", "vqbet.policy.transformer.h")},
    untouched={
        "gpt": ("vqbet.policy.lm_head", "vqbet.policy.transformer.ln_f", "vqbet.action_head")
    },
)
