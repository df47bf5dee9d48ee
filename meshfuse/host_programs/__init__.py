"""Host programs that a user writes or edits: kernels and communication, interleaved by hand, checked as meshfuse's own.

`HostProgramBuilder` writes the program of one rank, `HostPrograms` checks those of all ranks and runs them.
"""

from __future__ import annotations

from .builder import Buffer as Buffer
from .builder import HostProgramBuilder as HostProgramBuilder
from .builder import Pending as Pending
from .running import HostPrograms as HostPrograms

__all__ = ["Buffer", "HostProgramBuilder", "HostPrograms", "Pending"]
