"""A table seen by a camera: five blocks and a hand at free places, and an instruction.

An episode succeeds when the hand touches the block that the instruction names. The same wish has
several wordings. One of them is never used in data or anchors: it tells whether a kept skill is
more than the sentences that it was held by.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from numpy.typing import NDArray

from craftcli.evaluation.simulators.base import Environment, StepResult

CAMERA, STATE, ACTION = "observation.images.top", "observation.state", "action"
PX, BLOCK_PX = 48, 9
FPS = 5
EPISODE_STEPS = 16
STRIDE = 0.12
"""The farthest that the hand moves in a step; the table is 1 wide."""
NEAR = 0.08
"""The hand touches a block from this distance on."""
APART = 0.22
"""Blocks lie at least this far from each other."""
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "yellow": (255, 255, 0),
    "blue": (0, 0, 255),
    "purple": (255, 0, 255),
}
"""Equally far from the grey of the table. With a bright yellow on white and darker others, the
policy learned yellow at once and could not tell red from green after 7000 steps."""
GREY, WHITE = 128, 255
OLD, NEW, LATER = ("red", "green", "yellow"), "blue", "purple"
"""The last is asked for only after the new one was learned."""
WORDINGS = (
    "reach the {} block",
    "go to the {} cube",
    "touch the {} brick",
    "move onto the {} one",
)
UNHEARD = "go to the {} block"
"""A wording of known words that is in no data."""

type Point = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where blocks and hand are, in 0..1 along each side."""

    blocks: dict[str, Point]
    hand: Point

    def way(self, colour: str) -> Point:
        """From the hand to the block of that colour."""
        found: Point = self.blocks[colour] - self.hand
        return found

    def touches(self, colour: str) -> bool:
        """Whether the hand touches that block."""
        return bool(np.hypot(*self.way(colour)) < NEAR)

    def moved(self, step: NDArray[Any]) -> "Scene":
        """The hand moved by a step, at most one stride long."""
        step = np.nan_to_num(np.asarray(step, dtype=np.float64))
        step = step * min(1.0, STRIDE / max(float(np.hypot(*step)), 1e-9))
        return Scene(blocks=self.blocks, hand=np.clip(self.hand + step, 0, 1))


def sample_scene(rng: np.random.Generator) -> Scene:
    """Blocks apart from each other, and a hand that touches none of them."""
    places: list[Point] = []
    while len(places) < len(COLOURS) + 1:
        place = rng.uniform(0.1, 0.9, 2)
        if all(np.hypot(*(place - other)) >= APART for other in places):
            places.append(place)
        elif rng.uniform() < 0.01:
            # The first ones may leave no room.
            places.clear()
    return Scene(blocks=dict(zip(COLOURS, places[:-1], strict=True)), hand=places[-1])


def expert_action(scene: Scene, colour: str) -> NDArray[np.float32]:
    """A stride towards the block, or what is left of the way."""
    way = scene.way(colour)
    return (way * min(1.0, STRIDE / max(float(np.hypot(*way)), 1e-9))).astype(np.float32)


def expert_chunk(scene: Scene, colour: str, length: int) -> NDArray[np.float32]:
    """The expert's next actions."""
    actions = []
    for _ in range(length):
        actions.append(expert_action(scene, colour))
        scene = scene.moved(actions[-1])
    return np.stack(actions)


_Y, _X = np.mgrid[:PX, :PX] + 0.5


def render(scene: Scene, *, faded: float = 0.0) -> NDArray[np.uint8]:
    """What the camera sees, [48, 48, 3] uint8; blocks may be faded towards the table's grey."""
    image = np.full((PX, PX, 3), GREY, dtype=np.uint8)
    for colour, (x, y) in scene.blocks.items():
        half = BLOCK_PX / 2
        paint = (1 - faded) * np.array(COLOURS[colour]) + faded * GREY
        image[(abs(_X - x * PX) < half) & (abs(_Y - y * PX) < half)] = paint.round()
    radius = np.hypot(_X - scene.hand[0] * PX, _Y - scene.hand[1] * PX)
    image[(radius < 4.5) & (radius > 1.8)] = WHITE
    return image


class TableSimulation:
    """The table with one instruction."""

    def __init__(self, colour: str, wordings: Sequence[str], *, faded: float = 0.0) -> None:
        self._colour, self._wordings, self._faded = colour, wordings, faded

    def reset(self, seed: int) -> StepResult:
        """Draw the scene and the wording of that seed."""
        rng = np.random.default_rng(seed)
        self._scene, self._steps = sample_scene(rng), 0
        self._task = str(rng.choice(self._wordings)).format(self._colour)
        return self._result()

    def step(self, action: NDArray[Any]) -> StepResult:
        """Move the hand."""
        self._scene = self._scene.moved(action)
        self._steps += 1
        return self._result()

    def close(self) -> None:
        """Do nothing: the table holds no resources."""

    def _result(self) -> StepResult:
        success = self._scene.touches(self._colour)
        seen = {
            CAMERA: render(self._scene, faded=self._faded),
            STATE: self._scene.hand.astype(np.float32),
            "task": self._task,
        }
        over = success or self._steps >= EPISODE_STEPS
        return StepResult(observation=seen, success=success, over=over)


def environment(
    colour: str, wordings: Sequence[str] = WORDINGS, *, faded: float = 0.0
) -> Environment:
    """The table as `rollout` takes it."""
    make = partial(TableSimulation, colour, wordings, faded=faded)
    return Environment(name=f"table:{colour}", make=make, max_steps=EPISODE_STEPS)


def write_dataset(root: Path, colours: Sequence[str], *, episodes: int, seed: int) -> Path:
    """Record the expert with LeRobot's own writer; what is there is kept.

    Where the blocks lie in every frame, which no policy is told, goes into a file beside the data.
    """
    if root.is_dir():
        return root
    partial_root = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial_root, ignore_errors=True)
    image = {"dtype": "image", "shape": (PX, PX, 3), "names": ["height", "width", "channels"]}
    pair = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    data = LeRobotDataset.create(
        root.name,
        fps=FPS,
        features={CAMERA: image, STATE: pair, ACTION: pair},
        root=partial_root,
        use_videos=False,
    )
    rng = np.random.default_rng(seed)
    places: list[list[Point]] = []
    for episode in range(episodes):
        colour = colours[episode % len(colours)]
        task = str(rng.choice(WORDINGS)).format(colour)
        scene, touched = sample_scene(rng), False
        while not touched:
            touched = scene.touches(colour)
            action = expert_action(scene, colour)
            state = scene.hand.astype(np.float32)
            data.add_frame({CAMERA: render(scene), STATE: state, ACTION: action, "task": task})
            places.append(list(scene.blocks.values()))
            scene = scene.moved(action)
        data.save_episode()
    data.finalize()
    # The recorder leaves loose image files behind that are already packed into parquet.
    shutil.rmtree(partial_root / "images", ignore_errors=True)
    np.save(places_file(root), np.asarray(places))
    partial_root.rename(root)
    return root


def places_file(root: Path) -> Path:
    """Where the blocks of a dataset lie: [frames, colours, 2]."""
    return root.with_name(f"{root.name}_blocks.npy")
