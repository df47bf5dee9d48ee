"""The machines of a job, as a file says them: their addresses, their workers, and how fast their links are."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .argument_checks import as_int
from .costs import MACHINES, Link, Machine
from .default_machine import default_machine
from .errors import ArgumentError, SourceLine, caller_line, located, shown, user_error
from .mesh import DeviceMesh

_PORT = 5000
_EXAMPLE = '{"hosts": [{"address": "10.0.0.1", "workers": 8}], "port": 5000}'


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its address, how many workers run there, and the numbers of their GPUs (none for CPU workers)."""

    address: str
    workers: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines with equally many workers each. The first has the controller, which listens at its address and `port`.

    Workers are numbered host by host. machine: links and rates; None for the default ones.
    """

    hosts: tuple[Host, ...]
    port: int = _PORT
    machine: Machine | None = None

    @property
    def per_host(self) -> int:
        """Workers of each machine."""
        return self.hosts[0].workers

    @property
    def workers(self) -> int:
        """Workers in all."""
        return sum(host.workers for host in self.hosts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a file in meshfuse's form or in TePDist's.

            {"hosts": [{"address": "10.0.0.1", "workers": 8, "gpus": [0, 1, ...]}, ...], "port": 5000,
             "machine": "dgx-h100"}
            {"master": {"ip": "10.0.0.1", "port": 2222, "gpu_ids": "0,1"}, "workers": [{"ip": ..., "gpu_ids": ...}]}

        A machine is one of `meshfuse.costs.MACHINES`, or {"inside": [bytes per second, seconds], "between": [...],
        "flops": ..., "memory": ...}. Raises ArgumentError for other files.
        """
        line = caller_line()
        try:
            with open(path, encoding="utf-8") as file:
                told = json.load(file)
        except (OSError, ValueError, TypeError) as error:
            raise user_error(f"cluster file {path}", str(error), f"JSON such as {_EXAMPLE}", "", line,
                             ArgumentError) from None  # fmt: skip
        return _Reader(str(path), line).read(told)

    def mesh(self, names: Sequence[str] = ("dp", "tp"), shape: Sequence[int] | None = None) -> DeviceMesh:
        """A mesh of all workers, host by host; its links are those inside of machines and between them.

        shape: sizes of the axes, one of which may be -1. None has the last axis run over the workers of a machine, the
        first over the machines, and those between of size 1; one axis runs over all workers.

        Raises ArgumentError for sizes that do not fit the number of workers, DefinitionError for wrong names.
        """
        line = caller_line()
        axes = [names] if isinstance(names, str) else list(names)
        sizes = self._sizes(len(axes)) if shape is None else self._filled(list(shape), line)
        if len(sizes) != len(axes) or math.prod(sizes) != self.workers:
            raise user_error("a mesh of a cluster", f"shape {tuple(sizes)} with names {shown(axes)}",
                             f"one size for each name, for {self.workers} workers in all", "", line,
                             ArgumentError)  # fmt: skip
        machine = dataclasses.replace(self.machine or default_machine(), host=self.per_host)
        with located(line):
            return DeviceMesh(tuple(sizes), axes, links=machine)

    def _sizes(self, count: int) -> list[int]:
        if count == 1:
            return [self.workers]
        return [len(self.hosts), *[1] * (count - 2), self.per_host]

    def _filled(self, sizes: list[Any], line: SourceLine) -> list[int]:
        """The sizes, with what is left in the place of -1."""
        numbers = [as_int(size) for size in sizes]
        known = math.prod(n for n in numbers if n is not None and n != -1)
        found = [self.workers // known if n == -1 and known else n for n in numbers]
        if None in numbers or numbers.count(-1) > 1 or any(n is None or n < 1 for n in found):
            raise user_error("a mesh of a cluster", f"shape {shown(sizes)}", "sizes above 0, one of them -1 at most",
                             "", line, ArgumentError)  # fmt: skip
        return [n for n in found if n is not None]


class _Reader:
    """Reads what a file says, or raises ArgumentError with its name."""

    def __init__(self, path: str, line: SourceLine):
        self._path, self._line = path, line

    def read(self, told: Any) -> Cluster:
        if isinstance(told, Mapping) and "master" in told:
            hosts, port = self._hosts_of_tepdist(told), told["master"].get("port", _PORT)
        elif isinstance(told, Mapping) and isinstance(told.get("hosts"), list) and told["hosts"]:
            hosts, port = [self._host(entry, "address", "gpus") for entry in told["hosts"]], told.get("port", _PORT)
        else:
            raise self._wrong(shown(told), f'"hosts" or "master", as in {_EXAMPLE}')
        counts = sorted({host.workers for host in hosts})
        if len(counts) > 1:
            raise self._wrong(f"hosts of {' and '.join(map(str, counts))} workers", "equally many on each")
        number = as_int(int(port)) if isinstance(port, str) and port.isdecimal() else as_int(port)
        if number is None or not 0 <= number < 65535:
            raise self._wrong(f"port {shown(port)}", "a number below 65535")
        return Cluster(tuple(hosts), number, self._machine(told.get("machine")))

    def _hosts_of_tepdist(self, told: Mapping[str, Any]) -> list[Host]:
        """The master's workers come first; a master without GPUs must be the machine of the first workers."""
        master, others = told["master"], told.get("workers", [])
        if not isinstance(master, Mapping) or not isinstance(others, list):
            raise self._wrong(shown(told), '"master" with ip, port and gpu_ids, and a list "workers" of the like')
        hosts = [self._host(entry, "ip", "gpu_ids") for entry in others]
        if self._numbers(master.get("gpu_ids", [])):
            return [self._host(master, "ip", "gpu_ids"), *hosts]
        if not hosts or hosts[0].address != master.get("ip"):
            raise self._wrong("a master without gpu_ids", "some, or the first of the workers at the master's ip")
        return hosts

    def _host(self, entry: Any, address: str, gpus: str) -> Host:
        if not isinstance(entry, Mapping) or not isinstance(entry.get(address), str) or not entry[address]:
            raise self._wrong(shown(entry), f'"{address}" of each host')
        numbers = self._numbers(entry.get(gpus, []))
        workers = as_int(entry.get("workers", len(numbers)))
        if not workers or not 0 < workers <= 4096 or len(numbers) not in (0, workers):
            raise self._wrong(shown(dict(entry)), f'"workers" from 1 to 4096, or one number in "{gpus}" for each')
        return Host(entry[address], workers, numbers)

    def _numbers(self, told: Any) -> tuple[int, ...]:
        """Numbers of GPUs: a list, or a text such as "0,1"."""
        parts = told.split(",") if isinstance(told, str) else told
        parts = [part for part in parts if part != ""] if isinstance(parts, list) else [None]
        found = [int(p) if isinstance(p, str) and p.strip().isdecimal() else as_int(p) for p in parts]
        if any(n is None or n < 0 for n in found) or len({*found}) < len(found):
            raise self._wrong(f"GPUs {shown(told)}", 'different numbers, as [0, 1] or "0,1"')
        return tuple(n for n in found if n is not None)

    def _machine(self, told: Any) -> Machine | None:
        named = MACHINES.get(told) if isinstance(told, str) else None
        if told is None or named is not None:
            return named
        try:
            given: dict[str, Any] = dict(told) if isinstance(told, Mapping) else {}
            links = {name: Link(*given.pop(name)) for name in ("inside", "between")}
            return Machine(**links, host=1, **given)
        except (KeyError, TypeError, ValueError):
            needed = f"one of {', '.join(MACHINES)}, or inside, between, flops and memory"
            raise self._wrong(f"machine {shown(told)}", needed) from None

    def _wrong(self, found: str, needed: str) -> ArgumentError:
        error = user_error(f"cluster file {self._path}", found, needed, "", self._line, ArgumentError)
        assert isinstance(error, ArgumentError)
        return error
