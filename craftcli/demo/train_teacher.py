"""Train the demo's teacher again: `python -m craftcli.demo.train_teacher FOLDER`, ten minutes.

It learns to reach the red, the green and the yellow block from a scripted expert, with the policy's
own loss. It never sees the instruction for the blue block.
"""

import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER, TinyPI0FastConfig
from craftcli.demo.datasets import CAMERA, demo_stats
from craftcli.demo.modeling_tiny_pi0_fast import TinyPI0FastPolicy
from craftcli.demo.tokenizers import (
    build_action_tokenizer,
    build_text_tokenizer,
    tokenizer_folders,
)
from craftcli.demo.world import (
    BOARD,
    COLOURS,
    IMAGE_PX,
    OLD_COLOURS,
    Scene,
    expert_action,
    instruction,
    move,
    render,
    sample_scene,
)

FAST_SCALE = 4.0
FAST_VOCAB = 1
"""No byte pairs: one token for each coefficient, so that columns and rows are learned apart."""


def write_tokenizers(folder: Path, horizon: int) -> None:
    """Build both tokenizers and save them in the folders that the policy's configuration names."""
    text_folder, action_folder = tokenizer_folders(folder)
    words = [word for colour in COLOURS for word in instruction(colour).split()]
    build_text_tokenizer(words).save_pretrained(text_folder)
    reach = range(1 - BOARD, BOARD)
    chunks = np.stack(
        [straight_path(dx, dy, horizon) for dx, dy in itertools.product(reach, reach)]
    )
    # Every path four times: byte-pair encoding joins only pairs that it saw more than once.
    tokenizer = build_action_tokenizer(
        np.concatenate([chunks] * 4), scale=FAST_SCALE, vocab_size=FAST_VOCAB
    )
    tokenizer.save_pretrained(action_folder)


def straight_path(dx: int, dy: int, horizon: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The expert's actions for a block `dx` columns and `dy` rows away."""
    left = np.array([dx, dy])
    steps = []
    for _ in range(horizon):
        steps.append(np.sign(left))
        left = left - steps[-1]
    return np.stack(steps).astype(np.float32)


def sample_batch(rng: np.random.Generator, size: int, horizon: int) -> dict[str, Any]:
    """New scenes at random points of the expert's path, in the form of a LeRobotDataset's batch."""
    images, states, actions, tasks = [], [], [], []
    for _ in range(size):
        scene, colour = sample_scene(rng), OLD_COLOURS[rng.integers(len(OLD_COLOURS))]
        for _ in range(rng.integers(BOARD)):
            scene = move(scene, expert_action(scene, colour))
        images.append(torch.from_numpy(render(scene)).permute(2, 0, 1).float() / 255)
        states.append(torch.tensor(scene.hand, dtype=torch.float32))
        actions.append(torch.from_numpy(_expert_chunk(scene, colour, horizon)))
        tasks.append(instruction(colour))
    return {
        CAMERA: torch.stack(images),
        "observation.state": torch.stack(states),
        "action": torch.stack(actions),
        "task": tasks,
    }


def _expert_chunk(scene: Scene, colour: str, horizon: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    (bx, by), (hx, hy) = scene.blocks[colour], scene.hand
    return straight_path(bx - hx, by - hy, horizon)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the new checkpoint.")],
    steps: int = 3000,
    batch_size: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
) -> None:
    """Train, and save the checkpoint in LeRobot's layout."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = TinyPI0FastConfig(device="cpu", push_to_hub=False)
    if not any(TEACHER_FOLDER.glob("*_tokenizer")):
        write_tokenizers(TEACHER_FOLDER, config.chunk_size)
    config.input_features = {
        CAMERA: PolicyFeature(type=FeatureType.VISUAL, shape=(3, IMAGE_PX, IMAGE_PX)),
        "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(2,)),
    }
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(2,))}
    policy = TinyPI0FastPolicy(config)
    preprocess, postprocess = make_pre_post_processors(config, dataset_stats=demo_stats())
    train(policy, preprocess, rng, steps=steps, batch_size=batch_size, lr=lr)
    for part in (policy, preprocess, postprocess):
        part.save_pretrained(folder)
    # The published files must not contain this machine's paths.
    for file in folder.glob("*.json"):
        file.write_text(file.read_text().replace(f"{TEACHER_FOLDER}/", ""))
    typer.echo(f"Wrote {folder}; to measure its success: craft eval {folder} --env demo")


def train(
    policy: Any,
    preprocess: Any,
    rng: np.random.Generator,
    *,
    steps: int,
    batch_size: int,
    lr: float,
) -> None:
    """Train with AdamW and one cycle of the learning rate, on scenes that never repeat."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    policy.train()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        loss, _ = policy(preprocess(sample_batch(rng, batch_size, policy.config.chunk_size)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            typer.echo(f"step {step}/{steps} loss={loss:.4f} {time.perf_counter() - started:.0f}s")


if __name__ == "__main__":
    typer.run(main)
