"""What a GPU and its host take for a segment, roughly: enough to tell which of them waits for the other."""

from __future__ import annotations

from ..lowering.segments import Segment, SegmentedDefinition
from ..placement.roofline import local_cost
from ..resharding import Compute

# A GPU's operations and bytes per second, and the host's seconds for a product in torch and what is around it.
_FLOPS, _BANDWIDTH, _HOST = 5e14, 3e12, 25e-6


def is_product(segmented: SegmentedDefinition, compute: Compute) -> bool:
    """Whether libraries compute an op: products and attention."""
    return segmented.resharded.graph.nodes[compute.node].call.op.uses_library


def keeps_a_gpu_busy(segmented: SegmentedDefinition, segment: Segment) -> bool:
    """Whether a segment's products take a GPU longer than it takes the host to start each of them from Python.

    A segment without products has none to be started.
    """
    products = [c for c in segment.computes if is_product(segmented, c)]
    nodes = segmented.resharded.graph.nodes
    costs = [local_cost(nodes[c.node].call, c.placement) for c in products]
    return sum(flops / _FLOPS + nbytes / _BANDWIDTH for flops, nbytes in costs) >= _HOST * len(products)
