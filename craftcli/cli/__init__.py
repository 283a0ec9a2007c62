"""The command line: the only place with typer and terminal output."""
