"""`benchmark.py attention`: our self-attention on maps beside other projects', the same work from each."""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from _measure import describe_machine, resident_mib, seconds
from einops import rearrange
from torch import Tensor, nn

from unet_attn.attention import SelfAttention2d
from unet_attn.convert import to_diffusers, to_torch

TOKENS = 4096  # of all pictures of a batch together, so that every size is about as much work
HEADS_OF = {128: (4, 32), 320: (8, 40)}  # heads and width of each, as in small networks and in Stable Diffusion
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
PASSES = ("forward", "forward+backward")
OURS, EXPLICIT = "ours", "explicit"
PEERS = {"diffusers": "diffusers", "lucidrains": "denoising_diffusion_pytorch", "torch": "torch"}


class Case(NamedTuple):
    """What is timed: channels, side of the map, memory layout, and whether the backward pass counts."""

    channels: int
    side: int
    layout: str
    pass_name: str

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.side**2)

    def make_input(self, batch: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch or self.batch, self.channels, self.side, self.side, generator=generator)
        return x.contiguous(memory_format=LAYOUTS[self.layout])

    @property
    def floor_mib(self) -> float:
        """What a pass that keeps no matrix of weights must hold: query, key, value, their mix, and the result.

        The backward pass holds as much again, each one's gradient.
        """
        numbers = 5 * self.batch * self.side**2 * self.channels
        return 4 * numbers * (2 if self.pass_name == PASSES[1] else 1) / 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of ours and every peer (default 15)")
    parser.add_argument("--sides", type=int, nargs="+", default=[8, 16, 32, 64], help="of the square maps")
    parser.add_argument("--channels", type=int, nargs="+", default=sorted(HEADS_OF), choices=sorted(HEADS_OF))
    parser.add_argument("--memory", action="store_true", help="peak memory only, against the linear floor")
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--peaks-of", metavar="MODULE", help=argparse.SUPPRESS)
    parser.set_defaults(run=benchmark_attention)


def benchmark_attention(options: argparse.Namespace) -> None:
    if options.quick:
        options.sides, options.channels, options.rounds = [4], [128], 2
    unknown = [side for side in options.sides if side < 1]
    if unknown or options.rounds < 1:
        raise ValueError("--sides and --rounds must be at least 1")
    cases = [
        Case(channels, side, layout, pass_name)
        for channels in options.channels
        for side in options.sides
        for layout in LAYOUTS
        for pass_name in PASSES
    ]
    if options.peaks_of:
        print(json.dumps([peak_of(options.peaks_of, case) for case in cases]))
    elif options.memory:
        compare_memory(cases, options)
    else:
        compare_speed(cases, options)


# ------------------------------------------------------------------------------------------------------------- modules


class TorchOnMaps(nn.Module):
    """torch.nn.MultiheadAttention over the pixels of a map, as a user would write it."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        tokens = rearrange(x, "b c h w -> b (h w) c")
        output, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return rearrange(output, "b (h w) c -> b c h w", h=x.shape[-2])


class Explicit(nn.Module):
    """Ours with the weights asked for: what the fused form saves."""

    def __init__(self, attention: SelfAttention2d) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, return_weights=True)[0]


def make_module(name: str, channels: int) -> nn.Module:
    """The same weights in each; no norm, no residual."""
    torch.manual_seed(0)
    heads, dim_head = HEADS_OF[channels]
    ours = SelfAttention2d(channels, heads, dim_head)
    if name == OURS:
        return ours
    if name == EXPLICIT:
        return Explicit(ours)
    if name == "diffusers":
        from diffusers.models.attention_processor import AttnProcessor2_0

        theirs = to_diffusers(ours)
        theirs.set_processor(AttnProcessor2_0())
        return theirs
    if name == "torch":
        return TorchOnMaps(to_torch(ours))
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Attention

    theirs = Attention(channels, heads, dim_head, num_mem_kv=0, flash=True)
    theirs.norm = nn.Identity()
    theirs.to_qkv.load_state_dict(ours.to_qkv.state_dict())
    theirs.to_out.load_state_dict(ours.to_out.state_dict())
    return theirs


def make_pass(module: nn.Module, case: Case, x: Tensor) -> Callable[[], object]:
    """One call to time. The gradient that comes back has the input's layout, as from the network's next layer."""
    if case.pass_name == PASSES[0]:
        return torch.inference_mode()(lambda: module(x))
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)

    def forward_and_backward() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(gradient)

    return forward_and_backward


def installed_peers() -> list[str]:
    found = [name for name, package in PEERS.items() if importlib.util.find_spec(package)]
    missing = [package for name, package in PEERS.items() if name not in found]
    if missing:
        print(f"not installed, so not compared with: {', '.join(missing)}")
    return found


# --------------------------------------------------------------------------------------------------------------- speed


def compare_speed(cases: list[Case], options: argparse.Namespace) -> None:
    peers = installed_peers()
    print(describe_machine())
    print(f"SelfAttention2d and the same work of others, float32, {TOKENS} tokens a batch; median milliseconds of")
    print(f"{options.rounds} rounds of all in turns; ratio: ours by the fastest other's, 10 to 90 % of the rounds")
    columns = "".join(f"{name:>12}" for name in (OURS, *peers))
    print(f"{'C':>4}{'side':>5}  {'layout':14}{'pass':18}{columns}   ratio")
    ratios, fastest_of = [], {}
    for case, times in rounds_of(cases, peers, options.rounds):
        medians = [1000 * statistics.median(column) for column in zip(*times, strict=True)]
        best = min(range(1, len(medians)), key=lambda number: medians[number])
        spread = sorted(row[0] / row[best] for row in times)
        low, middle, high = (spread[round(share * (len(spread) - 1))] for share in (0.1, 0.5, 0.9))
        ratios.append(middle)
        fastest_of[case] = peers[best - 1]
        numbers = "".join(f"{median:12.2f}" for median in medians)
        name = f"{case.channels:4}{case.side:5}  {case.layout:14}{case.pass_name:18}"
        print(f"{name}{numbers}   {middle:.2f} ({low:.2f}..{high:.2f}) {peers[best - 1]}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


def rounds_of(cases: list[Case], peers: list[str], rounds: int) -> Iterator[tuple[Case, list[tuple[float, ...]]]]:
    """Each case with the seconds of ours and of every peer, round by round."""
    modules: dict[int, list[nn.Module]] = {}
    for case in cases:
        if case.channels not in modules:
            modules[case.channels] = [make_module(name, case.channels).eval() for name in (OURS, *peers)]
        x = case.make_input()
        with torch.inference_mode():
            for theirs in modules[case.channels][1:]:
                torch.testing.assert_close(modules[case.channels][0](x), theirs(x), atol=1e-5, rtol=1e-4)
        passes = [make_pass(module, case, x) for module in modules[case.channels]]
        for each in passes * 2:
            each()
        yield case, [tuple(seconds(each) for each in passes) for _ in range(rounds)]


# -------------------------------------------------------------------------------------------------------------- memory


def compare_memory(cases: list[Case], options: argparse.Namespace) -> None:
    peers = installed_peers()
    names = [OURS, *peers, EXPLICIT]
    peaks = dict(zip(names, (peaks_of(name, options) for name in names), strict=True))
    print(describe_machine())
    print(f"peak MiB of one pass above what stood before, float32, {TOKENS} tokens a batch (more from 128 x 128 on);")
    print(f"floor: query, key, value, their mix and the result; {EXPLICIT}: ours with return_weights=True")
    columns = "".join(f"{name:>12}" for name in names)
    print(f"{'C':>4}{'side':>5}  {'layout':14}{'pass':18}{'floor':>8}{columns}   ours/leanest  ours/floor")
    for number, case in enumerate(cases):
        found = [peaks[name][number] for name in names]
        numbers = "".join(f"{peak:12.1f}" if peak is not None else f"{'-':>12}" for peak in found)
        leanest = min(found[1:-1])
        name = f"{case.channels:4}{case.side:5}  {case.layout:14}{case.pass_name:18}"
        shares = f"{found[0] / leanest:15.2f}{found[0] / case.floor_mib:12.2f}"
        print(f"{name}{case.floor_mib:8.1f}{numbers}{shares}")


def peaks_of(name: str, options: argparse.Namespace) -> list[float | None]:
    """A new process for each module, whose allocator gives back at once what is freed."""
    script = Path(__file__).with_name("benchmark.py")
    sizes = ["--sides", *map(str, options.sides), "--channels", *map(str, options.channels)]
    command = [sys.executable, script, "--threads", str(torch.get_num_threads()), "attention", *sizes]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([*command, "--peaks-of", name], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise OSError(f"the process that measures peak memory failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def peak_of(name: str, case: Case) -> float | None:
    """MiB that one pass needs above what stood before it, from the kernel's high-water mark of this process.

    None where the explicit form would need gigabytes. The least of three passes, the first of which also loads code.
    """
    heads, _ = HEADS_OF[case.channels]
    if name == EXPLICIT and case.batch * heads * case.side**4 * 4 > 2**30:
        return None
    module, x = make_module(name, case.channels).eval(), case.make_input()
    run = make_pass(module, case, x)
    peaks = []
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        before = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
        run()
        peaks.append(resident_mib("VmHWM") - before)
    return min(peaks)
