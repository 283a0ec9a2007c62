"""A world of one's own: importing it registers its type, `table`, with LeRobot and Gymnasium."""

from lerobot_env_table.configuration import TableConfig
from lerobot_env_table.world import TableWorld

__all__ = ["TableConfig", "TableWorld"]
