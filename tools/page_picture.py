#!/usr/bin/env python3
"""Writes docs/pictures/page.png, the page of a small block, by Chromium: `.venv/bin/python tools/page_picture.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import browser
import meshfuse as mf
from meshfuse.report.page import page

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "page.png"


def block() -> mf.FusionDefinition:
    """Attention's first product, statistics, and an MLP whose second product works in chunks."""
    mesh = mf.DeviceMesh((2, 8), ("dp", "tp"), links="dgx-h100")
    half = mf.DataType.BFloat16
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 4096, 4096], name="x", dtype=half)
        wq = fd.define_tensor([4096, 4096], name="attn.q", dtype=half)
        up = fd.define_tensor([16384, 4096], name="mlp.up", dtype=half)
        down = fd.define_tensor([4096, 16384], name="mlp.down", dtype=half)
        q = fd.ops.linear(x, wq)
        h = fd.ops.relu(fd.ops.linear(q, up))
        y = fd.ops.linear(h, down)
        var, mean = fd.ops.var_mean(fd.ops.cast(q, mf.DataType.Float), [2])
        for made in (y, var, mean):
            fd.add_output(made)
        once = fd.ops.relu(fd.define_tensor([4096], name="scale"))
        fd.add_output(once)
        fd.mesh_split(once, mesh, ["dp"])
        fd.mesh_split(x, mesh, ["dp", "tp", None])
        fd.mesh_split(wq, mesh, [[mf.Split(2, "tp", 4)], None])
        fd.mesh_split(up, mesh, ["tp", None], stationary=True)
        fd.mesh_split(down, mesh, [None, "tp"], stationary=True)
        fd.overlap(y, 4)
    return fd


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page([block().compile()], "block.py", alternatives=False))
        browser.picture(path, PICTURE, 1240, 760)
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
