"""Builds a cache: dataset -> processor -> teacher -> pooling -> writer.

build             `build_cache`, the whole of it
anchor_selection  which frames become anchors
prompts           instructions that replace those of the dataset
row_sources       frames as they are, varied, or drawn from statistics
recorded_rows     rows from frames that the teacher saw when it acted
expected_size     the size of a cache before it is built, and what makes it smaller
recipe            what is kept of the teacher, with the policy family's defaults
teacher           runs the teacher and turns the results into arrays
"""

from craftcli.cache.build.build import BuildPlan, BuildReport, build_cache
from craftcli.cache.build.recipe import Recipe, resolve_recipe

__all__ = ["BuildPlan", "BuildReport", "Recipe", "build_cache", "resolve_recipe"]
