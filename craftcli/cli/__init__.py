"""The command line: one module a command, and the only package that imports Typer and prints.

app             the `craft` command and its sub-commands
cache/          `craft cache build`, `inspect`, `import`, `merge` and `export`
train           `craft train`
dryrun          `craft dryrun`
inspect         `craft inspect`
eval            `craft eval`; evaluation_report: how its result is printed
compare         `craft compare`
merge           `craft merge`
info            `craft info`
early_checks    mistakes that are found before anything heavy is imported
disk_space      whether a disk has room for what will be written
os_errors       a full disk, no permission, lost workers
options         commands from settings classes, and errors as messages
help            the layout of `--help`
lerobot_options what to write for options of `lerobot-train`
settings_table  the table of settings before a run
verdict         whether a run kept to its budget
next_steps      the command that usually follows another one
plain_progress  progress as lines, where there is no terminal
encoding        letters that a terminal cannot show
output          prints to stdout and stderr
quiet           silences other libraries
recording       lets a policy act in environments, for anchors
"""
