"""What random programs are made of: each function appends an op or a layer. They are listed by theme at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import meshfuse as mf

from .drawing import BOOL, INT, Tensor, Writer, divisors, shape

Step = Callable[[Writer], None]
SMOOTH = ("tanh", "sigmoid", "sin", "cos", "erf", "silu", "relu", "neg", "exp", "abs", "set")


# pointwise --------------------------------------------------------------------------------------------------------


def unary(w: Writer) -> None:
    w.add(getattr(w.ops, w.draws.choice(SMOOTH))(w.float()))


def binary(w: Writer) -> None:
    x = w.float(1)
    pair = w.draws.sample((x, w.beside(x)), 2)
    w.add(getattr(w.ops, w.draws.choice(("add", "add", "sub", "mul", "mul", "maximum", "minimum")))(*pair))


def with_number(w: Writer) -> None:
    w.add(getattr(w.ops, w.draws.choice(("add", "mul", "sub")))(w.float(), w.draws.choice((0.5, 2.0, -1.0))))


def quotient(w: Writer) -> None:
    x = w.float(1)
    below = w.beside(x)
    w.add(w.ops.truediv(x, w.ops.add(w.ops.mul(below, below), 1.0)))


def masked(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.where(w.ops.gt(w.beside(x), 0.0), x, w.draws.choice((0.0, -1e4))))


def lerped(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.lerp(x, w.beside(x), 0.25) if w.draws.chance(0.5) else w.ops.addcmul(x, w.beside(x), x, 2.0))


def whole_numbers(w: Writer) -> None:
    found = w.pick(lambda t: t.dtype is INT and t.ndim > 0)
    a = w.input([w.size(), w.size()], INT) if found is None else found
    w.add(getattr(w.ops, w.draws.choice(("add", "maximum", "bitwise_xor", "gcd")))(a, w.beside(a, INT)))


def truths(w: Writer) -> None:
    found = w.pick(lambda t: t.dtype is BOOL and t.ndim > 0)
    a = w.ops.lt(w.float(1), 0.5) if found is None else found
    w.add(w.ops.logical_and(a, w.beside(a, BOOL)) if w.draws.chance(0.5) else w.ops.logical_not(a))


def cast_there_and_back(w: Writer) -> None:
    between = w.draws.choice((mf.DataType.BFloat16, mf.DataType.Double))
    w.add(w.ops.cast(w.ops.relu(w.ops.cast(w.float(), between)), w.dtype))


# reductions, norms, losses ----------------------------------------------------------------------------------------


def total(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.sum(x, w.dims(x), w.draws.chance(0.4)))


def extreme(w: Writer) -> None:
    x = w.float(1)
    w.add(getattr(w.ops, w.draws.choice(("max", "min", "prod")))(x, w.dims(x), w.draws.chance(0.4)))


def mean(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.mean(x, w.dims(x), w.draws.chance(0.4)))


def variance(w: Writer) -> None:
    x = w.ops.cast(w.float(1), mf.DataType.Float)
    found = w.ops.var_mean(x, w.dims(x), 0, True) if w.draws.chance(0.5) else (w.ops.var(x, w.dims(x), 0, False),)
    w.add(*found)


def softmax(w: Writer) -> None:
    x = w.float(1)
    w.add(getattr(w.ops, w.draws.choice(("softmax", "log_softmax")))(x, w.dim(x)))


def logsumexp(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.logsumexp(x, w.dims(x)))


def norm(w: Writer) -> None:
    x = w.float(2)
    width = shape(x)[-1]
    gain = w.input([width])
    if w.draws.chance(0.5):
        w.add(w.ops.layer_norm(x, [width], gain, w.input([width])))
    else:
        w.add(w.ops.rms_norm(x, [width], gain))


def loss(w: Writer) -> None:
    x = w.float(2, 3)
    targets = w.input(shape(x)[:-1], INT)
    w.add(w.ops.cross_entropy(x, targets, w.draws.choice(("mean", "sum", "none"))))


def loss_of_a_head(w: Writer) -> None:
    x = w.float(2, 3)
    words = w.draws.choice((1000, 4096, 32000))
    logits = w.ops.linear(x, w.input([words, shape(x)[-1]]))
    w.add(w.ops.cross_entropy(logits, w.input(shape(x)[:-1], INT)))


# scans and sorts --------------------------------------------------------------------------------------------------


def scan(w: Writer) -> None:
    x = w.float(1)
    w.add(getattr(w.ops, w.draws.choice(("cumsum", "cumsum", "cumsum", "cummax", "cumprod")))(x, w.dim(x)))


def running_sum(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.cumsum(x, w.dim(x)))


def sort(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    order = w.ops.argsort(x, dim, w.draws.chance(0.5), True)
    w.add(w.ops.gather(x, order, dim))


def best(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    values, places = w.ops.topk(x, 1 + w.draws.below(min(4, shape(x)[dim])), dim, w.draws.chance(0.7), True)
    w.add(values, places)


def likeliest(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.argmax(x, w.dim(x)))


# products ---------------------------------------------------------------------------------------------------------


def matmul(w: Writer) -> None:
    x = w.float(2, 3)
    *batch, _, k = shape(x)
    found = w.pick(lambda t: t is not x and t.dtype is w.dtype and t.ndim == 2 and shape(t)[0] == k)
    if found is None or w.draws.chance(0.5):
        found = w.input([*(batch if w.draws.chance(0.3) else []), k, w.size()])
    w.add(w.ops.matmul(x, found))


def linear(w: Writer) -> None:
    x, n = w.float(1, 3), w.size()
    bias = [w.input([n])] if w.draws.chance(0.3) else []
    w.add(w.ops.linear(x, w.input([n, shape(x)[-1]]), *bias))


def mlp(w: Writer) -> None:
    x = w.float(2, 3)
    width, hidden = shape(x)[-1], w.draws.choice((2, 4)) * shape(x)[-1]
    made = w.ops.linear(w.ops.gelu(w.ops.linear(x, w.input([hidden, width]))), w.input([width, hidden]))
    w.add(x + made if w.draws.chance(0.5) else made)


def gated(w: Writer) -> None:
    """Both halves of one product: a · silu(b)."""
    x, n = w.float(2, 3), 2 * w.size()
    rows = w.ops.linear(x, w.input([n, shape(x)[-1]]))
    a, b = (part(w, rows, rows.ndim - 1, i * n // 2, (i + 1) * n // 2) for i in range(2))
    w.add(a * w.ops.silu(b))


def gram(w: Writer) -> None:
    x = w.float(2, 2)
    w.add(w.ops.matmul(x, w.ops.permute(x, [1, 0])) if w.fits(shape(x)[0], shape(x)[0]) else w.ops.relu(x))


def low_rank(w: Writer) -> None:
    """x w + (x a) b."""
    x, n = w.float(2, 3), w.size()
    k = shape(x)[-1]
    small = w.ops.matmul(w.ops.matmul(x, w.input([k, 8])), w.input([8, n]))
    w.add(w.ops.matmul(x, w.input([k, n])) + small * 2.0)


def grouped(w: Writer) -> None:
    groups, size, m, n = w.draws.choice((2, 3, 4, 8)), w.draws.choice((3, 16, 64)), w.size(), w.size()
    ends = w.ops.iota(groups, size, size, mf.DataType.Int32)
    w.add(w.ops.grouped_mm(w.input([groups * size, m]), w.input([groups, m, n]), ends))


def experts(w: Writer) -> None:
    """Tokens to experts by a one-hot product, an MLP for each, and back."""
    tokens, width, count, slots = w.size(), w.size(), w.draws.choice((2, 4, 8)), w.draws.choice((4, 16))
    x, gates = w.input([tokens, width]), w.ops.softmax(w.input([tokens, count * slots]), -1)
    sent = w.ops.reshape(w.ops.matmul(w.ops.permute(gates, [1, 0]), x), [count, slots, width])
    hidden = w.ops.relu(w.ops.matmul(sent, w.input([count, width, 2 * width])))
    made = w.ops.matmul(hidden, w.input([count, 2 * width, width]))
    w.add(w.ops.matmul(gates, w.ops.reshape(made, [count * slots, width])))


# attention --------------------------------------------------------------------------------------------------------


def rows_of_heads(w: Writer, even: int = 1) -> tuple[list[int], list[int]]:
    """Shapes [B, H, S, K] of queries, and of keys and values with as many heads or fewer."""
    batch, few, more = w.draws.choice((1, 2, 4, 8)), w.draws.choice((1, 2, 4, 6)), w.draws.choice((1, 1, 2))
    length = even * w.draws.choice((8, 16, 50, 128))
    return [batch, few * more, length, 16], [batch, few, length, 16]


def attention(w: Writer) -> None:
    query, key = rows_of_heads(w)
    q, k, v = w.input(query), w.input(key), w.input(key)
    w.add(w.ops.sdpfa_fwd(q, k, v, is_causal=w.draws.chance(0.5))[0])


def attention_by_hand(w: Writer) -> None:
    query, _ = rows_of_heads(w)
    q, k, v = (w.input(query) for _ in range(3))
    scores = w.narrowed(w.ops.matmul(q, w.ops.permute(k, [0, 1, 3, 2])) * 0.25)
    w.add(w.ops.matmul(w.ops.softmax(scores, -1), v))


def ring_attention(w: Writer) -> None:
    query, key = rows_of_heads(w, 2 * w.ring)
    q, k, v = w.input(query), w.input(key), w.input(key)
    w.add(w.ops.ring_attention(q, k, v, w.ring, w.draws.chance(0.5), zigzag=w.draws.chance(0.5))[0])


def projected_attention(w: Writer) -> None:
    """q, k, v of x by their weights, attention, and the output's projection."""
    batch, length, heads, each = w.draws.choice((2, 4, 8)), w.draws.choice((16, 100)), w.draws.choice((2, 4, 6)), 16
    width = heads * each
    x = w.input([batch, length, width])

    def by_head() -> Tensor:
        rows = w.ops.matmul(x, w.input([width, width]))
        return w.ops.permute(w.ops.reshape(rows, [batch, length, heads, each]), [0, 2, 1, 3])

    mixed = w.ops.sdpfa_fwd(by_head(), by_head(), by_head(), is_causal=True)[0]
    merged = w.ops.reshape(w.ops.permute(mixed, [0, 2, 1, 3]), [batch, length, width])
    w.add(x + w.ops.matmul(merged, w.input([width, width])))


# shapes -----------------------------------------------------------------------------------------------------------


def merge(w: Writer) -> None:
    x = w.float(2)
    first = w.draws.below(x.ndim - 1)
    sizes = shape(x)
    w.add(w.ops.reshape(x, [*sizes[:first], sizes[first] * sizes[first + 1], *sizes[first + 2 :]]))


def cut(w: Writer) -> None:
    x = w.float(1, 3)
    dim = w.dim(x)
    sizes = shape(x)
    major = w.draws.choice(divisors(sizes[dim]))
    w.add(w.ops.reshape(x, [*sizes[:dim], major, sizes[dim] // major, *sizes[dim + 1 :]]))


def permute(w: Writer) -> None:
    x = w.float(2)
    w.add(w.ops.permute(x, w.draws.sample(range(x.ndim), x.ndim)))


def repeat(w: Writer) -> None:
    """A new dim, and x repeated along it."""
    x, n = w.float(1, 3), w.draws.choice((2, 3, 8))
    place = w.draws.below(x.ndim + 1)
    wide = w.ops.broadcast(x, [d == place for d in range(x.ndim + 1)])
    w.add(w.ops.expand(wide, [*shape(x)[:place], n, *shape(x)[place:]]) if w.fits(n, *shape(x)) else wide)


def triangle(w: Writer) -> None:
    w.add(w.ops.triu(w.float(2), w.draws.below(5) - 2))


# windows ----------------------------------------------------------------------------------------------------------


def part(w: Writer, x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Indices start to stop of a dim, in steps."""
    starts, stops, steps = [0] * x.ndim, list(shape(x)), [1] * x.ndim
    starts[dim], stops[dim], steps[dim] = start, stop, step
    return w.ops.slice(x, starts, stops, steps)


def window(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    n = shape(x)[dim]
    start = w.draws.below(n)
    w.add(part(w, x, dim, start, start + 1 + w.draws.below(n - start), w.draws.choice((1, 1, 2))))


def padded(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    w.add(w.ops.pad(x, [n for d in reversed(range(x.ndim)) for n in ((1, 2) if d == dim else (0, 0))]))


def joined(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    rest = [n for d, n in enumerate(shape(x)) if d != dim]
    other = w.pick(
        lambda t: t.dtype is w.dtype and t.ndim == x.ndim and [n for d, n in enumerate(shape(t)) if d != dim] == rest
    )
    w.add(w.ops.cat([x, x if other is None else other], dim) if w.fits(2, *shape(x)) else w.ops.sin(x))


def roll(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    n = shape(x)[dim]
    by = 1 + w.draws.below(max(1, min(3, n - 1)))
    w.add(w.ops.cat([part(w, x, dim, n - by, n), part(w, x, dim, 0, n - by)], dim) if by < n else w.ops.sin(x))


def convolution(w: Writer) -> None:
    """Three taps along a dim, a number or a product for each."""
    x = w.float(2, 3)
    dim = w.draws.below(x.ndim - 1)
    n, width = shape(x)[dim], shape(x)[-1]
    wide = w.ops.pad(x, [m for d in reversed(range(x.ndim)) for m in ((1, 1) if d == dim else (0, 0))])
    taps = [part(w, wide, dim, i, i + n) for i in range(3)]
    if w.draws.chance(0.5):
        made = [t * c for t, c in zip(taps, (0.25, 0.5, 0.25), strict=True)]
    else:
        made = [w.ops.matmul(t, w.input([width, 8])) for t in taps]
    w.add(made[0] + made[1] + made[2])


def written_into(w: Writer) -> None:
    """Rows with others in their midst, as a cache has them."""
    x = w.float(2, 3)
    n = shape(x)[0]
    at = w.draws.below(n)
    new = w.input([1, *shape(x)[1:]])
    before, after = part(w, x, 0, 0, max(at, 1)), part(w, x, 0, min(at + 1, n - 1), n)
    w.add(w.ops.cat([before, new, after], 0))


def blocks_in_another_order(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    blocks = max(d for d in divisors(shape(x)[dim]) if d <= 8)
    w.add(w.ops.reorder_blocks(x, dim, w.draws.sample(range(blocks), blocks)))


# lookups ----------------------------------------------------------------------------------------------------------


def embedding(w: Writer) -> None:
    table = w.float(2, 2)
    w.add(w.ops.embedding_fwd(w.input([w.draws.choice((4, 32)), w.draws.choice((5, 64))], INT), table))


def chosen_rows(w: Writer) -> None:
    x = w.float(1)
    w.add(w.ops.index_select(x, w.input([w.draws.choice((3, 8, 64))], INT), w.dim(x)))


def taken_along(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    index = w.input([w.draws.choice((1, 5)) if d == dim else n for d, n in enumerate(shape(x))], INT)
    w.add(w.ops.take_along_axis(x, index, dim))


def one_row(w: Writer) -> None:
    x = w.float(2)
    dim = w.dim(x)
    w.add(w.ops.select(x, w.draws.below(shape(x)[dim]), dim))


def scattered(w: Writer) -> None:
    x = w.float(1)
    dim = w.dim(x)
    index = w.input([min(n, 2) if d == dim else n for d, n in enumerate(shape(x))], INT)
    w.add(w.ops.scatter(x, index, w.input(shape(index)), dim))


# random numbers, factories and complex numbers --------------------------------------------------------------------


def noise(w: Writer) -> None:
    x = w.float(1)
    own = w.draws.chance(0.5)
    w.add(x + (w.ops.uniform(-1.0, 1.0, list(shape(x)), dtype=w.dtype) if own else w.ops.randn_like(x)))


def dropout(w: Writer) -> None:
    w.add(w.ops.dropout(w.float(1), 0.25))


def positions(w: Writer) -> None:
    x = w.float(1)
    w.add(x + w.ops.cast(w.ops.iota(shape(x)[-1]), w.dtype))


def spectrum(w: Writer) -> None:
    """A complex product, and its real part."""
    x = w.ops.cast(w.float(2, 3), mf.DataType.Float)
    other = w.input([shape(x)[-1], w.size()], mf.DataType.ComplexFloat)
    w.add(w.ops.cast(w.ops.real(w.ops.matmul(w.ops.complex(x, x), other)), w.dtype))


# Every step goes through `fd.grad` but those of the last two themes.
SMOOTH_THEMES: Mapping[str, tuple[Step, ...]] = {
    "pointwise": (unary, binary, binary, with_number, quotient, masked, lerped, cast_there_and_back),
    "reductions": (total, total, mean, variance, softmax, logsumexp, extreme),
    "norms and losses": (norm, norm, linear, loss, loss_of_a_head, softmax),
    "products": (matmul, matmul, linear, gram, low_rank, grouped),
    "layers": (mlp, mlp, gated, experts, norm, linear),
    "attention": (attention, attention_by_hand, projected_attention),
    "rings": (ring_attention,),
    "shapes": (merge, cut, permute, repeat, triangle, joined),
    "windows": (window, padded, joined, roll, convolution, convolution, written_into, blocks_in_another_order),
    "lookups": (embedding, chosen_rows, taken_along, one_row, scattered),
    "scans": (running_sum, running_sum, matmul, total, window),
    "random numbers": (noise, dropout, positions, linear, norm),
}  # fmt: skip
ROUGH_THEMES: Mapping[str, tuple[Step, ...]] = {
    "sorts": (scan, sort, best, likeliest),
    "other types": (whole_numbers, truths, spectrum, cast_there_and_back),
}
ANY: Sequence[Step] = (unary, binary, binary, with_number, total, linear, matmul, permute, masked, norm)
