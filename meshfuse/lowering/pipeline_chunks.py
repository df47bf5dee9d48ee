"""Which statements go into loops over chunks, and how their tensors are cut (see `overlapped`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..graph import Stream
from ..mesh import STREAM, DeviceMesh
from ..ops.rules import FactorKind
from ..reshard.steps import StepKind, box_numel, restricted
from ..resharding import Compute, Reshard, ReshardedDefinition, Statement
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from .chunked_dims import ChunkedDim, Refused, chunked_dim, chunked_factor, of_shards
from .loop_drafts import LoopDraft, in_order, is_convex
from .overlapped import ChunkLoop, OverlappedDefinition, RingKind, statement_mesh

_CHUNKED = (
    StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER, StepKind.ALL_TO_ALL, StepKind.EXCHANGE,
)  # fmt: skip


def pipeline_chunks(resharded: ReshardedDefinition) -> OverlappedDefinition:
    """Put the statements around every tensor that has a stream into a loop, where that can be done."""
    if not resharded.graph.streams:
        return OverlappedDefinition(resharded, resharded.statements, {})
    builder = _LoopBuilder(resharded)
    builder.build()
    parts = builder.ordered()
    done = OverlappedDefinition(resharded, parts, builder.refused)
    done.verify()
    return done


class _LoopBuilder:
    """Makes a loop for each stream of the graph; `refused` says why there is none for a tensor.

    A loop begins with the ops that make or read the stream's tensor (`_ask`). Cutting that tensor cuts others
    (`_cut_ops`). Then the loop takes in the reshards around its ops (`_grow`) and, for nvFuser's streams, later
    products (`_follow`). Steps are known by their places, values by the place of their `maker` and of their `readers`.
    """

    def __init__(self, resharded: ReshardedDefinition):
        self.resharded, self.graph = resharded, resharded.graph
        self.statements = resharded.statements
        self.refused: dict[int, str] = {}
        self.drafts: list[LoopDraft] = []
        self.in_draft: dict[int, LoopDraft] = {}
        self.maker = {v: place for place, statement in enumerate(self.statements) for v in statement.outputs}
        self.readers: dict[int, list[int]] = {}
        self.values_of: dict[int, list[int]] = {}
        for value in resharded.values:
            self.values_of.setdefault(value.tensor, []).append(value.id)
        for place, statement in enumerate(self.statements):
            for v in statement.inputs:
                self.readers.setdefault(v, []).append(place)

    def build(self) -> None:
        for tensor, stream in self.graph.streams.items():
            try:
                self._ask(tensor, stream)
            except Refused as why:
                self.refused[tensor] = f"not chunked, {why}"

    # where a loop begins

    def _ask(self, tensor: int, stream: Stream) -> None:
        if any(tensor in draft.cuts for draft in self.drafts):
            return
        if stream.chunks == 1 and stream.layout is None:
            raise Refused("as one chunk is the whole")
        draft = LoopDraft(tensor, stream)
        seeds = self._seeds(tensor)
        if not seeds:
            raise Refused("as no product is made of it, and no op that can be cut makes it")
        for place in seeds:
            self._check_free(place)
        draft.statements.update(seeds)
        self._cut(draft, tensor, self._chosen(draft, tensor, stream))
        if sum(map(bool, draft.cuts[tensor].chunks)) < min(2, stream.chunks):
            raise Refused(f"as dim {stream.dim} of size {self.graph.shape(tensor)[stream.dim]} makes only one chunk")
        earlier = self._joinable(draft)
        if earlier is not None:
            earlier.statements |= draft.statements
            earlier.cuts.update(draft.cuts)
            draft = earlier
        else:
            self.drafts.append(draft)
        if not draft.ring:
            self._grow(draft)
        if stream.layout is not None:
            self._follow(draft)
        self.in_draft.update(dict.fromkeys(draft.statements, draft))

    def _joinable(self, draft: LoopDraft) -> LoopDraft | None:
        """An earlier loop that makes what this one reads, cut in the same way: the two become one."""
        read = {v for place in draft.statements for v in self.statements[place].inputs}
        for other in self.drafts:
            made = {v for place in other.statements for v in self.statements[place].outputs}
            near = bool(made & read) and other.ring != "scatter" and self._agree(other, draft)
            if near and is_convex(self.statements, other.statements | draft.statements):
                return other
        return None

    def _agree(self, one: LoopDraft, other: LoopDraft) -> bool:
        """Whether both take the tensors that they share alike: cut in the same way, or whole."""
        shared = self._tensors(one.statements) & self._tensors(other.statements)
        return all(one.cuts.get(t) == other.cuts.get(t) for t in shared)

    def _tensors(self, places: Iterable[int]) -> set[int]:
        return {
            self._tensor(v)
            for place in places
            for v in (*self.statements[place].inputs, *self.statements[place].outputs)
        }

    def _check_free(self, place: int) -> None:
        if place in self.in_draft:
            other = self.graph.tensors[self.in_draft[place].tensor].label
            raise Refused(f"as its op is cut as {other} asks")

    def _seeds(self, tensor: int) -> list[int]:
        """The place of the op that makes the tensor; of an input, the places up to the first products that read it."""
        producer = self._producer(tensor)
        if producer is not None:
            return [producer]
        return sorted(self._forward(tensor, 8))

    def _producer(self, tensor: int) -> int | None:
        made = [v for v in self.values_of.get(tensor, ()) if v in self.maker]
        found = [self.maker[v] for v in made if isinstance(self.statements[self.maker[v]], Compute)]
        return found[0] if found else None

    def _forward(self, tensor: int, depth: int) -> set[int]:
        """The places of the products that a tensor leads to, and of the ops in between."""
        found: set[int] = set()
        for value in self.values_of.get(tensor, ()):
            for place in self.readers.get(value, ()):
                statement = self.statements[place]
                if isinstance(statement, Compute) and depth:
                    node = self.graph.nodes[statement.node]
                    if any(f.kind is FactorKind.REDUCE for f in node.rule.factors):
                        found.add(place)
                    elif len(node.outputs) == 1 and (after := self._forward(node.outputs[0], depth - 1)):
                        found |= {place, *after}
        return found

    # where a tensor is cut

    def _cut(self, draft: LoopDraft, tensor: int, cut: ChunkedDim) -> None:
        """Cut a tensor, and with it the other operands and results of the loop's ops."""
        draft.cuts[tensor] = cut
        self._cut_ops(draft)

    def _cut_ops(self, draft: LoopDraft) -> None:
        """Cut operands and results of the loop's ops as far as those that are cut already tell how."""
        for place in sorted(draft.statements):
            statement = self.statements[place]
            if isinstance(statement, Compute):
                self._cut_op(draft, statement)
        for place in draft.statements:
            statement = self.statements[place]
            if isinstance(statement, Compute):
                self._cut_op(draft, statement)  # again, as the ops after it may have cut what it takes whole
                missing = [t for t in self.graph.nodes[statement.node].outputs if t not in draft.cuts]
                if missing:
                    raise Refused(f"as {self.graph.nodes[statement.node].name} makes it as a whole")

    def _cut_op(self, draft: LoopDraft, statement: Compute) -> None:
        node = self.graph.nodes[statement.node]
        rule, shapes = node.rule, [*(t.shape for t in node.call.types), *(t.shape for t in node.call.results)]
        dims = [*rule.operands, *rule.results]
        tensors = [*node.inputs, *node.outputs]
        known = next((p for p, t in enumerate(tensors) if t in draft.cuts), None)
        if known is None:
            return
        factor, part = chunked_factor(rule, dims[known], shapes[known], draft.cuts[tensors[known]], node.name)
        for place, tensor in enumerate(tensors):
            found = chunked_dim(rule, dims[place], shapes[place], factor, part)
            if found is None:
                if tensor in draft.cuts:
                    raise Refused(f"as {node.name} needs {self.graph.tensors[tensor].label} as a whole")
            elif draft.cuts.setdefault(tensor, found) != found:
                raise Refused(f"as {node.name} would have to cut {self.graph.tensors[tensor].label} in two ways")

    # the reshards around the ops

    def _grow(self, draft: LoopDraft) -> None:
        before, after = self._around(draft, forward=False), self._around(draft, forward=True)
        if draft.stream.ring and self._in_ring(draft, before, after):
            return
        self._add_reshards(draft, [*before, *after])

    def _add_reshards(self, draft: LoopDraft, reshards: Sequence[int]) -> None:
        for place in reshards:
            if is_convex(self.statements, {*draft.statements, place}):
                draft.statements.add(place)

    def _around(self, draft: LoopDraft, forward: bool) -> list[int]:
        """Reshards of cut tensors before (or after) the ops, the nearest first."""
        found: list[int] = []
        for place in sorted(draft.statements):
            values = self.statements[place].outputs if forward else self.statements[place].inputs
            todo = list(values)
            while todo:
                value = todo.pop()
                near = self.readers.get(value, []) if forward else [self.maker[value]] if value in self.maker else []
                for reshard in near:
                    if self._is_chunked_reshard(draft, reshard) and reshard not in found:
                        found.append(reshard)
                        todo += self.statements[reshard].outputs if forward else self.statements[reshard].inputs
        return found

    def _is_chunked_reshard(self, draft: LoopDraft, place: int) -> bool:
        statement = self.statements[place]
        if not isinstance(statement, Reshard) or statement.node is not None or place in self.in_draft:
            return False
        tensor = self._tensor(statement.source)
        return statement.step.kind in _CHUNKED and tensor in draft.cuts and statement.step.src.mesh == self._mesh(draft)

    def _mesh(self, draft: LoopDraft) -> DeviceMesh:
        return statement_mesh(self.statements[min(draft.statements)])

    def _follow(self, draft: LoopDraft) -> None:
        """Take later products of what the loop makes into it, as far as possible: nvFuser's streams go on so."""
        while draft.ring != "scatter" and any(self._joins(draft, found) for found in self._later_products(draft)):
            if not draft.ring:
                self._add_reshards(draft, self._around(draft, forward=True))

    def _later_products(self, draft: LoopDraft) -> Iterator[set[int]]:
        """For each product that reads what the loop makes, its place and those of the ops in between."""
        made = {self._tensor(v) for place in draft.statements for v in self.statements[place].outputs}
        for tensor in sorted(made):
            found = self._forward(tensor, 8) - draft.statements
            if found and not any(place in self.in_draft for place in found):
                yield found

    def _joins(self, draft: LoopDraft, found: set[int]) -> bool:
        """Take statements into a loop, and say so, if all of them can be cut and nothing has to be cut in two ways."""
        trial = LoopDraft(draft.tensor, draft.stream, found, dict(draft.cuts))
        try:
            self._cut_ops(trial)
        except Refused:
            return False
        requested = any(self._is_requested_otherwise(t, trial.cuts.get(t)) for t in self._tensors(found))
        if requested or not self._agree(draft, trial) or not is_convex(self.statements, draft.statements | found):
            return False
        draft.statements, draft.cuts = draft.statements | found, trial.cuts
        return True

    def _is_requested_otherwise(self, tensor: int, cut: ChunkedDim | None) -> bool:
        wanted = self.graph.streams.get(tensor)
        return wanted is not None and (cut is None or (wanted.dim, wanted.chunks) != (cut.dim, len(cut.chunks)))

    # rings

    def _in_ring(self, draft: LoopDraft, before: Sequence[int], after: Sequence[int]) -> bool:
        """Make the loop a ring; False, with a note why, where it cannot be one."""
        tried: tuple[tuple[RingKind, Sequence[int]], ...] = (("scatter", after), ("gather", before), ("gather", after))
        for kind, places in tried:
            wanted = StepKind.REDUCE_SCATTER if kind == "scatter" else StepKind.ALL_GATHER
            for place in places[:1]:
                statement = self.statements[place]
                assert isinstance(statement, Reshard)
                alone = {*draft.statements, place}
                if (
                    statement.step.kind is wanted
                    and self._travels(draft, statement, kind)
                    and is_convex(self.statements, alone)
                ):
                    draft.statements.add(place)
                    draft.ring = kind
                    return True
        self.refused[draft.tensor] = "in no ring, as its chunks are not parts of one rank's shard each"
        return False

    def _travels(self, draft: LoopDraft, reshard: Reshard, kind: RingKind) -> bool:
        """Whether each chunk is a shard of one rank of each group, or a part of one, in the order of the group."""
        tensor = self._tensor(reshard.source)
        shape, cut = self.graph.shape(tensor), draft.cuts[tensor]
        side, n = reshard.step.src if kind == "gather" else reshard.step.dst, len(cut.chunks)
        for rank in reshard.step.src.mesh.ranks:
            group = reshard.step.group(rank)
            if n % len(group):
                return False
            if rank != group[0]:
                continue
            for chunk in range(n):
                only = cut.dim, cut.chunks[chunk]
                owner = chunk // (n // len(group))
                held = [box_numel(restricted(side.runs(shape, member), only)) for member in group]
                if any(c for place, c in enumerate(held) if place != owner):
                    return False
        return True

    # chunks

    def _chosen(self, draft: LoopDraft, tensor: int, stream: Stream) -> ChunkedDim:
        """How the stream's dim is cut: as the user says, else each chunk a part of every shard (in a ring, of one)."""
        dim, n = stream.dim, self.graph.shape(tensor)[stream.dim]
        if stream.layout is not None:
            return ChunkedDim.of(dim, stream.layout, n)
        for cut in self._neighbours(draft, tensor, stream):
            return cut
        anyhow = ChunkedDim.of(dim, (Split(stream.chunks, STREAM),), n)
        trial = LoopDraft(tensor, stream, set(draft.statements))
        self._cut(trial, tensor, anyhow)
        for shards in self._shards(trial):
            ways = lay.extent(shards)
            if stream.ring and stream.chunks % ways == 0:
                return of_shards(dim, n, ways, stream.chunks // ways, True)
            return of_shards(dim, n, ways, stream.chunks, False)
        return anyhow

    def _neighbours(self, draft: LoopDraft, tensor: int, stream: Stream) -> Iterator[ChunkedDim]:
        """How loops that make what this one reads cut it, as chunks of the stream's tensor."""
        read = {t for place in draft.statements for t in self._tensors_read(place)}
        for other in self.drafts:
            for shared in sorted(read.intersection(other.cuts)):
                trial = LoopDraft(tensor, stream, set(draft.statements))
                self._cut(trial, shared, other.cuts[shared])
                found = trial.cuts.get(tensor)
                if found is not None and found.dim == stream.dim and len(found.chunks) == stream.chunks:
                    yield found

    def _tensors_read(self, place: int) -> list[int]:
        return [self._tensor(v) for v in self.statements[place].inputs]

    def _tensor(self, value: int) -> int:
        return self.resharded.values[value].tensor

    def _shards(self, draft: LoopDraft) -> Iterator[Layout]:
        """The layouts over ranks that the stream's dim has where it is scattered, gathered or computed."""
        values = [*self._around(draft, True), *self._around(draft, False), *sorted(draft.statements)]
        for place in values:
            statement = self.statements[place]
            scatters = isinstance(statement, Compute) or statement.step.kind is StepKind.REDUCE_SCATTER
            for value in statement.outputs if scatters else statement.inputs:
                made = self.resharded.values[value]
                shards = made.sharding.dims[draft.cuts[made.tensor].dim] if made.tensor in draft.cuts else ()
                if shards and all(split.bound for split in shards):
                    yield shards

    # order

    def ordered(self) -> tuple[Statement | ChunkLoop, ...]:
        """All statements with each loop's in one place, each after what it reads, and otherwise in their order."""
        while True:
            parts = in_order(self.statements, self.maker, self.drafts)
            if parts is not None:
                return parts
            dropped = self.drafts.pop()
            self.refused[dropped.tensor] = "not chunked, as another loop stands between its steps"
            for place in dropped.statements:
                del self.in_draft[place]
