"""The main job: a trained byte-level GPT reads real text on a mesh of ranks, and writes some.

python examples/gpt/run.py --mesh dp=2,tp=4                     simulated ranks, in this process
meshfuse run --ranks 4 examples/gpt/run.py --mesh dp=2,tp=2     real ranks (torchrun works, too)
python examples/gpt/run.py --mesh sp=4                          sequence parallel
python examples/gpt/run.py --mesh dp=32,tp=8 --compile-only     any number of ranks, compiled but not run
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from data import eval_windows
from fused import FusedGPT, annotate, define, parse_mesh
from model import GPT, Params, load_params, loss, pick_byte

import meshfuse as mf

HERE = Path(__file__).parent
Talk = Callable[..., None]
TOLERANCE = 1e-5


def _silent(*_: object, **__: object) -> None:
    """What ranks but the first say."""


def main() -> int:
    args = parse_arguments()
    mesh: mf.DeviceMesh = args.mesh
    world = mf.World.current()
    launched = world.size > 1
    torch.set_num_threads(1)  # ranks share the cores, and simulated ones take turns: more threads only wait
    talk: Talk = print if world.rank == 0 else _silent
    where = f"{world.size} gloo ranks" if launched else f"{mesh.size} simulated rank{'s' if mesh.size > 1 else ''}"
    talk(f"== GPT on {mesh}, {'compiled for ' if args.compile_only else ''}{where} ==")
    gpt = define()
    annotate(gpt, mesh)
    if args.compile_only:
        compile_only(gpt, args.batch, talk)
        return 0
    params = load_params(HERE / "weights.safetensors")
    runner = Runner(gpt, params, launched)
    tokens, targets = eval_windows(GPT.block)
    ok = read_text(runner, tokens[: args.batch * args.steps], targets[: args.batch * args.steps], args.batch, talk)
    report(gpt, talk)
    if args.generate:
        generate(runner, args.prompt.encode(), args.generate, talk)
    return 0 if ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        default="tp=1",
        help="axes and sizes: dp=2,tp=4; dp: batch, tp: weights, sp: positions",
    )
    parser.add_argument("--batch", type=positive, default=8, help="windows of 128 bytes per step")
    parser.add_argument("--steps", type=positive, default=6)
    parser.add_argument("--generate", type=int, default=48, help="bytes to write after the reading")
    parser.add_argument("--prompt", default="In the beginning ")
    parser.add_argument("--compile-only", action="store_true", help="plan and verify all ranks' programs, run nothing")
    return parser.parse_args()


def positive(text: str) -> int:
    """A number of windows or steps. Raises ArgumentTypeError for what is none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, needed a whole number above 0")
    return int(text)


class Runner:
    """The definition with its weights: one call form for simulated and for launched ranks."""

    def __init__(self, gpt: FusedGPT, params: Params, launched: bool):
        self.gpt, self.params, self.launched = gpt, params, launched
        weights = [params[name] for name in gpt.weights]
        views = list(gpt.weights.values())
        self.weights = [mf.shard_tensor(w, tv) for w, tv in zip(weights, views, strict=True)] if launched else weights

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Nats per byte; on launched ranks each passes its shard of the text."""
        if not self.launched:
            return self.gpt.fd.simulate([tokens, targets, *self.weights])[0].item()
        shards = [mf.shard_tensor(tokens, self.gpt.tokens), mf.shard_tensor(targets, self.gpt.targets)]
        return self.gpt.fd.execute([*shards, *self.weights])[0].item()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The global logits [B, T, vocab], on every rank."""
        weights = [self.params[name] for name in self.gpt.weights]
        return self.gpt.fd(tokens, tokens, *weights)[1]


def read_text(runner: Runner, tokens: torch.Tensor, targets: torch.Tensor, batch: int, talk: Talk) -> bool:
    """The loss over the text, step by step, beside that of the unsharded torch model."""
    steps = len(tokens) // batch
    ours: list[float] = []
    times: list[float] = []
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        start = time.perf_counter()
        ours.append(runner.loss(tokens[part], targets[part]))
        times.append(time.perf_counter() - start)
        talk(f"\r[{'#' * (step + 1):<{steps}}] step {step + 1}/{steps}  {times[-1] * 1e3:6.0f} ms", end="", flush=True)
    with torch.no_grad():
        theirs = [loss(runner.params, tokens[i * batch : (i + 1) * batch], targets[i * batch : (i + 1) * batch]).item()
                  for i in range(steps)]  # fmt: skip
    difference = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    steady = sorted(times[1:] or times)[len(times[1:] or times) // 2]
    mean = sum(ours) / steps
    talk(f"\nloss {mean:.6f} nats/byte ({mean / math.log(2):.4f} bits) over {tokens.numel()} bytes of eval.txt")
    talk(f"largest difference from unsharded torch: {difference:.1e} relative (limit {TOLERANCE:.0e})")
    talk(f"first step {times[0] * 1e3:.0f} ms with planning, then {steady * 1e3:.0f} ms per step")
    return difference <= TOLERANCE


def report(gpt: FusedGPT, talk: Talk) -> None:
    """What was sharded how, and what it cost on the wire."""
    compiled = gpt.fd.latest()
    talk(f"\nsharding of the inputs ({len(compiled.graph.nodes)} ops follow from these):")
    names = {gpt.tokens.id: "tokens", gpt.targets.id: "targets", **{tv.id: name for name, tv in gpt.weights.items()}}
    rows = dict.fromkeys(
        (re.sub(r"^h\d+", "h*", names[i]), compiled.graph.tensors[i].type, compiled.sharded.shardings[i])
        for i in compiled.graph.input_tensors
    )
    for name, kind, sharding in rows:
        talk(f"  {name:<16} {kind!s:<18} {sharding}")
    talk("\nbytes on the wire per rank and step:")
    talk(str(gpt.fd.bill()))


def compile_only(gpt: FusedGPT, batch: int, talk: Talk) -> None:
    """Plan for all ranks and check their programs against each other."""
    start = time.perf_counter()
    shapes = [(batch, GPT.block)] * 2 + [tv.type.shape for tv in gpt.weights.values()]
    compiled = gpt.fd.compile(*shapes)
    compiled.verify()
    seconds = time.perf_counter() - start
    talk(
        f"{len(compiled.ranks)} programs of {len(compiled.host_program(0).instructions)} instructions, "
        f"verified together, in {seconds:.1f} s"
    )
    report(gpt, talk)


def generate(runner: Runner, prompt: bytes, length: int, talk: Talk) -> None:
    """Greedy bytes after the prompt; the text so far stands at the front of one fixed window."""
    text = bytearray(prompt)
    for _ in range(length):
        window = text[-GPT.block :]
        tokens = torch.zeros(1, GPT.block, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(list(window))
        text.append(pick_byte(runner.logits(tokens)[0, len(window) - 1], 0.0))
    talk(f"\n{text.decode(errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
