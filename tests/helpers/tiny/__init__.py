"""Tiny real policies of every family, written by LeRobot itself, for one suite over all of them."""

from tiny.act import ACT, STATE_ONLY
from tiny.diffusion import DIFFUSION
from tiny.family import Family
from tiny.groot import GROOT
from tiny.molmoact2 import MOLMOACT2
from tiny.multi_task_dit import DIFFUSED, FLOWED
from tiny.pi0 import PI0
from tiny.pi0_fast import PI0_FAST
from tiny.pi05 import PI05
from tiny.smolvla import SMOLVLA
from tiny.vqbet import VQBET
from tiny.xvla import XVLA

FAMILIES: tuple[Family, ...] = (
    ACT,
    STATE_ONLY,
    DIFFUSION,
    VQBET,
    DIFFUSED,
    FLOWED,
    SMOLVLA,
    PI05,
    PI0,
    PI0_FAST,
    XVLA,
    GROOT,
    MOLMOACT2,
)
