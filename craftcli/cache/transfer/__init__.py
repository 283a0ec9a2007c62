"""Caches from and to other files.

join              several caches of one teacher as one (`craft cache merge`)
export            a cache as one safetensors file
prototype_import  the cache folder of a CRaFT prototype as a cache
prototype_files, prototype_targets
                  how the prototypes stored their rows and targets
rechunk           cuts rows of any source into the chunks of a cache
"""

from craftcli.cache.transfer.export import ExportPlan, ExportReport, export_cache, plan_export
from craftcli.cache.transfer.join import JoinPlan, JoinReport, join_caches, plan_join
from craftcli.cache.transfer.prototype_import import (
    ImportReport,
    PrototypeContents,
    import_prototype,
    survey_prototype,
)

__all__ = [
    "ExportPlan",
    "ExportReport",
    "ImportReport",
    "JoinPlan",
    "JoinReport",
    "PrototypeContents",
    "export_cache",
    "import_prototype",
    "join_caches",
    "plan_export",
    "plan_join",
    "survey_prototype",
]
