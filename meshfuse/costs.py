"""What communication and computation cost: links of mesh axes, collectives over them, and figures of common machines.

A link sends a message of b bytes in latency + b / bandwidth seconds (Hockney's model, 1994). A collective takes the
time of the fastest of its known forms, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), and for short all-to-alls Bruck et al. (1997). Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import line_in_script, shown, user_error


@dataclass(frozen=True, slots=True)
class Link:
    """What a rank sends to its neighbours along a mesh axis: bytes per second in one direction, seconds to start.

    Raises DefinitionError for a bandwidth that is not positive and finite, or a latency that is negative.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        line = line_in_script(sys._getframe(2))  # __init__ is text of dataclasses'
        if not is_rate(self.bandwidth):
            raise user_error(
                "a link's bandwidth", shown(self.bandwidth), f"bytes per second, {RATES}",
                "Link(450e9, 5e-6) is NVLink.", line,
            )  # fmt: skip
        if not _is_number(self.latency) or not 0 <= self.latency <= FASTEST:
            raise user_error(
                "a link's latency", shown(self.latency), f"seconds, 0 to {FASTEST:g}", "Link(450e9, 5e-6) is NVLink.",
                line,
            )  # fmt: skip
        # Links of equal numbers are equal, and so are their texts, whatever the numbers' types.
        object.__setattr__(self, "bandwidth", float(self.bandwidth))
        object.__setattr__(self, "latency", float(self.latency) or 0.0)

    def seconds(self, steps: float, wire: float) -> float:
        """The time of `steps` messages one after the other that have `wire` bytes together."""
        return steps * self.latency + wire / self.bandwidth

    @classmethod
    def bytes_only(cls) -> Link:
        """A link on which bytes alone decide: a message takes next to no time to start (as a tenth of a byte)."""
        return BYTES_ONLY

    @property
    def is_bytes_only(self) -> bool:
        """Whether messages take so little time to start that many small ones are no dearer than a large one."""
        return self.latency <= BYTES_ONLY.latency

    def __repr__(self) -> str:
        return f"Link({plain(self.bandwidth)}, {plain(self.latency)})"


def plain(number: float) -> str:
    """A number as short text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


# Rates that are told apart from nothing and from all others, whatever is divided by them.
SLOWEST, FASTEST = 1e-30, 1e30
RATES = f"more than 0 ({SLOWEST:g} to {FASTEST:g})"


def is_rate(value: object) -> bool:
    """Whether a value can be a number of something per second: positive and finite."""
    return _is_number(value) and SLOWEST <= value <= FASTEST  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


BYTES_ONLY = Link(50e9, 2e-12)
# A rank's rates where bytes alone decide: a byte on the link costs as much as a thousand operations, memory nothing.
BYTES_ONLY_FLOPS, BYTES_ONLY_MEMORY = 50e12, FASTEST


# A rank of which nothing is said, as its own program is scheduled: operations and bytes of memory per second, and its
# link. Of a fast GPU: it decides what a communication can hide behind where bytes alone decide the plan.
DEVICE_FLOPS, DEVICE_MEMORY = 300e12, 1.5e12
DEVICE_LINK = Link(50e9, 4e-6)


def slowest(links: Iterable[Link]) -> Link:
    """The link of a collective over several axes: the least of their bandwidths, the greatest of their latencies."""
    found = list(dict.fromkeys(links))
    return found[0] if len(found) == 1 else Link(min(k.bandwidth for k in found), max(k.latency for k in found))


# collectives ------------------------------------------------------------------------------------------------------


def _doublings(n: int) -> int:
    return (n - 1).bit_length()


class Form(NamedTuple):
    """A way to do a collective: how many messages a rank sends in turn, and how many of its tensor's bytes in all."""

    steps: int
    share: float


def all_gather_forms(n: int) -> tuple[Form, ...]:
    """Of the whole tensor: recursive doubling (Bruck's form where n is no power of two); a ring sends as much."""
    return (Form(_doublings(n), (n - 1) / n),)


def reduce_scatter_forms(n: int) -> tuple[Form, ...]:
    """Recursive halving."""
    return (Form(_doublings(n), (n - 1) / n),)


def all_reduce_forms(n: int) -> tuple[Form, ...]:
    """A reduce-scatter and an all-gather (Rabenseifner's form; a ring in more steps), or recursive doubling.

    The latter sends the whole tensor in each of half as many steps, which is faster for small ones.
    """
    return Form(2 * _doublings(n), 2 * (n - 1) / n), Form(_doublings(n), float(_doublings(n)))


def all_to_all_forms(n: int) -> tuple[Form, ...]:
    """One message to each (pairwise), or, faster for small tensors, Bruck's form: half of the tensor per step."""
    return Form(n - 1, (n - 1) / n), Form(_doublings(n), _doublings(n) / 2)


def _fastest(link: Link, forms: Iterable[Form], nbytes: float) -> float:
    return min([link.seconds(form.steps, form.share * nbytes) for form in forms])


def all_gather(link: Link, n: int, nbytes: float) -> float:
    """Seconds until each of n ranks has all of a tensor of `nbytes`, of which each has 1/n."""
    return _fastest(link, all_gather_forms(n), nbytes)


def reduce_scatter(link: Link, n: int, nbytes: float) -> float:
    """Seconds until each of n ranks has 1/n of the sum of their tensors of `nbytes` each."""
    return _fastest(link, reduce_scatter_forms(n), nbytes)


def all_reduce(link: Link, n: int, nbytes: float) -> float:
    """Seconds until n ranks have the sum of their tensors of `nbytes` each."""
    return _fastest(link, all_reduce_forms(n), nbytes)


def all_to_all(link: Link, n: int, nbytes: float) -> float:
    """Seconds for n ranks with `nbytes` each to send 1/n of it to every other."""
    return _fastest(link, all_to_all_forms(n), nbytes)


def exchange(link: Link, n: int, wire: float) -> float:
    """Seconds for each of n ranks to send `wire` bytes in all, in pieces of any sizes, to any of the others.

    As pairwise all-to-alls do: one step for each peer.
    """
    return link.seconds(n - 1, wire)


def permute(link: Link, nbytes: float) -> float:
    """Seconds for each rank to send `nbytes` to one other: a shift, or a message between meshes."""
    return link.seconds(1, nbytes)


def computation(flops: float, nbytes: float, rate: float, memory: float) -> float:
    """Seconds for one rank's operations and bytes of memory, at its peak rates: whichever takes longer.

    The roofline of Williams, Waterman and Patterson (2009). A kernel's start is the same however its work is split.
    """
    return max(flops / rate, nbytes / memory)


# machines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """The links and the peak rates of a kind of machine. Pass one as `links=` of a DeviceMesh.

    `inside` is the link between ranks of one host, `between` that between hosts. A host has `host` ranks: 0 to host - 1
    are on the first one, and so on. `flops` is a rank's dense bfloat16 operations per second, `memory` the bytes per
    second that it reads and writes. Raises DefinitionError for values that are none of these.
    """

    inside: Link
    between: Link
    host: int
    flops: float
    memory: float = 3.35e12

    def __post_init__(self) -> None:
        line = line_in_script(sys._getframe(2))  # __init__ is text of dataclasses'
        sized = isinstance(self.host, int) and not isinstance(self.host, bool) and self.host >= 1
        for wrong, name, needed in (
            (not isinstance(self.inside, Link), "inside", "a Link"),
            (not isinstance(self.between, Link), "between", "a Link"),
            (not sized, "host", "how many ranks a host has, 1 or more"),
            (not is_rate(self.flops), "flops", f"operations per second, {RATES}"),
            (not is_rate(self.memory), "memory", f"bytes per second, {RATES}"),
        ):
            if wrong:
                raise user_error(f"a machine's {name}", shown(getattr(self, name)), needed,
                                 "meshfuse.costs.MACHINES has examples.", line)  # fmt: skip

    def link(self, groups: Iterable[Sequence[int]]) -> Link:
        """The link of an axis along which these groups of ranks communicate."""
        within = all(len({rank // self.host for rank in group}) == 1 for group in groups)
        return self.inside if within else self.between


# Bandwidths are data sheets' figures for one direction; latencies are what a collective's step takes in practice.
# NVIDIA DGX H100 data sheet: NVLink 900 GB/s both ways per GPU; one ConnectX-7 of 400 Gb/s per GPU; 989 TFLOP/s;
# 3.35 TB/s of memory.
DGX_H100 = Machine(Link(450e9, 5e-6), Link(50e9, 15e-6), 8, 989e12, 3.35e12)
# NVIDIA DGX H200 data sheet: as the H100, with more and faster memory.
DGX_H200 = Machine(Link(450e9, 5e-6), Link(50e9, 15e-6), 8, 989e12, 4.8e12)
# NVIDIA DGX A100 data sheet: NVLink 600 GB/s both ways per GPU; one ConnectX-6 of 200 Gb/s per GPU; 312 TFLOP/s;
# 2.0 TB/s of memory.
DGX_A100 = Machine(Link(300e9, 5e-6), Link(25e9, 20e-6), 8, 312e12, 2.0e12)
# Google Cloud's page of TPU v5p: 1200 GB/s both ways per chip over the three axes of a torus, so 200 GB/s one way along
# each; 50 Gb/s per chip to other slices; 459 TFLOP/s; 2765 GB/s of memory. `host` is the largest slice.
TPU_V5P = Machine(Link(200e9, 1e-6), Link(6.25e9, 50e-6), 6144, 459e12, 2.765e12)
# Google Cloud's page of TPU v5e: 400 GB/s both ways per chip over two axes; 6.4 Tb/s for a pod of 256; 197 TFLOP/s;
# 819 GB/s of memory.
TPU_V5E = Machine(Link(100e9, 1e-6), Link(3.125e9, 50e-6), 256, 197e12, 0.819e12)
# Eight cards on PCI Express 4.0 x16 (31.5 GB/s one way, less what its packets take) and 100 Gb/s Ethernet; the rates
# are of NVIDIA's L4 data sheet, dense bfloat16 and 300 GB/s.
PCIE_BOX = Machine(Link(25e9, 10e-6), Link(12.5e9, 30e-6), 8, 121e12, 0.3e12)
# Processes of one laptop over gloo's loopback, as `meshfuse doctor --links` measures them, and a core or two each.
LAPTOP = Machine(Link(1e9, 100e-6), Link(0.1e9, 500e-6), 64, 50e9, 10e9)
# No machine: what is sent alone decides. (Nothing is said of computation but what keeps it from being repeated.)
BYTES = Machine(BYTES_ONLY, BYTES_ONLY, 8, BYTES_ONLY_FLOPS, BYTES_ONLY_MEMORY)

MACHINES: Mapping[str, Machine] = {
    "dgx-h100": DGX_H100, "dgx-h200": DGX_H200, "dgx-a100": DGX_A100, "tpu-v5p": TPU_V5P, "tpu-v5e": TPU_V5E,
    "pcie": PCIE_BOX, "laptop": LAPTOP, "bytes": BYTES,
}  # fmt: skip
