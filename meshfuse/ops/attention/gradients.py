"""Gradients of attention that `sdpfa_bwd` does not compute, and of the backward ops, written out in ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...dtypes import Category, DataType
from ...errors import user_error
from ..vjp import Backward, Tensor, sizes, sum_to, transposed


class WrittenOut:
    """Gradients of attention with a gradient of the log-sum-exp.

    The probabilities are computed again from the log-sum-exp. Scores are [.., h, s, s_k]; tensors that meet k and v are
    [.., h_k, (h / h_k) s, n], since h / h_k consecutive heads of q share one of k and v. Rows and columns are in the
    order of the sequence, or in that of its `chunks`.
    """

    def __init__(self, b: Backward, chunks: Sequence[int] = ()):
        self.b, self.o, self.chunks = b, b.ops, chunks
        if b["dropout_p"] not in (None, 0, 0.0):
            raise user_error(
                "sdpfa_fwd: no derivative here with dropout beside a use of its log-sum-exp", "", "",
                "Write the attention with matmul, softmax and dropout.",
            )  # fmt: skip
        self.q, self.k, self.v = (self._wide(b[name]) for name in ("query", "key", "value"))
        self.scale = b["scale"] if b["scale"] is not None else self._default_scale()
        self.shape = [*sizes(b["query"])[:-1], sizes(b["key"])[-2]]

    def gradients(self) -> dict[str, Any]:
        b, o = self.b, self.o
        p = self._probabilities()
        scores = o.mul(p, self._slopes())
        rows, found = o.mul(self._grouped(scores), self.scale), {}
        if b.needs("query"):
            found["query"] = o.reshape(o.matmul(rows, self.k), sizes(b["query"]))
        if b.needs("key"):
            found["key"] = o.matmul(transposed(b, rows), self._grouped(self.q))
        if b.needs("value") and b.grad is not None:
            found["value"] = o.matmul(transposed(b, self._grouped(p)), self._grouped(self._wide(b.grad)))
        return found | {name: sum_to(b, scores, b[name]) for name in ("bias", "mask") if b.needs(name)}

    def _wide(self, x: Tensor) -> Tensor:
        return self.o.cast(x, DataType.Float) if x.dtype.is_reduced_float else x

    def _default_scale(self) -> Any:
        """1 / sqrt(e); 1 for e = 0, where all scores are 0."""
        return self.o.rsqrt(self.o.maximum(sizes(self.q)[-1], 1))

    def _grouped(self, x: Tensor) -> Tensor:
        """[.., h, s, n] as [.., h_k, (h / h_k) s, n].

        The number of rows cannot be inferred if there are no elements.
        """
        if _as_many_heads(x, self.k):
            return x
        (*batch, heads, rows, n), shared = sizes(x), sizes(self.k)[-3]
        return self.o.reshape(x, [*batch, shared, self.o.div(self.o.mul(heads, rows), self.o.maximum(shared, 1)), n])

    def _per_row(self, x: Tensor) -> Tensor:
        """One value per row, broadcast to all columns."""
        return self.o.broadcast(x, [False] * x.ndim + [True])

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """left [.., h, s, n] times right [.., h_k, s_k, n] transposed, in the scores' shape [.., h, s, s_k]."""
        found = self.o.matmul(self._grouped(left), transposed(self.b, right))
        return found if _as_many_heads(left, right) else self.o.reshape(found, self.shape)

    def _probabilities(self) -> Tensor:
        """exp(scores - logsumexp); zero in rows that see nothing."""
        o, lse = self.o, self.b.results[1]
        return o.exp(o.sub(self._scores(), self._per_row(o.where(o.isfinite(lse), lse, 0.0))))

    def _scores(self) -> Tensor:
        b, o = self.b, self.o
        scores = o.mul(self._product(self.q, self.k), self.scale)
        if b["bias"] is not None:
            scores = o.add(scores, b["bias"])
        if b["mask"] is not None:
            is_flag = b["mask"].dtype is DataType.Bool
            scores = o.where(b["mask"], scores, -math.inf) if is_flag else o.add(scores, b["mask"])
        return o.where(self._causal_mask(), scores, -math.inf) if b["is_causal"] else scores

    def _causal_mask(self) -> Tensor:
        """Whether a row sees a column: those that are not later in the sequence."""
        rows, columns = map(self._places, self.shape[-2:])
        return self.o.ge(self._per_row(rows), columns)

    def _places(self, n: Any) -> Tensor:
        """The places in the sequence of n rows or columns."""
        found = self.o.iota(n)
        return self.o.reorder_blocks(found, 0, list(self.chunks)) if self.chunks else found

    def _slopes(self) -> Tensor:
        """Each score's gradient over its probability."""
        b, o = self.b, self.o
        lse = None if b.grads[1] is None else self._per_row(b.grads[1])
        if b.grad is None:
            return lse
        grad = self._wide(b.grad)
        through = self._per_row(o.sum(o.mul(grad, b.results[0]), [-1]))
        return o.sub(self._product(grad, self.v), through if lse is None else o.sub(through, lse))


def _as_many_heads(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors [.., h, s, e] are known to have the same number of heads."""
    return x.type.shape[-3] == y.type.shape[-3] != -1


def second_gradients(
    b: Backward, chunks: Sequence[int] = (), of: Sequence[str] = ("query", "key", "value")
) -> dict[str, Any]:
    """The gradients of a backward op, which gives those by the operands in `of`.

    It is written out on copies of its operands, and that is differentiated. The output and the log-sum-exp depend on q,
    k and v; the copies keep gradients from flowing on into them.
    """
    copies = {name: b.ops.copy(b[name]) for name in _OPERANDS if _is_copied(b.arguments.get(name))}
    options = {"bias": b["bias"], "mask": b["mask"], "dropout_p": None, "is_causal": b["is_causal"],
               "scale": b["scale"]}  # fmt: skip
    saved, grads = (copies["output"], copies["logsumexp"]), (copies["grad_output"], copies.get("grad_logsumexp"))
    used = Backward(b.name, b.ops, options | copies, saved, grads, {copies[name].id for name in of})
    made = WrittenOut(used, chunks).gradients()
    pairs = [(made[name], grad) for name, grad in zip(of, b.grads, strict=True) if grad is not None]
    found = b.ops.gradients([y for y, _ in pairs], list(copies.values()), [grad for _, grad in pairs])
    return dict(zip(copies, found, strict=True))


_OPERANDS = ("query", "key", "value", "output", "logsumexp", "grad_output", "bias", "mask", "grad_logsumexp")


def _is_copied(x: Any) -> bool:
    """Whether it is an operand that may have a gradient: a mask of bools has none."""
    return x is not None and x.dtype.category >= Category.FLOAT
