"""The commands of `craft cache`, one module each.

group             the commands together, as `craft cache`
build             run the teacher over anchor samples and store what it computes
inspect           show what a cache holds, check it, draw it (its tables: inspect_tables)
import_prototype  turn a prototype's folder of .pt shards into a cache
merge             join caches of the same teacher and settings
export            write a cache as one safetensors file
files             options shared by the commands that write a file
"""
