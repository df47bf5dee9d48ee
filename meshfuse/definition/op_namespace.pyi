# Written by tools/op_stubs.py from the ops' records: change those, and run `.venv/bin/python tools/op_stubs.py`.
# Types have names of their own here, as `complex`, `slice` and others are ops in the class below.
"""`fd.ops`: a definition's ops as functions."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import torch

from ..dtypes import DataType
from .recording import Definition
from .tensor_view import TensorView, Val

Number: TypeAlias = bool | int | float | complex
Scalar: TypeAlias = Val | Number
Operand: TypeAlias = TensorView | Scalar

def signature_of(name: str) -> inspect.Signature: ...

class OpNamespace:
    """`fd.ops`: every op of the table and every composite, as a function.

    An op of your own (`mf.register_op`) is a function here as well, which type checkers do not know: `fd.call(op, [x])`
    is the same call.
    """

    _fd: Definition
    def __init__(self, fd: Definition) -> None: ...
    def __dir__(self) -> list[str]: ...
    @overload
    def abs(self, x: TensorView) -> TensorView:
        """magnitude; Python's `abs(x)` as well"""
    @overload
    def abs(self, x: Val) -> Val:
        """magnitude; Python's `abs(x)` as well"""
    @overload
    def acos(self, x: TensorView) -> TensorView:
        """arc cosine"""
    @overload
    def acos(self, x: Val) -> Val:
        """arc cosine"""
    @overload
    def acosh(self, x: TensorView) -> TensorView:
        """inverse hyperbolic cosine"""
    @overload
    def acosh(self, x: Val) -> Val:
        """inverse hyperbolic cosine"""
    def adaptive_avg_pool(self, x: TensorView, output_size: Sequence[int | None]) -> TensorView:
        """The means of as many windows as `output_size` says by spatial dim, of equal sizes up to one; None keeps a dim."""
    @overload
    def add(self, a: TensorView, b: Operand) -> TensorView:
        """a + b"""
    @overload
    def add(self, a: Operand, b: TensorView) -> TensorView:
        """a + b"""
    @overload
    def add(self, a: Val, b: Scalar) -> Val:
        """a + b"""
    @overload
    def add(self, a: Scalar, b: Val) -> Val:
        """a + b"""
    @overload
    def addcmul(self, a: TensorView, b: Operand, c: Operand, value: Scalar | None) -> TensorView:
        """a + value * b * c"""
    @overload
    def addcmul(self, a: Operand, b: TensorView, c: Operand, value: Scalar | None) -> TensorView:
        """a + value * b * c"""
    @overload
    def addcmul(self, a: Operand, b: Operand, c: TensorView, value: Scalar | None) -> TensorView:
        """a + value * b * c"""
    @overload
    def addcmul(self, a: Val, b: Scalar, c: Scalar, value: Scalar | None) -> Val:
        """a + value * b * c"""
    @overload
    def addcmul(self, a: Scalar, b: Val, c: Scalar, value: Scalar | None) -> Val:
        """a + value * b * c"""
    @overload
    def addcmul(self, a: Scalar, b: Scalar, c: Val, value: Scalar | None) -> Val:
        """a + value * b * c"""
    def argmax(self, x: TensorView, dim: int | None = None, keepdim: bool = False) -> TensorView:
        """The index of the first largest element along a dim; of the flattened tensor for None."""
    def argsort(self, arg: TensorView, dim: int, descending: bool = False, stable: bool = False) -> TensorView:
        """the indices that sort `dim`; equal elements keep their order"""
    @overload
    def asin(self, x: TensorView) -> TensorView:
        """arc sine"""
    @overload
    def asin(self, x: Val) -> Val:
        """arc sine"""
    @overload
    def asinh(self, x: TensorView) -> TensorView:
        """inverse hyperbolic sine"""
    @overload
    def asinh(self, x: Val) -> Val:
        """inverse hyperbolic sine"""
    @overload
    def atan(self, x: TensorView) -> TensorView:
        """arc tangent"""
    @overload
    def atan(self, x: Val) -> Val:
        """arc tangent"""
    @overload
    def atan2(self, a: TensorView, b: Operand) -> TensorView:
        """angle of the point (b, a), in radians"""
    @overload
    def atan2(self, a: Operand, b: TensorView) -> TensorView:
        """angle of the point (b, a), in radians"""
    @overload
    def atan2(self, a: Val, b: Scalar) -> Val:
        """angle of the point (b, a), in radians"""
    @overload
    def atan2(self, a: Scalar, b: Val) -> Val:
        """angle of the point (b, a), in radians"""
    @overload
    def atanh(self, x: TensorView) -> TensorView:
        """inverse hyperbolic tangent"""
    @overload
    def atanh(self, x: Val) -> Val:
        """inverse hyperbolic tangent"""
    def attention_merge(self, output: TensorView, logsumexp: TensorView, other_output: TensorView, other_logsumexp: TensorView) -> tuple[TensorView, TensorView]:
        """two attentions over different keys as one over all: output and log-sum-exp"""
    def avg_pool(self, x: TensorView, kernel: int | Sequence[int], stride: int | Sequence[int] | None = None, padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None) -> TensorView:
        """The mean of each window, as torch's avg_pool1d to 3d; with `divisor` its sum over that."""
    def batch_norm(self, x: TensorView, weight: TensorView | None = None, bias: TensorView | None = None, running_mean: TensorView | None = None, running_var: TensorView | None = None, training: bool = True, momentum: float = 0.1, eps: Scalar = 1e-05) -> tuple[TensorView, TensorView, TensorView, TensorView, TensorView]:
        """(x normalised by channel, mean, 1 / standard deviation, running mean, running variance), of x [n, channels, ..]."""
    def bincount(self, x: TensorView, bins: int, weights: TensorView | None = None) -> TensorView:
        """How often each of the numbers 0 to bins - 1 is in x, or the sum of its weights."""
    @overload
    def bitwise_and(self, a: TensorView, b: Operand) -> TensorView:
        """`a & b`"""
    @overload
    def bitwise_and(self, a: Operand, b: TensorView) -> TensorView:
        """`a & b`"""
    @overload
    def bitwise_and(self, a: Val, b: Scalar) -> Val:
        """`a & b`"""
    @overload
    def bitwise_and(self, a: Scalar, b: Val) -> Val:
        """`a & b`"""
    @overload
    def bitwise_left_shift(self, a: TensorView, b: Operand) -> TensorView:
        """`a << b`"""
    @overload
    def bitwise_left_shift(self, a: Operand, b: TensorView) -> TensorView:
        """`a << b`"""
    @overload
    def bitwise_left_shift(self, a: Val, b: Scalar) -> Val:
        """`a << b`"""
    @overload
    def bitwise_left_shift(self, a: Scalar, b: Val) -> Val:
        """`a << b`"""
    @overload
    def bitwise_not(self, x: TensorView) -> TensorView:
        """`~x`"""
    @overload
    def bitwise_not(self, x: Val) -> Val:
        """`~x`"""
    @overload
    def bitwise_or(self, a: TensorView, b: Operand) -> TensorView:
        """a or b, bit by bit; Python's bar as well"""
    @overload
    def bitwise_or(self, a: Operand, b: TensorView) -> TensorView:
        """a or b, bit by bit; Python's bar as well"""
    @overload
    def bitwise_or(self, a: Val, b: Scalar) -> Val:
        """a or b, bit by bit; Python's bar as well"""
    @overload
    def bitwise_or(self, a: Scalar, b: Val) -> Val:
        """a or b, bit by bit; Python's bar as well"""
    @overload
    def bitwise_right_shift(self, a: TensorView, b: Operand) -> TensorView:
        """`a >> b`: the sign is kept"""
    @overload
    def bitwise_right_shift(self, a: Operand, b: TensorView) -> TensorView:
        """`a >> b`: the sign is kept"""
    @overload
    def bitwise_right_shift(self, a: Val, b: Scalar) -> Val:
        """`a >> b`: the sign is kept"""
    @overload
    def bitwise_right_shift(self, a: Scalar, b: Val) -> Val:
        """`a >> b`: the sign is kept"""
    @overload
    def bitwise_xor(self, a: TensorView, b: Operand) -> TensorView:
        """`a ^ b`"""
    @overload
    def bitwise_xor(self, a: Operand, b: TensorView) -> TensorView:
        """`a ^ b`"""
    @overload
    def bitwise_xor(self, a: Val, b: Scalar) -> Val:
        """`a ^ b`"""
    @overload
    def bitwise_xor(self, a: Scalar, b: Val) -> Val:
        """`a ^ b`"""
    def block_attention(self, query: TensorView, key: TensorView, value: TensorView, bias: TensorView | None = None, mask: TensorView | None = None, dropout_p: Scalar | None = None, is_causal: Scalar | None = None, scale: Scalar | None = None, blocks: int = 1) -> tuple[TensorView, TensorView, TensorView, TensorView]:
        """attention on each block of keys by itself"""
    def block_columns(self, arg: TensorView, step: int) -> TensorView:
        """of block r's columns, in as many blocks, those of block r - `step`; part of the ring's rounds"""
    def block_cummax(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """`cummax` within each block, beginning anew"""
    def block_cummin(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """`cummin` within each block, beginning anew"""
    def block_cumprod(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """`cumprod` within each block, beginning anew"""
    def block_cumsum(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """`cumsum` within each block, beginning anew"""
    def block_cumsum_bwd(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """`cumsum_bwd` within each block, beginning anew"""
    def block_keep(self, arg: TensorView, first: int, late: bool) -> TensorView:
        """zeros in the first `first` blocks, or in the others; part of the ring's rounds"""
    def block_max(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """the max of each block"""
    def block_merge(self, arg: TensorView, counts: Sequence[int]) -> tuple[TensorView, TensorView]:
        """mean and sum of squared differences of all blocks, from each block's moments"""
    def block_min(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """the min of each block"""
    def block_moments(self, arg: TensorView, dims: int | Sequence[int], dim: int, blocks: int) -> TensorView:
        """mean and sum of squared differences of each block"""
    def block_pick(self, early: Operand, late: Operand, first: int) -> TensorView:
        """the first `first` blocks of `early`, then those of `late`; part of the ring's rounds"""
    def block_prod(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """the prod of each block"""
    def block_repeat(self, arg: TensorView, dim: int, size: int, blocks: int) -> TensorView:
        """each block's one value for all of the block's elements"""
    def block_sum(self, arg: TensorView, dim: int, blocks: int) -> TensorView:
        """the sum of each block"""
    def block_topk(self, arg: TensorView, k: int, dim: int, largest: bool, blocks: int) -> tuple[TensorView, TensorView]:
        """the `k` greatest (or least) of each block, and their indices in the whole dim"""
    def broadcast(self, arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
        """new dims of size 1 where `is_broadcast_dim` is True"""
    def broadcast_in_dim(self, arg: TensorView, shape: Sequence[int | Val], broadcast_dims: Sequence[int]) -> TensorView:
        """to `shape`: dim i of the operand is dim `broadcast_dims[i]` of the result, the others repeat"""
    @overload
    def cast(self, arg: TensorView, dtype: DataType | torch.dtype) -> TensorView:
        """x in another element type"""
    @overload
    def cast(self, arg: Val, dtype: DataType | torch.dtype) -> Val:
        """x in another element type"""
    def cat(self, tensors: Sequence[TensorView], dim: int = 0, manual_padding: bool = False) -> TensorView:
        """tensors one behind the other along `dim`"""
    @overload
    def ceil(self, x: TensorView) -> TensorView:
        """least integer not below x, in x's type"""
    @overload
    def ceil(self, x: Val) -> Val:
        """least integer not below x, in x's type"""
    @overload
    def clamp(self, x: TensorView, min: Scalar | None, max: Scalar | None) -> TensorView:
        """x, at least min and at most max; None for no bound"""
    @overload
    def clamp(self, x: Val, min: Scalar | None, max: Scalar | None) -> Val:
        """x, at least min and at most max; None for no bound"""
    @overload
    def complex(self, a: TensorView, b: Operand) -> TensorView:
        """a + b i"""
    @overload
    def complex(self, a: Operand, b: TensorView) -> TensorView:
        """a + b i"""
    @overload
    def complex(self, a: Val, b: Scalar) -> Val:
        """a + b i"""
    @overload
    def complex(self, a: Scalar, b: Val) -> Val:
        """a + b i"""
    def conj(self, x: TensorView) -> TensorView:
        """The complex conjugate; a real tensor as it is."""
    def contract(self, a: TensorView, b: TensorView, dims: int) -> TensorView:
        """sum over the first `dims` dims of both operands of their products: `linear`'s gradient by the weight"""
    def convolution(self, input: TensorView, weight: TensorView, bias: TensorView | None = None, stride: Sequence[int] = ..., padding: Sequence[int] = ..., dilation: Sequence[int] = ..., transposed: bool = False, output_padding: Sequence[int | Val] = ..., groups: int = 1) -> TensorView:
        """convolution of [n, channels, ..] along 1 to 3 dims, as torch.convolution; `transposed` as its gradient"""
    def convolution_weight_bwd(self, grad: TensorView, input: TensorView, kernel: Sequence[int | Val], stride: Sequence[int] = ..., padding: Sequence[int] = ..., dilation: Sequence[int] = ..., groups: int = 1) -> TensorView:
        """the gradient of a convolution by its weight, of `kernel` taps"""
    @overload
    def cos(self, x: TensorView) -> TensorView:
        """cosine, of radians"""
    @overload
    def cos(self, x: Val) -> Val:
        """cosine, of radians"""
    @overload
    def cosh(self, x: TensorView) -> TensorView:
        """hyperbolic cosine"""
    @overload
    def cosh(self, x: Val) -> Val:
        """hyperbolic cosine"""
    def cross_entropy(self, logits: TensorView, targets: TensorView, reduction: str = 'mean', ignore_index: int | None = -100) -> TensorView:
        """-log softmax(logits)[target], reduced by "mean", "sum" or "none"; logits [.., V] and integer targets [..]."""
    def cummax(self, arg: TensorView, dim: int, init: Scalar | None = None) -> TensorView:
        """running maxima along `dim`"""
    def cummin(self, arg: TensorView, dim: int, init: Scalar | None = None) -> TensorView:
        """running minima along `dim`"""
    def cumprod(self, arg: TensorView, dim: int, init: Scalar | None = None) -> TensorView:
        """running products along `dim`"""
    def cumsum(self, arg: TensorView, dim: int, init: Scalar | None = None) -> TensorView:
        """running sums along `dim`, beginning with `init`"""
    def cumsum_bwd(self, grad: TensorView, dim: int) -> TensorView:
        """sums along `dim` of an element and all after it: the gradient of `cumsum`"""
    def cutlass_nvfp4_grouped_mm(self, mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView, problem_sizes: TensorView, expert_offsets: TensorView, sf_offsets: TensorView, dtype: DataType | torch.dtype = ...) -> TensorView:
        """grouped nvfp4 product; needs NVIDIA's kernels"""
    @overload
    def div(self, a: TensorView, b: Operand) -> TensorView:
        """a / b; of integers the quotient cut towards 0, as C has it; `a // b` as well"""
    @overload
    def div(self, a: Operand, b: TensorView) -> TensorView:
        """a / b; of integers the quotient cut towards 0, as C has it; `a // b` as well"""
    @overload
    def div(self, a: Val, b: Scalar) -> Val:
        """a / b; of integers the quotient cut towards 0, as C has it; `a // b` as well"""
    @overload
    def div(self, a: Scalar, b: Val) -> Val:
        """a / b; of integers the quotient cut towards 0, as C has it; `a // b` as well"""
    def dropout(self, x: TensorView, p: Scalar = 0.5, training: bool = True) -> TensorView:
        """Zeros with probability p, all others divided by 1 - p."""
    def embedding_bwd(self, grad: TensorView, index: TensorView, rows: int | Val) -> TensorView:
        """`rows` rows of zeros with those of `grad` added where `index` names them"""
    def embedding_fwd(self, input: TensorView, weight: TensorView, padding_idx: Scalar | None = None, max_norm: Scalar | None = None, norm_type: Scalar | None = None, scale_grad_by_freq: Scalar | None = None, sparse: Scalar | None = None) -> TensorView:
        """rows of `weight` by index, as torch's embedding"""
    @overload
    def eq(self, a: TensorView, b: Operand) -> TensorView:
        """whether a equals b"""
    @overload
    def eq(self, a: Operand, b: TensorView) -> TensorView:
        """whether a equals b"""
    @overload
    def eq(self, a: Val, b: Scalar) -> Val:
        """whether a equals b"""
    @overload
    def eq(self, a: Scalar, b: Val) -> Val:
        """whether a equals b"""
    @overload
    def erf(self, x: TensorView) -> TensorView:
        """error function"""
    @overload
    def erf(self, x: Val) -> Val:
        """error function"""
    @overload
    def erfc(self, x: TensorView) -> TensorView:
        """1 - erf(x)"""
    @overload
    def erfc(self, x: Val) -> Val:
        """1 - erf(x)"""
    def erfcinv(self, x: Operand) -> TensorView:
        """inverse of `erfc`"""
    def erfinv(self, x: Operand) -> TensorView:
        """inverse of `erf`"""
    @overload
    def exp(self, x: TensorView) -> TensorView:
        """e to the power x"""
    @overload
    def exp(self, x: Val) -> Val:
        """e to the power x"""
    @overload
    def exp2(self, x: TensorView) -> TensorView:
        """2 to the power x"""
    @overload
    def exp2(self, x: Val) -> Val:
        """2 to the power x"""
    def expand(self, arg: TensorView, shape: Sequence[int | Val]) -> TensorView:
        """dims of size 1, and new ones in front, repeated to `shape`; -1 leaves a dim as it is"""
    @overload
    def expm1(self, x: TensorView) -> TensorView:
        """exp(x) - 1, exact near 0"""
    @overload
    def expm1(self, x: Val) -> Val:
        """exp(x) - 1, exact near 0"""
    @overload
    def flip(self, x: TensorView, dims: int | Sequence[int]) -> TensorView:
        """The elements in the opposite order along dims."""
    @overload
    def flip(self, x: TensorView, *, dim: int | Sequence[int]) -> TensorView:
        """The elements in the opposite order along dims."""
    @overload
    def floor(self, x: TensorView) -> TensorView:
        """greatest integer not above x, in x's type"""
    @overload
    def floor(self, x: Val) -> Val:
        """greatest integer not above x, in x's type"""
    @overload
    def fmod(self, a: TensorView, b: Operand) -> TensorView:
        """a - b * trunc(a / b): the sign is a's"""
    @overload
    def fmod(self, a: Operand, b: TensorView) -> TensorView:
        """a - b * trunc(a / b): the sign is a's"""
    @overload
    def fmod(self, a: Val, b: Scalar) -> Val:
        """a - b * trunc(a / b): the sign is a's"""
    @overload
    def fmod(self, a: Scalar, b: Val) -> Val:
        """a - b * trunc(a / b): the sign is a's"""
    @overload
    def frac(self, x: TensorView) -> TensorView:
        """x - trunc(x)"""
    @overload
    def frac(self, x: Val) -> Val:
        """x - trunc(x)"""
    def full(self, shape: Sequence[int | Val], fill_value: Scalar, dtype: DataType | torch.dtype) -> TensorView:
        """a tensor of one number"""
    def gather(self, arg: TensorView, index: TensorView, dim: int) -> TensorView:
        """elements along `dim` by an index of the result's shape, as torch.gather"""
    @overload
    def gcd(self, a: TensorView, b: Operand) -> TensorView:
        """greatest common divisor"""
    @overload
    def gcd(self, a: Operand, b: TensorView) -> TensorView:
        """greatest common divisor"""
    @overload
    def gcd(self, a: Val, b: Scalar) -> Val:
        """greatest common divisor"""
    @overload
    def gcd(self, a: Scalar, b: Val) -> Val:
        """greatest common divisor"""
    @overload
    def ge(self, a: TensorView, b: Operand) -> TensorView:
        """`a >= b`"""
    @overload
    def ge(self, a: Operand, b: TensorView) -> TensorView:
        """`a >= b`"""
    @overload
    def ge(self, a: Val, b: Scalar) -> Val:
        """`a >= b`"""
    @overload
    def ge(self, a: Scalar, b: Val) -> Val:
        """`a >= b`"""
    def gelu(self, x: TensorView, approximate: str = 'none') -> TensorView:
        """The Gaussian error linear unit, exact or by tanh (Hendrycks & Gimpel 2016)."""
    def group_norm(self, x: TensorView, groups: int, weight: TensorView | None = None, bias: TensorView | None = None, eps: Scalar = 1e-05) -> TensorView:
        """x [n, channels, ..] normalised over each image's channels of a group (Wu & He 2018)."""
    def grouped_mm(self, mat1: TensorView, mat2: TensorView, offsets: TensorView) -> TensorView | tuple[TensorView, TensorView | None, TensorView | None]:
        """A product of groups: a tensor; with scales, three results as of `scaled_mm`."""
    @overload
    def gt(self, a: TensorView, b: Operand) -> TensorView:
        """`a > b`"""
    @overload
    def gt(self, a: Operand, b: TensorView) -> TensorView:
        """`a > b`"""
    @overload
    def gt(self, a: Val, b: Scalar) -> Val:
        """`a > b`"""
    @overload
    def gt(self, a: Scalar, b: Val) -> Val:
        """`a > b`"""
    def histc(self, x: TensorView, bins: int = 100, min: float = 0, max: float = 0) -> TensorView:
        """How many elements lie in each of `bins` equal intervals from min to max; others, and NaN, do not count."""
    @overload
    def imag(self, x: TensorView) -> TensorView:
        """imaginary part"""
    @overload
    def imag(self, x: Val) -> Val:
        """imaginary part"""
    def index(self, x: TensorView, indices: Sequence[TensorView | None]) -> TensorView:
        """x[indices]: a tensor of integers, or None for all, by dim from the first on; negative ones count from the end."""
    def index_add(self, x: TensorView, dim: int, index: TensorView, source: TensorView, alpha: float = 1) -> TensorView:
        """x with the slices of source, times alpha, added to those that the index [m] names along a dim."""
    def index_put(self, x: TensorView, indices: Sequence[TensorView | None], values: TensorView, accumulate: bool = False) -> TensorView:
        """x with values at the places that `index` would read, or with `accumulate` added to what stands there."""
    def index_select(self, arg: TensorView, index: TensorView, dim: int) -> TensorView:
        """the slices of `dim` that a list of indices names"""
    def instance_norm(self, x: TensorView, weight: TensorView | None = None, bias: TensorView | None = None, eps: Scalar = 1e-05) -> TensorView:
        """x [n, channels, ..] normalised over each image's and channel's spatial dims (Ulyanov et al. 2016)."""
    def iota(self, length: int | Val, start: Scalar | None = None, step: Scalar | None = None, dtype: DataType | torch.dtype = ...) -> TensorView:
        """`start`, `start` + `step`, ...: `length` numbers"""
    @overload
    def isfinite(self, x: TensorView) -> TensorView:
        """whether x is neither infinite nor NaN"""
    @overload
    def isfinite(self, x: Val) -> Val:
        """whether x is neither infinite nor NaN"""
    @overload
    def isinf(self, x: TensorView) -> TensorView:
        """whether x is infinite"""
    @overload
    def isinf(self, x: Val) -> Val:
        """whether x is infinite"""
    @overload
    def isnan(self, x: TensorView) -> TensorView:
        """whether x is NaN"""
    @overload
    def isnan(self, x: Val) -> Val:
        """whether x is NaN"""
    @overload
    def isneginf(self, x: TensorView) -> TensorView:
        """whether x is minus infinity"""
    @overload
    def isneginf(self, x: Val) -> Val:
        """whether x is minus infinity"""
    @overload
    def isposinf(self, x: TensorView) -> TensorView:
        """whether x is plus infinity"""
    @overload
    def isposinf(self, x: Val) -> Val:
        """whether x is plus infinity"""
    @overload
    def isreal(self, x: TensorView) -> TensorView:
        """whether x has no imaginary part"""
    @overload
    def isreal(self, x: Val) -> Val:
        """whether x has no imaginary part"""
    def layer_norm(self, x: TensorView, normalized_shape: Sequence[int | Val], weight: TensorView | None = None, bias: TensorView | None = None, eps: Scalar = 1e-05) -> TensorView:
        """(x - mean) / sqrt(variance + eps) over the last dims, times weight, plus bias (Ba et al. 2016)."""
    @overload
    def le(self, a: TensorView, b: Operand) -> TensorView:
        """`a <= b`"""
    @overload
    def le(self, a: Operand, b: TensorView) -> TensorView:
        """`a <= b`"""
    @overload
    def le(self, a: Val, b: Scalar) -> Val:
        """`a <= b`"""
    @overload
    def le(self, a: Scalar, b: Val) -> Val:
        """`a <= b`"""
    @overload
    def lerp(self, start: TensorView, end: Operand, weight: Operand) -> TensorView:
        """start + weight * (end - start)"""
    @overload
    def lerp(self, start: Operand, end: TensorView, weight: Operand) -> TensorView:
        """start + weight * (end - start)"""
    @overload
    def lerp(self, start: Operand, end: Operand, weight: TensorView) -> TensorView:
        """start + weight * (end - start)"""
    @overload
    def lerp(self, start: Val, end: Scalar, weight: Scalar) -> Val:
        """start + weight * (end - start)"""
    @overload
    def lerp(self, start: Scalar, end: Val, weight: Scalar) -> Val:
        """start + weight * (end - start)"""
    @overload
    def lerp(self, start: Scalar, end: Scalar, weight: Val) -> Val:
        """start + weight * (end - start)"""
    @overload
    def lgamma(self, x: TensorView) -> TensorView:
        """logarithm of the gamma function's magnitude"""
    @overload
    def lgamma(self, x: Val) -> Val:
        """logarithm of the gamma function's magnitude"""
    def linear(self, input: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
        """`input` times the transpose of `weight`, plus `bias`; a 3-d weight is a stack of weights"""
    def linear_index(self, indices: Sequence[TensorView], sizes: Sequence[int | Val], from_end: bool = True) -> TensorView:
        """indices of several dims as one index of these dims merged, in row-major order"""
    @overload
    def log(self, x: TensorView) -> TensorView:
        """natural logarithm"""
    @overload
    def log(self, x: Val) -> Val:
        """natural logarithm"""
    @overload
    def log10(self, x: TensorView) -> TensorView:
        """logarithm to base 10"""
    @overload
    def log10(self, x: Val) -> Val:
        """logarithm to base 10"""
    @overload
    def log1p(self, x: TensorView) -> TensorView:
        """log(1 + x), exact near 0"""
    @overload
    def log1p(self, x: Val) -> Val:
        """log(1 + x), exact near 0"""
    @overload
    def log2(self, x: TensorView) -> TensorView:
        """logarithm to base 2"""
    @overload
    def log2(self, x: Val) -> Val:
        """logarithm to base 2"""
    def log_softmax(self, x: TensorView, dim: int = -1, dtype: DataType | torch.dtype | None = None) -> TensorView:
        """The logarithm of softmax."""
    @overload
    def logical_and(self, a: TensorView, b: Operand) -> TensorView:
        """whether neither is 0"""
    @overload
    def logical_and(self, a: Operand, b: TensorView) -> TensorView:
        """whether neither is 0"""
    @overload
    def logical_and(self, a: Val, b: Scalar) -> Val:
        """whether neither is 0"""
    @overload
    def logical_and(self, a: Scalar, b: Val) -> Val:
        """whether neither is 0"""
    @overload
    def logical_not(self, x: TensorView) -> TensorView:
        """whether x is 0"""
    @overload
    def logical_not(self, x: Val) -> Val:
        """whether x is 0"""
    @overload
    def logical_or(self, a: TensorView, b: Operand) -> TensorView:
        """whether one is not 0"""
    @overload
    def logical_or(self, a: Operand, b: TensorView) -> TensorView:
        """whether one is not 0"""
    @overload
    def logical_or(self, a: Val, b: Scalar) -> Val:
        """whether one is not 0"""
    @overload
    def logical_or(self, a: Scalar, b: Val) -> Val:
        """whether one is not 0"""
    def logical_right_shift(self, a: Operand, b: Operand) -> TensorView:
        """the bits of a moved right by b, zeros moved in"""
    @overload
    def logsumexp(self, x: TensorView, dims: int | Sequence[int] | None, keepdim: bool = False) -> TensorView:
        """The logarithm of the sum of exp(x) over dims."""
    @overload
    def logsumexp(self, x: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False) -> TensorView:
        """The logarithm of the sum of exp(x) over dims."""
    @overload
    def lt(self, a: TensorView, b: Operand) -> TensorView:
        """`a < b`"""
    @overload
    def lt(self, a: Operand, b: TensorView) -> TensorView:
        """`a < b`"""
    @overload
    def lt(self, a: Val, b: Scalar) -> Val:
        """`a < b`"""
    @overload
    def lt(self, a: Scalar, b: Val) -> Val:
        """`a < b`"""
    def matmul(self, a: TensorView, b: TensorView) -> TensorView:
        """matrix product, as torch.matmul: vectors, matrices, and batches that broadcast"""
    @overload
    def max(self, arg: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype = ..., empty: bool = False) -> TensorView:
        """the greatest element over `dims`; of none an error, or with `empty` the type's lowest number"""
    @overload
    def max(self, arg: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype = ..., empty: bool = False) -> TensorView:
        """the greatest element over `dims`; of none an error, or with `empty` the type's lowest number"""
    def max_pool(self, x: TensorView, kernel: int | Sequence[int], stride: int | Sequence[int] | None = None, padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, ceil_mode: bool = False) -> tuple[TensorView, TensorView]:
        """(the maximum of each window, its place among all elements of the spatial dims), as torch's max_pool1d to 3d."""
    @overload
    def maximum(self, a: TensorView, b: Operand) -> TensorView:
        """the greater of a and b"""
    @overload
    def maximum(self, a: Operand, b: TensorView) -> TensorView:
        """the greater of a and b"""
    @overload
    def maximum(self, a: Val, b: Scalar) -> Val:
        """the greater of a and b"""
    @overload
    def maximum(self, a: Scalar, b: Val) -> Val:
        """the greater of a and b"""
    @overload
    def mean(self, x: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype | None = None) -> TensorView:
        """The mean over dims (all of them for None)."""
    @overload
    def mean(self, x: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype | None = None) -> TensorView:
        """The mean over dims (all of them for None)."""
    @overload
    def min(self, arg: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype = ..., empty: bool = False) -> TensorView:
        """the least element over `dims`; of none an error, or with `empty` the type's highest number"""
    @overload
    def min(self, arg: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype = ..., empty: bool = False) -> TensorView:
        """the least element over `dims`; of none an error, or with `empty` the type's highest number"""
    @overload
    def minimum(self, a: TensorView, b: Operand) -> TensorView:
        """the less of a and b"""
    @overload
    def minimum(self, a: Operand, b: TensorView) -> TensorView:
        """the less of a and b"""
    @overload
    def minimum(self, a: Val, b: Scalar) -> Val:
        """the less of a and b"""
    @overload
    def minimum(self, a: Scalar, b: Val) -> Val:
        """the less of a and b"""
    @overload
    def mod(self, a: TensorView, b: Operand) -> TensorView:
        """remainder, the sign is a's; `a % b` as well"""
    @overload
    def mod(self, a: Operand, b: TensorView) -> TensorView:
        """remainder, the sign is a's; `a % b` as well"""
    @overload
    def mod(self, a: Val, b: Scalar) -> Val:
        """remainder, the sign is a's; `a % b` as well"""
    @overload
    def mod(self, a: Scalar, b: Val) -> Val:
        """remainder, the sign is a's; `a % b` as well"""
    def moe_collect(self, rows: TensorView, experts: TensorView) -> TensorView:
        """[tokens, slots, width]: rows of experts back at their tokens"""
    def moe_combine(self, rows: TensorView, experts: TensorView, scores: TensorView) -> TensorView:
        """[tokens, width]: for each token the sum of its rows times their scores, [tokens, slots]: always in one order."""
    def moe_dispatch(self, x: TensorView, experts: TensorView, num_experts: int) -> tuple[TensorView, TensorView]:
        """(rows, expert): the rows of tokens at the experts, [tokens, slots], that they go to; x is [tokens, width], or [tokens, slots, width] with a row for every slot"""
    def moe_linear(self, rows: TensorView, expert: TensorView, weight: TensorView, transposed: bool = False) -> TensorView:
        """rows times the matrices of their experts, [experts, in, out], or [experts, out, in] if `transposed`"""
    def moe_swiglu(self, rows: TensorView) -> TensorView:
        """silu(gate) * up, for rows of gate and up one behind the other"""
    def moe_swiglu_bwd(self, grad: TensorView, rows: TensorView) -> TensorView:
        """the gradient of `moe_swiglu` by its rows"""
    def moe_weight_gradient(self, left: TensorView, right: TensorView, expert: TensorView) -> TensorView:
        """[experts, m, n]: for each expert the product of its rows of `left` and of `right`"""
    @overload
    def mul(self, a: TensorView, b: Operand) -> TensorView:
        """a * b"""
    @overload
    def mul(self, a: Operand, b: TensorView) -> TensorView:
        """a * b"""
    @overload
    def mul(self, a: Val, b: Scalar) -> Val:
        """a * b"""
    @overload
    def mul(self, a: Scalar, b: Val) -> Val:
        """a * b"""
    @overload
    def nansum(self, arg: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the sum over `dims` of what is not NaN: of data with gaps"""
    @overload
    def nansum(self, arg: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the sum over `dims` of what is not NaN: of data with gaps"""
    def native_group_norm(self, x: TensorView, groups: int, weight: TensorView | None = None, bias: TensorView | None = None, eps: Scalar = 1e-05) -> tuple[TensorView, TensorView, TensorView]:
        """(x normalised, mean [n, groups], 1 / standard deviation [n, groups]), of x [n, channels, ..] (Wu & He 2018)."""
    def native_layer_norm(self, x: TensorView, normalized_shape: Sequence[int | Val], weight: TensorView | None = None, bias: TensorView | None = None, eps: Scalar = 1e-05) -> tuple[TensorView, TensorView, TensorView]:
        """(layer_norm, mean, 1 / standard deviation); the last two have the normalised dims with size 1."""
    @overload
    def ne(self, a: TensorView, b: Operand) -> TensorView:
        """whether a differs from b"""
    @overload
    def ne(self, a: Operand, b: TensorView) -> TensorView:
        """whether a differs from b"""
    @overload
    def ne(self, a: Val, b: Scalar) -> Val:
        """whether a differs from b"""
    @overload
    def ne(self, a: Scalar, b: Val) -> Val:
        """whether a differs from b"""
    @overload
    def neg(self, x: TensorView) -> TensorView:
        """-x"""
    @overload
    def neg(self, x: Val) -> Val:
        """-x"""
    @overload
    def nextafter(self, a: TensorView, b: Operand) -> TensorView:
        """the next number after a towards b"""
    @overload
    def nextafter(self, a: Operand, b: TensorView) -> TensorView:
        """the next number after a towards b"""
    @overload
    def nextafter(self, a: Val, b: Scalar) -> Val:
        """the next number after a towards b"""
    @overload
    def nextafter(self, a: Scalar, b: Val) -> Val:
        """the next number after a towards b"""
    def normal(self, mean: Scalar, std: Scalar, shape: Sequence[int | Val], rng_seed: Scalar | None = None, rng_offset: Scalar | None = None, dtype: DataType | torch.dtype = ...) -> TensorView:
        """normally distributed random numbers, the same on every mesh"""
    def nv_block_quantize(self, input: TensorView, global_scale: TensorView | None = None, swizzle_block_scales: bool = False, block_size: int = 16, dtype: DataType | torch.dtype = ...) -> tuple[TensorView, TensorView]:
        """nvfp4 numbers and their blocks' scales; needs NVIDIA's kernels"""
    def nv_grouped_block_quantize(self, input: TensorView, input_offsets: TensorView, output_offsets: TensorView, global_scale: TensorView | None = None, block_size: int = 16, dtype: DataType | torch.dtype = ...) -> tuple[TensorView, TensorView]:
        """the same, group by group; needs NVIDIA's kernels"""
    def pad(self, arg: TensorView, pad_widths: Sequence[int | Val], value: Scalar | None = None) -> TensorView:
        """`value` (0) before and after; widths in pairs from the last dim on, as in torch; negative ones cut"""
    def permute(self, arg: TensorView, dims: Sequence[int]) -> TensorView:
        """dims in another order: dim i of the result is dim `dims[i]` of the operand"""
    @overload
    def pow(self, a: TensorView, b: Operand) -> TensorView:
        """a to the power b; `a ** b` as well"""
    @overload
    def pow(self, a: Operand, b: TensorView) -> TensorView:
        """a to the power b; `a ** b` as well"""
    @overload
    def pow(self, a: Val, b: Scalar) -> Val:
        """a to the power b; `a ** b` as well"""
    @overload
    def pow(self, a: Scalar, b: Val) -> Val:
        """a to the power b; `a ** b` as well"""
    def preprocess_grouped_matmul_input_sf(self, input: TensorView, input_offsets: TensorView, output_offsets: TensorView) -> TensorView:
        """scales in the order that the grouped product reads; needs NVIDIA's kernels"""
    @overload
    def prod(self, arg: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the product over `dims`"""
    @overload
    def prod(self, arg: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the product over `dims`"""
    def rand_like(self, arg: TensorView) -> TensorView:
        """random numbers from 0 to 1 in the operand's shape"""
    def randn_like(self, arg: TensorView) -> TensorView:
        """standard normal random numbers in the operand's shape"""
    @overload
    def real(self, x: TensorView) -> TensorView:
        """real part"""
    @overload
    def real(self, x: Val) -> Val:
        """real part"""
    @overload
    def reciprocal(self, x: TensorView) -> TensorView:
        """1 / x"""
    @overload
    def reciprocal(self, x: Val) -> Val:
        """1 / x"""
    @overload
    def relu(self, x: TensorView) -> TensorView:
        """x where positive, else 0"""
    @overload
    def relu(self, x: Val) -> Val:
        """x where positive, else 0"""
    @overload
    def remainder(self, a: TensorView, b: Operand) -> TensorView:
        """a - b * floor(a / b): the sign is b's"""
    @overload
    def remainder(self, a: Operand, b: TensorView) -> TensorView:
        """a - b * floor(a / b): the sign is b's"""
    @overload
    def remainder(self, a: Val, b: Scalar) -> Val:
        """a - b * floor(a / b): the sign is b's"""
    @overload
    def remainder(self, a: Scalar, b: Val) -> Val:
        """a - b * floor(a / b): the sign is b's"""
    def reorder_blocks(self, arg: TensorView, dim: int, order: Sequence[int]) -> TensorView:
        """the equal blocks of `dim` in another order: block i was block `order[i]`"""
    def reshape(self, arg: TensorView, new_shape: Sequence[int | Val]) -> TensorView:
        """the same elements in row-major order under another shape; a -1 is worked out"""
    def ring_attention(self, query: TensorView, key: TensorView, value: TensorView, ring: int, is_causal: bool = False, scale: Scalar | None = None, zigzag: bool = False, bias: TensorView | None = None, mask: TensorView | None = None) -> tuple[TensorView, TensorView]:
        """attention in rounds: blocks of keys and values travel through a ring of ranks"""
    def ring_attention_bwd(self, grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, ring: int, is_causal: bool = False, scale: Scalar | None = None, zigzag: bool = False, grad_logsumexp: TensorView | None = None, bias: TensorView | None = None, mask: TensorView | None = None) -> tuple[TensorView, TensorView, TensorView]:
        """the gradients of `ring_attention` by query, key and value"""
    def rms_norm(self, x: TensorView, normalized_shape: Sequence[int | Val], weight: TensorView | None = None, eps: Scalar | None = None) -> TensorView:
        """x / sqrt(mean(x²) + eps) over the last dims, times weight (Zhang & Sennrich 2019)."""
    @overload
    def roll(self, x: TensorView, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> TensorView:
        """The elements moved on along dims, those of the end to the beginning; without dims, of the flattened tensor."""
    @overload
    def roll(self, x: TensorView, shifts: int | Sequence[int], *, dim: int | Sequence[int] | None) -> TensorView:
        """The elements moved on along dims, those of the end to the beginning; without dims, of the flattened tensor."""
    @overload
    def round(self, x: TensorView) -> TensorView:
        """nearest integer, in x's type; halves go to the even one"""
    @overload
    def round(self, x: Val) -> Val:
        """nearest integer, in x's type; halves go to the even one"""
    @overload
    def rsqrt(self, x: TensorView) -> TensorView:
        """1 / sqrt(x)"""
    @overload
    def rsqrt(self, x: Val) -> Val:
        """1 / sqrt(x)"""
    def scaled_grouped_mm(self, mat1: TensorView, mat2: TensorView, offsets: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DataType | torch.dtype = ..., output_block_scale_size: int = 0, output_block_scale_dtype: DataType | torch.dtype = ..., output_gamma: bool = False) -> TensorView:
        """grouped product of block-scaled operands; needs NVIDIA's kernels"""
    def scaled_mm(self, mat1: TensorView, mat2: TensorView, scale1: TensorView, scale2: TensorView, alpha: TensorView | None = None, bias: TensorView | None = None, beta: TensorView | None = None, dtype: DataType | torch.dtype = ..., output_block_scale_size: int = 0, output_block_scale_dtype: DataType | torch.dtype = ..., output_gamma: bool = False) -> tuple[TensorView, TensorView | None, TensorView | None]:
        """(product, scales of its blocks or None, its global scale or None)."""
    def scatter(self, arg: TensorView, index: TensorView, src: Operand, dim: int) -> TensorView:
        """`arg` with `src` written along `dim` at the places that `index` names"""
    def scatter_add(self, x: TensorView, dim: int, index: TensorView, src: TensorView) -> TensorView:
        """x with the elements of src added to those that the index, of its shape or shorter, names along a dim."""
    def scatter_max(self, arg: TensorView, index: TensorView, src: TensorView, dim: int) -> TensorView:
        """the greatest of what `src` writes along `dim` by `index`, and of `arg`"""
    def scatter_min(self, arg: TensorView, index: TensorView, src: TensorView, dim: int) -> TensorView:
        """the least of what `src` writes along `dim` by `index`, and of `arg`"""
    def scatter_prod(self, arg: TensorView, index: TensorView, src: TensorView, dim: int) -> TensorView:
        """the product of what `src` writes along `dim` by `index`, and of `arg`"""
    def scatter_reduce(self, x: TensorView, dim: int, index: TensorView, src: TensorView, reduce: str, include_self: bool = True) -> TensorView:
        """x with the elements of src combined into those that the index names: by "sum", "mean", "prod", "amax", "amin"."""
    def sdpfa_bwd(self, grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: Scalar | None, is_causal: Scalar | None, philox_seed: TensorView, philox_offset: TensorView, scale: Scalar | None = None, bias: TensorView | None = None, mask: TensorView | None = None) -> tuple[TensorView, TensorView, TensorView]:
        """the gradients of `sdpfa_fwd` by query, key and value"""
    def sdpfa_bwd_added(self, grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: Scalar | None, is_causal: Scalar | None, philox_seed: TensorView, philox_offset: TensorView, scale: Scalar | None = None, bias: TensorView | None = None, mask: TensorView | None = None, of_mask: bool = False) -> TensorView:
        """attention's gradient by its bias, or with `of_mask` by its mask of numbers"""
    def sdpfa_bwd_kv(self, grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: Scalar | None, is_causal: Scalar | None, philox_seed: TensorView, philox_offset: TensorView, scale: Scalar | None = None, bias: TensorView | None = None, mask: TensorView | None = None, grad_logsumexp: TensorView | None = None) -> tuple[TensorView, TensorView]:
        """attention's gradients by key and value"""
    def sdpfa_bwd_q(self, grad_output: TensorView, query: TensorView, key: TensorView, value: TensorView, output: TensorView, logsumexp: TensorView, dropout_p: Scalar | None, is_causal: Scalar | None, philox_seed: TensorView, philox_offset: TensorView, scale: Scalar | None = None, bias: TensorView | None = None, mask: TensorView | None = None, grad_logsumexp: TensorView | None = None) -> TensorView:
        """attention's gradient by the query"""
    def sdpfa_fwd(self, query: TensorView, key: TensorView, value: TensorView, bias: TensorView | None = None, mask: TensorView | None = None, dropout_p: Scalar | None = None, is_causal: Scalar | None = None, scale: Scalar | None = None) -> tuple[TensorView, TensorView, TensorView, TensorView]:
        """scaled dot product attention: output, log-sum-exp of the rows, and the random state"""
    @overload
    def segment_set(self, arg: TensorView) -> TensorView:
        """x itself; nvFuser begins another kernel after it"""
    @overload
    def segment_set(self, arg: Val) -> Val:
        """x itself; nvFuser begins another kernel after it"""
    def select(self, arg: TensorView, index: Scalar, dim: int) -> TensorView:
        """one slice of `dim`, which goes"""
    def select_bwd(self, grad: TensorView, index: Scalar, dim: int, size: int | Val) -> TensorView:
        """zeros with `grad` at one place of a new dim `dim`: the gradient of `select`"""
    def select_scatter(self, x: TensorView, src: TensorView, dim: int, index: int | Val) -> TensorView:
        """x with src in place of one index of a dim, which may be a scalar; a sharded dim needs no communication."""
    @overload
    def set(self, arg: TensorView) -> TensorView:
        """x itself: a place for an annotation of its own"""
    @overload
    def set(self, arg: Val) -> Val:
        """x itself: a place for an annotation of its own"""
    def shape(self, arg: TensorView) -> list[Val]:
        """The sizes of all dims, as scalars of the definition."""
    @overload
    def sigmoid(self, x: TensorView) -> TensorView:
        """1 / (1 + exp(-x))"""
    @overload
    def sigmoid(self, x: Val) -> Val:
        """1 / (1 + exp(-x))"""
    @overload
    def sign(self, x: TensorView) -> TensorView:
        """-1, 0 or 1"""
    @overload
    def sign(self, x: Val) -> Val:
        """-1, 0 or 1"""
    @overload
    def signbit(self, x: TensorView) -> TensorView:
        """whether x's sign is negative, -0.0 included"""
    @overload
    def signbit(self, x: Val) -> Val:
        """whether x's sign is negative, -0.0 included"""
    @overload
    def silu(self, x: TensorView) -> TensorView:
        """x * sigmoid(x)"""
    @overload
    def silu(self, x: Val) -> Val:
        """x * sigmoid(x)"""
    @overload
    def sin(self, x: TensorView) -> TensorView:
        """sine, of radians"""
    @overload
    def sin(self, x: Val) -> Val:
        """sine, of radians"""
    @overload
    def sinh(self, x: TensorView) -> TensorView:
        """hyperbolic sine"""
    @overload
    def sinh(self, x: Val) -> Val:
        """hyperbolic sine"""
    def size(self, arg: TensorView, dim: int) -> Val:
        """The size of a dim, as a scalar of the definition."""
    def sized(self, arg: TensorView, shape: Sequence[int | Val]) -> TensorView:
        """the operand, whose sizes must be `shape`: what is seen once open sizes are known"""
    def slice(self, arg: TensorView, start_indices: Sequence[int | Val], end_indices: Sequence[int | Val], strides: Sequence[int | Val] | None = None, manual_normalization: bool = False) -> TensorView:
        """elements `start_indices` to `end_indices` of every dim, in steps of `strides`"""
    def slice_scatter(self, x: TensorView, src: TensorView, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorView:
        """x with src in place of the elements start, start + step, ... below end of a dim."""
    def softmax(self, x: TensorView, dim: int = -1, dtype: DataType | torch.dtype | None = None) -> TensorView:
        """exp(x) over its sum along a dim."""
    def sort(self, x: TensorView, dim: int = -1, descending: bool = False) -> tuple[TensorView, TensorView]:
        """(the elements in order along a dim, their indices). Equal elements keep their order."""
    @overload
    def sqrt(self, x: TensorView) -> TensorView:
        """square root"""
    @overload
    def sqrt(self, x: Val) -> Val:
        """square root"""
    def squeeze(self, arg: TensorView, dims: int | Sequence[int], squeeze_expanded: bool = False) -> TensorView:
        """without `dims`, which have size 1"""
    def stride_order(self, arg: TensorView, stride_order: Sequence[int]) -> TensorView:
        """the same tensor, laid out in memory in this order of dims (0 is the fastest)"""
    @overload
    def sub(self, a: TensorView, b: Operand) -> TensorView:
        """a - b"""
    @overload
    def sub(self, a: Operand, b: TensorView) -> TensorView:
        """a - b"""
    @overload
    def sub(self, a: Val, b: Scalar) -> Val:
        """a - b"""
    @overload
    def sub(self, a: Scalar, b: Val) -> Val:
        """a - b"""
    @overload
    def sum(self, arg: TensorView, dims: int | Sequence[int] | None = None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the sum over `dims` (all of them for None); integers and bools are summed as Int"""
    @overload
    def sum(self, arg: TensorView, *, dim: int | Sequence[int] | None, keepdim: bool = False, dtype: DataType | torch.dtype = ...) -> TensorView:
        """the sum over `dims` (all of them for None); integers and bools are summed as Int"""
    def sum_to(self, arg: TensorView, shape: Sequence[int | Val]) -> TensorView:
        """sums over the dims that are of size 1 in `shape`: the gradient of what was repeated along them"""
    def take_along_axis(self, arg: TensorView, index: TensorView, dim: int) -> TensorView:
        """elements along `dim` by an index that broadcasts against the other dims"""
    def take_along_axis_bwd(self, grad: TensorView, index: TensorView, dim: int, size: int | Val) -> TensorView:
        """zeros with `grad` added along `dim` at the places that `index` names"""
    @overload
    def tan(self, x: TensorView) -> TensorView:
        """tangent, of radians"""
    @overload
    def tan(self, x: Val) -> Val:
        """tangent, of radians"""
    @overload
    def tanh(self, x: TensorView) -> TensorView:
        """hyperbolic tangent"""
    @overload
    def tanh(self, x: Val) -> Val:
        """hyperbolic tangent"""
    @overload
    def threshold(self, x: TensorView, threshold: Scalar | None, value: Scalar | None) -> TensorView:
        """x where it is greater than the threshold, else the value"""
    @overload
    def threshold(self, x: Val, threshold: Scalar | None, value: Scalar | None) -> Val:
        """x where it is greater than the threshold, else the value"""
    def topk(self, arg: TensorView, k: int | Val, dim: int = -1, largest: bool = True, sorted: bool = False) -> tuple[TensorView, TensorView]:
        """the `k` greatest (or least) along `dim`, and their indices"""
    def triu(self, arg: TensorView, diagonal: int = 0) -> TensorView:
        """zeros below a diagonal of the last two dims"""
    @overload
    def truediv(self, a: TensorView, b: Operand) -> TensorView:
        """a / b, in floating point"""
    @overload
    def truediv(self, a: Operand, b: TensorView) -> TensorView:
        """a / b, in floating point"""
    @overload
    def truediv(self, a: Val, b: Scalar) -> Val:
        """a / b, in floating point"""
    @overload
    def truediv(self, a: Scalar, b: Val) -> Val:
        """a / b, in floating point"""
    @overload
    def trunc(self, x: TensorView) -> TensorView:
        """integer part, in x's type"""
    @overload
    def trunc(self, x: Val) -> Val:
        """integer part, in x's type"""
    def unfold(self, x: TensorView, dim: int, size: int, step: int) -> TensorView:
        """Windows of a dim, `size` elements each and `step` apart: [.., windows, .., size]."""
    def uniform(self, minval: Scalar, maxval: Scalar, shape: Sequence[int | Val], rng_seed: Scalar | None = None, rng_offset: Scalar | None = None, dtype: DataType | torch.dtype = ...) -> TensorView:
        """random numbers from `minval` to `maxval`, the same on every mesh"""
    def unzigzag(self, x: TensorView, dim: int, ring: int) -> TensorView:
        """The inverse of `zigzag`: chunks in the order of the sequence."""
    def upsample_linear(self, x: TensorView, output_size: Sequence[int], align_corners: bool = False) -> TensorView:
        """Linear interpolation along each spatial dim: torch's modes linear, bilinear and trilinear."""
    def upsample_nearest(self, x: TensorView, output_size: Sequence[int]) -> TensorView:
        """Each element of the result is the one of x at the same place, scaled and rounded down, as in torch."""
    @overload
    def var(self, arg: TensorView, dims: int | Sequence[int] | None, correction: int = 1, keepdim: bool = False) -> TensorView:
        """variance over `dims`, divided by n - `correction`"""
    @overload
    def var(self, arg: TensorView, *, dim: int | Sequence[int] | None, correction: int = 1, keepdim: bool = False) -> TensorView:
        """variance over `dims`, divided by n - `correction`"""
    @overload
    def var_mean(self, arg: TensorView, dims: int | Sequence[int] | None, correction: int = 1, keepdim: bool = False) -> tuple[TensorView, TensorView]:
        """variance and mean over `dims`, in one pass"""
    @overload
    def var_mean(self, arg: TensorView, *, dim: int | Sequence[int] | None, correction: int = 1, keepdim: bool = False) -> tuple[TensorView, TensorView]:
        """variance and mean over `dims`, in one pass"""
    def view_as_complex(self, x: TensorView) -> TensorView:
        """Complex numbers from real and imaginary parts, which are the last dim, of size 2."""
    def view_as_real(self, x: TensorView) -> TensorView:
        """Real and imaginary parts as a last dim of size 2."""
    @overload
    def welford(self, arg: TensorView, dims: int | Sequence[int] | None) -> tuple[TensorView, TensorView, TensorView]:
        """mean, sum of squared differences from it, and count, over `dims`"""
    @overload
    def welford(self, arg: TensorView, *, dim: int | Sequence[int] | None) -> tuple[TensorView, TensorView, TensorView]:
        """mean, sum of squared differences from it, and count, over `dims`"""
    @overload
    def where(self, condition: TensorView, a: Operand, b: Operand) -> TensorView:
        """a where the condition holds, b elsewhere"""
    @overload
    def where(self, condition: Operand, a: TensorView, b: Operand) -> TensorView:
        """a where the condition holds, b elsewhere"""
    @overload
    def where(self, condition: Operand, a: Operand, b: TensorView) -> TensorView:
        """a where the condition holds, b elsewhere"""
    @overload
    def where(self, condition: Val, a: Scalar, b: Scalar) -> Val:
        """a where the condition holds, b elsewhere"""
    @overload
    def where(self, condition: Scalar, a: Val, b: Scalar) -> Val:
        """a where the condition holds, b elsewhere"""
    @overload
    def where(self, condition: Scalar, a: Scalar, b: Val) -> Val:
        """a where the condition holds, b elsewhere"""
    def window_max(self, arg: TensorView, kernel: Sequence[int], stride: Sequence[int], before: Sequence[int] = ..., after: Sequence[int | Val] = ..., dilation: Sequence[int] = ...) -> tuple[TensorView, TensorView]:
        """maxima of windows that slide along 1 to 3 dims of [n, channels, ..], and their places in these dims"""
    def window_max_bwd(self, grad: TensorView, index: TensorView, sizes: Sequence[int | Val], kernel: Sequence[int], stride: Sequence[int], before: Sequence[int] = ..., dilation: Sequence[int] = ...) -> TensorView:
        """the gradient of `window_max`: each element added at its place"""
    def window_spread(self, grad: TensorView, sizes: Sequence[int | Val], kernel: Sequence[int], stride: Sequence[int], before: Sequence[int] = ...) -> TensorView:
        """the gradient of `window_sum`: each element added to all that its window read"""
    def window_sum(self, arg: TensorView, kernel: Sequence[int], stride: Sequence[int], before: Sequence[int] = ..., after: Sequence[int | Val] = ...) -> TensorView:
        """sums of windows that slide along 1 to 3 dims of [n, channels, ..], with zeros before and after"""
    def zigzag(self, x: TensorView, dim: int, ring: int) -> TensorView:
        """A dim's chunks in zig-zag order, two for each block of a ring: block r is the chunks r and 2 ring - 1 - r."""
