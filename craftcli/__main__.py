"""`python -m craftcli`, which torchrun needs, is the same as `craft`."""

from craftcli.cli.app import main

main()
