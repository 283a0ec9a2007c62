"""Runs `craft` as `python -m craftcli`, which torchrun needs."""

from craftcli.cli.app import main

main()
