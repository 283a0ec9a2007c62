"""Read a craft cache with zarr and numpy alone: no craft, no torch.

uv run craft cache build --output anchors.zarr
uv run python examples/read_cache/read.py anchors.zarr
"""

import sys
import warnings

import numpy as np
import zarr

# Packed arrays are read chunk by chunk, as all others of a cache are.
warnings.filterwarnings("ignore", "Combining a `sharding_indexed` codec")
path = sys.argv[1] if len(sys.argv) > 1 else "anchors.zarr"
cache = zarr.open_group(path, mode="r")
manifest = cache.attrs["craft"]
valid = cache["valid"][:]

print(f"{manifest['rows']} rows of {manifest['teacher']['policy_type']}, {manifest['pooling']}")
for layer in manifest["layers"]:
    array = cache[f"hidden/{manifest['stack']}.{layer}"]
    states = array[:]
    if array.attrs.get("craft_dtype") == "bfloat16":  # kept as the upper half of a float32
        states = (states.astype(np.uint32) << 16).view(np.float32)
    kept = states[cache["hidden_mask"][:] & valid[:, None]].astype(np.float64)
    norms = np.linalg.norm(kept, axis=-1)
    print(f"layer {layer}: {states.shape} {array.dtype}, mean norm {norms.mean():.3f}")
counts = np.bincount(cache["index/task"][:][valid], minlength=len(cache.attrs["tasks"]))
for task, count in zip(cache.attrs["tasks"], counts):
    print(f"{count} rows of {task!r}")
