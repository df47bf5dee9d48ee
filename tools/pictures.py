#!/usr/bin/env python3
"""Writes the pictures of the documentation, docs/pictures/*.svg: `.venv/bin/python tools/pictures.py`."""

from __future__ import annotations

from pathlib import Path

import meshfuse as mf
from meshfuse.sharding.picture import picture_of

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def pictures() -> dict[str, str]:
    """SVG by file name: tensors as the examples of the same names place them."""
    line, grid = mf.DeviceMesh((4,), ("tp",)), mf.DeviceMesh((2, 2), ("dp", "tp"))
    wide = mf.DeviceMesh((2, 4), ("dp", "tp"))
    hosts = mf.DeviceMesh((2, 2), ("host", "gpu"))
    tp, dp, half = mf.Split(4, "tp"), mf.Split(2, "dp"), mf.Split(2, "tp")
    drawn = {
        "tutorial": (line, [(tp,), ()], [6, 8], "six rows on four ranks"),
        "gpt": (grid, [(half,), ()], [1024, 256], "h0.mlp.up"),
        "llama": (grid, [(half,), (dp,)], [256, 96], "up_proj.weight with fsdp"),
        "auto": (hosts, [(mf.Split(2, "host"), mf.Split(2, "gpu")), ()], [16, 64], "input_ids"),
        "session": (line, [(), (tp,)], [64, 256], "down"),
        "thunder_tp": (mf.DeviceMesh((2,), ("tp",)), [(mf.Split(3), half), ()], [192, 64], "qkv, three weights in one"),
        "notebook": (wide, [(dp,), (tp,)], [6, 128], "y"),
    }
    return {
        f"{name}.svg": picture_of(mf.Sharding.make(mesh, dims, shape), shape, f"{title} {shape}").svg() + "\n"
        for name, (mesh, dims, shape, title) in drawn.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
    print(f"wrote {len(pictures())} pictures to {FOLDER}")
