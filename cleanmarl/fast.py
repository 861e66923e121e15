"""Ways to learn faster: compiled losses (`--compile`), and convolutions in bfloat16 (`--bf16`).

    @compilable
    def ppo_loss(agent, batch, clip_coef, args): ...

`set_up(args)` decides whether all such functions of the process are compiled. It is the function itself that is, as it
stands in the script: what is edited there is compiled, and what cannot be compiled runs as before.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

Bf16 = Literal["off", "on", "auto"]

# The same random numbers as without; in this process, so that nothing is left behind when a run is stopped.
OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


class CompileError(Exception):
    """torch.compile does not work here: its reason in one line."""


class Compilation:
    """Whether functions marked with @compilable are compiled, in this process."""

    wanted = False


def compilable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of functions of tensors, such as losses: torch compiles them if it is asked for.

    Gradients are compiled too. A loop is unrolled, one over hundreds of steps takes minutes: keep GAE out of it.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False, options=OPTIONS))  # imports for seconds

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return (compiled() if Compilation.wanted else function)(*args)

    return call


def compile_losses(wanted: bool, device: torch.device) -> None:
    """From now on functions marked with @compilable are compiled, or not. CompileError if this machine cannot."""
    Compilation.wanted = False
    if wanted:
        try:
            torch.compile(torch.sin, options=OPTIONS)(torch.ones(8, device=device))
        except Exception as error:  # of whatever part: Dynamo, Inductor, Triton, the compiler
            raise CompileError(next(line for line in str(error).splitlines() if line.strip())) from error
    Compilation.wanted = wanted


def use_bf16(args: Any) -> bool:
    """Whether --bf16 asks for bfloat16; "auto": if --device is made for it, else it would be slower.

    That are GPUs from compute capability 8.0 on, and CPUs with AVX512-BF16 or AMX.
    """
    device = torch.device(args.device)
    if args.bf16 != "auto":
        return args.bf16 == "on"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpu = torch.cpu.get_capabilities()
    return device.type == "cpu" and bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
