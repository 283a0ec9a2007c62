"""Policy families and everything else that touches LeRobot."""
