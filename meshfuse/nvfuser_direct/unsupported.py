"""Names of nvfuser_direct that meshfuse lacks, each with the reason and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

# Names that are not there.
ABSENT: Mapping[str, str] = {
    "benchmark_utils.cupti_call_safe": "a call of the package cupti-python, which torch's profiler makes unnecessary",
    "benchmark_utils.demangle_kernel_name": "torch's profiler names kernels as they are written",
    "nvfuser_direct_version.cmp_method": "a decorator inside of nvFuser's Version; ours compares by itself",
}

# Names that are there and raise DefinitionError when they are used.
REFUSED: Mapping[str, str] = {
    "idm.IdModel": "an analysis of loop axes in kernels, which are torch's; factor rules tell which dims go together",
    "idm.ValGraph": "a part of idm.IdModel",
    "idm.DisjointValSets": "a part of idm.IdModel",
    "Split.inner": "loop axes are no values of ops here: nothing is a Split",
    "Split.outer": "as Split.inner",
    "Merge.inner": "as Split.inner",
    "Merge.outer": "as Split.inner",
    "IterDomain.definition": "as Split.inner: ask the tensor for its op",
    "IterDomain.uses": "as Split.inner",
}
