"""Faults of disks and processes, done on purpose, and what became of them.

- `tally`: the outcomes, counted by the kind of fault
- `artefacts`: small real things to damage: a run, a cache, a sweep, a LoRA run with its data
- `files`: flipped bits, cut, emptied, deleted and swapped files
- `readers`: what craft reads of an artefact, to compare it with the undisturbed one
- `moments`: something that happens at the n-th time that a process writes below a folder
- `kills`: trainings that are killed or interrupted, and resumed
- `commands`: merges, evaluations and sweeps that are killed, and done again
- `full_disk`: trainings, builds and merges on a disk that is full
"""
