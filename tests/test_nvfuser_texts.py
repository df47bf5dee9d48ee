"""The text of a definition in nvFuser's words: as nvFuser writes it, and what it defines again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshfuse as mf
from defining import nvfuser_rebuilt
from meshfuse.nvfuser_direct import DataType, FusionDefinition
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Sample
from meshfuse.ops.values import TensorType


def defined(define: Any) -> FusionDefinition:
    with FusionDefinition() as fd:
        define(fd)
    return fd


def body(fd: FusionDefinition) -> list[str]:
    """What the text says below its head."""
    head, *lines = repr(fd).splitlines()
    assert head == "def nvfuser_fusion(fd : FusionDefinition) -> None :"
    assert all(line.startswith("    ") for line in lines)
    return [line[4:] for line in lines]


def _sampled(name: str, sample: Sample) -> FusionDefinition:
    def value(fd: FusionDefinition, arg: Any) -> Any:
        if isinstance(arg, TensorType):
            return fd.define_tensor(list(arg.shape), dtype=arg.dtype)
        is_list = isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], TensorType)
        return [value(fd, a) for a in arg] if is_list else arg

    def define(fd: FusionDefinition) -> None:
        named = {key: value(fd, v) for key, v in sample.kwargs.items()}
        made = fd.call(name, [value(fd, arg) for arg in sample.args], named)
        for result in made if isinstance(made, tuple) else (made,):
            fd.add_output(result)

    return defined(define)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_is_defined_again(name: str) -> None:
    for sample in OPS[name].samples():
        fd = _sampled(name, sample)
        twin = nvfuser_rebuilt(fd)
        assert repr(twin) == repr(fd)
        assert [twin.recording.tensors[i].type for i in twin.recording.outputs] == [
            fd.recording.tensors[i].type for i in fd.recording.outputs
        ]


def test_inputs_print_with_all_their_options() -> None:
    def define(fd: FusionDefinition) -> None:
        fd.define_tensor([-1, 1, 4])
        fd.define_tensor(shape=[-1, 1], contiguity=True, dtype=DataType.Half, is_cpu=True)
        fd.define_tensor([1, -1, -1], contiguity=[None, True, False])
        fd.define_tensor([1, 3, 2], contiguity=False, stride_order=[2, 0, 1])
        fd.define_tensor(sizes=[2, 3], strides=[6, 2])
        fd.define_tensor([2, 3], [1, 2], dtype=DataType.Int, static_sizes=True)
        fd.from_pytorch(torch.empty(4, 1, 6).transpose(0, 2))
        fd.from_pytorch(torch.tensor(1, dtype=torch.int32))
        fd.define_scalar()
        fd.define_scalar(dtype=DataType.Bool)

    fd = defined(define)
    assert body(fd) == [
        "tv0 = fd.define_tensor(shape=[-1, 1, 4], contiguity=[False, None, False], dtype=DataType.Float, is_cpu=False)",
        "tv1 = fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Half, is_cpu=True)",
        "tv2 = fd.define_tensor(shape=[1, -1, -1], contiguity=[None, True, False], dtype=DataType.Float, is_cpu=False)",
        "tv3 = fd.define_tensor(shape=[1, 3, 2], contiguity=[None, False, False], dtype=DataType.Float, is_cpu=False, "
        "stride_order=[2, 0, 1])",
        "tv4 = fd.define_tensor(shape=[-1, -1], contiguity=[True, False], dtype=DataType.Float, is_cpu=False)",
        "tv5 = fd.define_tensor(shape=[2, 3], contiguity=[True, True], dtype=DataType.Int, is_cpu=False, "
        "stride_order=[0, 1])",
        "tv6 = fd.define_tensor(shape=[-1, 1, -1], contiguity=[None, True, True], dtype=DataType.Float, is_cpu=False, "
        "stride_order=[0, 2, 1])",
        "tv7 = fd.define_tensor(shape=[], contiguity=[], dtype=DataType.Int32, is_cpu=True)",
        "c19 = fd.define_scalar(None, dtype=DataType.Double)",
        "c20 = fd.define_scalar(None, dtype=DataType.Bool)",
    ]
    assert repr(nvfuser_rebuilt(fd)) == repr(fd)


def test_ops_are_written_output_by_output_and_by_the_numbers_of_their_definition() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([2, 1, 4])
        unused = fd.ops.exp(x)
        low = fd.ops.squeeze(x, [-2])
        factor = fd.define_scalar(2.5)
        y = fd.define_tensor([2, 4], dtype=DataType.BFloat16)
        high = fd.ops.mul(y, factor)
        fd.add_output(fd.ops.sub(high, low))
        fd.add_output(fd.ops.sum(high))
        fd.ops.neg(unused)

    fd = defined(define)
    assert body(fd)[2:] == [
        "tv4 = fd.ops.mul(tv3, 2.50000)",
        "tv2 = fd.ops.squeeze(tv0, dims=[1])",
        "tv5 = fd.ops.sub(tv4, tv2)",
        "tv6 = fd.ops.sum(tv4, dims=[0, 1], dtype=DataType.Float)",
        "tv1 = fd.ops.exp(tv0)",
        "tv7 = fd.ops.neg(tv1)",
        "fd.add_output(tv5)",
        "fd.add_output(tv6)",
    ]
    given = torch.randn(2, 1, 4), torch.randn(2, 4).bfloat16()
    for found, wanted in zip(nvfuser_rebuilt(fd).execute(given), fd.execute(given), strict=True):
        assert torch.equal(found, wanted)


NUMBERS = [
    (3.0, "3.00000"), (0.1, "0.100000"), (1e-12, "1.00000e-12"), (1.23456789, "1.23456789"), (-2.5e8, "-2.50000e+08"),
    (float("inf"), 'float("inf")'), (4, "4"), (1 - 2j, "complex(1.00000, -2.00000)"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "text"), NUMBERS)
@pytest.mark.parametrize("constant", [False, True])
def test_numbers_are_written_where_they_are_used(number: Any, text: str, constant: bool) -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([2], dtype=DataType.ComplexDouble)
    fd.add_output(fd.ops.mul(x, fd.define_scalar(number) if constant else number))
    assert f"tv1 = fd.ops.mul(tv0, {text})" in body(fd)
    (made,) = nvfuser_rebuilt(fd).recording.nodes
    assert made.args[1] == number


def test_constants_of_scalars_and_of_another_type_keep_a_line() -> None:
    def define(fd: FusionDefinition) -> None:
        x = fd.define_tensor([-1, 4])
        two = fd.define_scalar(2)
        shape = [fd.ops.mul(x.size(0), two), two]
        fd.add_output(fd.ops.mul(fd.ops.reshape(x, shape), fd.ops.cast(fd.define_scalar(0.5), DataType.Float)))
        fd.add_output(fd.ops.mul(x, fd.define_scalar(3, dtype=DataType.Float)))
        fd.add_output(fd.ops.where(fd.ops.gt(x, 0), fd.define_scalar(True), fd.define_scalar(False)))

    fd = defined(define)
    assert body(fd)[1:-3] == [
        "c4 = tv0.size(0)",
        "c3 = fd.define_scalar(2, dtype=DataType.Int)",
        "c5 = fd.ops.mul(c4, c3)",
        "tv1 = fd.ops.reshape(tv0, new_shape=[c5, c3])",
        "c6 = fd.define_scalar(0.500000, dtype=DataType.Double)",
        "c7 = fd.ops.cast(c6, dtype=DataType.Float)",
        "tv2 = fd.ops.mul(tv1, c7)",
        "c8 = fd.define_scalar(3.00000, dtype=DataType.Float)",
        "tv3 = fd.ops.mul(tv0, c8)",
        "tv4 = fd.ops.gt(tv0, 0)",
        "c9 = fd.define_scalar(True, dtype=DataType.Bool)",
        "c10 = fd.define_scalar(False, dtype=DataType.Bool)",
        "tv5 = fd.ops.where(tv4, c9, c10)",
    ]
    x = torch.randn(3, 4)
    for found, wanted in zip(nvfuser_rebuilt(fd).execute([x]), fd.execute([x]), strict=True):
        assert torch.equal(found, wanted)


def test_a_long_definition_is_written() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([2])
    for _ in range(3000):
        x = fd.ops.neg(x)
    fd.add_output(x)
    assert len(body(fd)) == 3002 and repr(nvfuser_rebuilt(fd)) == repr(fd)


def test_a_repro_script_is_nvfusers_but_for_where_its_names_come_from() -> None:
    def define(fd: FusionDefinition) -> None:
        x, y = fd.from_pytorch(torch.ones(2, 3)), fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(fd.ops.index_select(x, y, 1))

    fd = defined(define)
    script = fd.repro_script_for([torch.ones(3, 2).t(), torch.tensor([0, 1])])
    assert (
        f"""
import torch
from nvfuser_direct import FusionDefinition, DataType
{fd}with FusionDefinition() as fd:
    nvfuser_fusion(fd)

inputs = [
    torch.testing.make_tensor((6,), dtype=torch.float32, device='cpu').as_strided((2, 3), (1, 2)),
    torch.testing.make_tensor((2,), dtype=torch.int64, device='cpu', low=0, high=2),
]
fd.execute(inputs)
"""
        in script
    )


def test_definitions_that_differ_in_contiguity_alone_are_others() -> None:
    texts = {
        repr(defined(lambda fd, c=c: fd.define_tensor([2, 3], contiguity=c))) for c in (True, False, [True, False])
    }
    assert len(texts) == 3


@pytest.mark.parametrize("name", ["max", "min"])
def test_an_order_has_the_operands_type(name: str) -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([2, 3], dtype=DataType.Half)
    assert getattr(fd.ops, name)(x, dims=[1], dtype=DataType.Half).dtype is DataType.Half
    with pytest.raises(mf.DefinitionError, match=f"{name}: a result type: found Float, needed Half, the operand's"):
        getattr(fd.ops, name)(x, dims=[1], dtype=DataType.Float)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "keepdim" in op.places])
def test_reductions_take_the_older_spelling_of_keepdim(name: str) -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([2, 3])
    found = (getattr(fd.ops, name)(x, dims=[1], **{spelled: True}) for spelled in ("keep_dim", "keepdim"))
    old, new = ([tv.type for tv in (made if isinstance(made, tuple) else (made,))] for made in found)
    assert old == new and all(ttype.shape == (2, 1) for ttype in old)
    with pytest.raises(mf.DefinitionError, match="'keep_dim' is given twice"):
        getattr(fd.ops, name)(x, dims=[1], keepdim=True, keep_dim=True)
