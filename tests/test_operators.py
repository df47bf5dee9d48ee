"""Python's operators on tensors of a definition are ops, on every mesh what torch's operators are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshfuse as mf

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
# As Python writes them. x and y are positive numbers, i and j integers, p and q bools; all of [6, 6].
EXPRESSIONS = [
    "x + y", "x + 2.5", "2.5 + x", "x - y", "x - 1", "1 - x", "x * y", "x * 3", "3 * x", "x / y", "x / 4", "4 / x",
    "x ** y", "x ** 2", "2.0 ** x", "i % j", "i % 4", "i & j", "i | j", "i ^ j", "~i", "i << 1", "i >> 1", "1 << j",
    "p & q", "p | q", "p ^ q", "~p", "x < y", "x <= y", "x > y", "x >= y", "x < 1.5", "1.5 < x", "-x", "+x", "abs(-x)",
    "x @ y", "x @ y.T", "x.T @ y", "(x @ y + 1.0) ** 2", "i // j", "7 // j",
]  # fmt: skip


def numbers() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    real = [torch.rand(6, 6, dtype=torch.float64, generator=made) + 0.5 for _ in range(2)]
    whole = [torch.randint(1, 9, (6, 6), generator=made) for _ in range(2)]
    return dict(zip("xyijpq", [*real, *whole, whole[0] > 4, whole[1] > 4], strict=True))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_operator_is_torch_s(text: str) -> None:
    given = {name: t for name, t in numbers().items() if re.search(rf"\b{name}\b", text)}
    fd = mf.FusionDefinition()
    tensors = {name: fd.define_tensor([6, 6], dtype=t.dtype) for name, t in given.items()}
    result = eval(text, {}, tensors)
    fd.add_output(result)
    for tensor in tensors.values():
        fd.mesh_split(tensor, MESH, ["dp", "tp"])
    wanted = eval(text, {}, given)
    (found,) = fd.simulate([*given.values()])
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_a_product_of_operators_is_what_the_ops_give() -> None:
    def text(make: Callable[[Any, Any, Any], Any]) -> str:
        fd = mf.FusionDefinition()
        fd.add_output(make(fd, fd.define_tensor([2, 8, 16]), fd.define_tensor([16, 4])))
        return re.sub(r"\s+#.*", "", str(fd))

    assert text(lambda fd, x, w: x @ w) == text(lambda fd, x, w: fd.ops.matmul(x, w))
    assert "permute" in text(lambda fd, x, w: w.T)


def error(act: Callable[[Any, Any], Any]) -> str:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 16])
    with pytest.raises(mf.DefinitionError) as caught:
        act(fd, x)
    assert len(fd.recording.nodes) == 0
    return str(caught.value).rpartition(" (at ")[0]


NUMBERS_COME_IN = "Tensors of numbers come in by define_tensor, as arguments of the definition."


@pytest.mark.parametrize("array", [torch.ones(8, 16), np.ones((8, 16))], ids=["torch", "numpy"])
@pytest.mark.parametrize("sign", ["+", "-", "*", "/", "**", "//", "%", "&", "<", "<=", ">", ">=", "@"])
def test_an_array_is_no_operand_on_either_side(array: Any, sign: str) -> None:
    for text in (f"x {sign} array", f"array {sign} x"):
        told = error(lambda fd, x, text=text: eval(text, {"x": x, "array": array}))
        kind = type(array).__name__
        assert (
            f"is of the wrong kind: found a {kind} of shape [8, 16], needed tensor" in told and NUMBERS_COME_IN in told
        )


def test_a_method_of_torch_s_is_named_as_an_op() -> None:
    assert error(lambda fd, x: x.sum(1)) == "a tensor of a definition has no 'sum'. Call fd.ops.sum(tensor, ...)."
    assert "fd.ops.softmax(tensor, ...)" in error(lambda fd, x: x.softmax(-1))
    assert error(lambda fd, x: x.device).endswith("What is computed with it is in dir(fd.ops).")
    x = mf.FusionDefinition().define_tensor([8])
    assert not hasattr(x, "sum") and not hasattr(x, "_hidden") and hasattr(x, "shape")


TORCH_S = {
    "torch.relu(x)": "Call fd.ops.relu(tensor, ...).",
    "torch.nn.functional.relu(x)": "Call fd.ops.relu(tensor, ...).",
    "torch.add(array, x)": "Call fd.ops.add(tensor, ...).",
    "torch.cat([x, x])": "Call fd.ops.cat(tensor, ...).",
    "torch.nn.functional.softmax(x, -1)": "Call fd.ops.softmax(tensor, ...).",
    "torch.nn.Linear(16, 4)(x)": "Call fd.ops.linear(tensor, ...).",
    "torch.unsqueeze(x, 0)": "Write fd.ops.broadcast(x, [True, False, False]), True for each new dim.",
    "torch.fft.fft(x)": "What is computed with it is in dir(fd.ops).",
    "torch.exp(x.size(0))": "Call fd.ops.exp(tensor, ...).",
}


@pytest.mark.parametrize("call", TORCH_S)
def test_a_function_of_torch_s_is_named_as_an_op_at_the_script_s_line(call: str) -> None:
    x = mf.FusionDefinition().define_tensor([8, 16])
    told = r"^torch's \w+ takes tensors of numbers: found a (TensorView|Val) of a definition, needed an op"
    with pytest.raises(mf.DefinitionError, match=told) as caught:
        eval(call, {"x": x, "array": torch.ones(8, 16), "torch": torch})
    assert f"an op of the definition. {TORCH_S[call]} (at <string>:1)" in str(caught.value)


def test_what_is_no_operator_says_what_to_use() -> None:
    assert "fd.ops.slice for a range" in error(lambda fd, x: x[:, 1:3])
    assert error(lambda fd, x: x[0]).startswith("x (t0) cannot be indexed: found [0], needed an op.")
    assert error(lambda fd, x: fd.define_tensor([2, 3, 4]).T) == (
        "t1.T: found Float[2, 3, 4], needed two dims. Name the order: fd.ops.permute(tensor, [0, 2, 1])."
    )
    assert "matmul: argument 'b' is of the wrong kind: found 2 (int), needed tensor." in error(lambda fd, x: x @ 2)


def test_a_dtype_in_the_place_of_contiguity_is_not_passed_over() -> None:
    for dtype in (torch.float16, mf.DataType.Half, "float"):
        told = error(lambda fd, x, dtype=dtype: fd.define_tensor([8, 16], dtype))
        assert told.startswith("define_tensor: contiguity: found ") and "dtype=mf.DataType.Half" in told
    fd = mf.FusionDefinition()
    for contiguity in (None, True, [True, None], [16, 1], (False, True)):
        fd.define_tensor([8, 16], contiguity)


def test_a_tensor_as_a_shape_is_shown_without_its_elements() -> None:
    told = error(lambda fd, x: fd.define_tensor(torch.ones(8, 16)))
    assert told.startswith("define_tensor: shape: found a Tensor of shape [8, 16], needed a list of ints >= -1")
    assert "fd.from_pytorch takes an example tensor" in told


def test_a_list_of_all_arguments_is_an_error_that_says_to_unpack_it() -> None:
    fd = mf.FusionDefinition()
    x, y = fd.define_tensor([8]), fd.define_tensor([8])
    fd.add_output(x + y)
    with pytest.raises(mf.ArgumentError, match=r"found 1, needed 2: .*, in their order: fd\(\*tensors\) of a list\."):
        fd([torch.ones(8), torch.ones(8)])
