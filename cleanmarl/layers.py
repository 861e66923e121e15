"""torch.nn for many agents at once, on rows (R, A, ...): R steps, whatever their number, of A agents.

A stack of networks is written as one: nn.Sequential(StackedLinear(A, D, 64), nn.Tanh(), StackedLinear(A, 64, K)) gives
every agent a network of its own, and with 1 instead of A one network serves all agents. The gradient of a sum of losses
that share no parameter is the gradient of each, so one `backward` and one optimizer serve all of them. Networks that
remember are Recurrent(...) instead of nn.Sequential(...), on rows of T steps of N environments.

Faster forms of what torch has: `as_numpy`, a network for the few rows of an environment step; `@compilable`, a loss
that `--compile` compiles as it stands in the script; `use_bf16`, whether convolutions are worth bfloat16 here.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class StackedLinear(nn.Module):
    """M linear layers, weight (M, in, out), initialised as nn.Linear does: x (R, A, in) -> (R, A, out).

    M = A: each agent has its own. M = 1: one serves all. x may be a tuple of parts that stand for their concatenation
    and broadcast over agents: (state (R, 1, S), obs (R, A, D)) gives W [s, x] = W_s s + W_x x, so that what all agents
    see, which may be large, is read once.

    torch.nn.init takes the weight for one of a convolution: give it each network's, `for w in layer.weight.detach()`,
    as `w.T`, (out, in) like that of nn.Linear.
    """

    def __init__(self, num_networks: int, size_in: int, size_out: int):
        super().__init__()
        self.num_networks = num_networks
        bound = size_in**-0.5
        self.weight = nn.Parameter(torch.empty(num_networks, size_in, size_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_networks, 1, size_out).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return self.product(x, self.weight, self.bias)
        weights = self.weight.split([part.shape[-1] for part in x], dim=1)
        first, *rest = (self.product(part, w, None) for part, w in zip(x, weights, strict=True))
        return sum(rest, first) + self.bias.swapaxes(0, 1)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (R, A, in), or (R, 1, in) for what all agents see."""
        if self.num_networks == 1:
            rows = x.reshape(1, -1, x.shape[-1])
            if bias is not None and 1 < weight.shape[-1] < 16 and rows.shape[1] >= 512:
                # a head: with so few outputs BLAS takes three times as long for (in, out) as for (out, in)
                return F.linear(rows, weight[0].T.contiguous(), bias.flatten()).view(*x.shape[:-1], -1)
            return (rows @ weight if bias is None else torch.baddbmm(bias, rows, weight)).view(*x.shape[:-1], -1)
        x = x.expand(-1, self.num_networks, -1).swapaxes(0, 1)  # (A, R, in)
        return (x @ weight if bias is None else torch.baddbmm(bias, x, weight)).swapaxes(0, 1)


class Tanh(nn.Tanh):
    """nn.Tanh for many rows: NumPy takes a tenth of the time that torch takes on the CPU, with the same gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_program = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_program or x.device.type != "cpu" or x.dtype != torch.float32:
            return super().forward(x)
        return NumPyTanh.apply(x)


class NumPyTanh(torch.autograd.Function):
    """For float32 on the CPU."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        """y, the tanh of x, of any shape."""
        y = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=y.numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient by x, (1 - y^2) times the one by y."""
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, y)


class AgentIds(nn.Module):
    """Appends a one-hot id to what an agent sees, (..., A, D) -> (..., A, D + A): it tells agents of one network apart.

    Of a tuple of parts the ids follow the last one.
    """

    ids: torch.Tensor

    def __init__(self, num_agents: int):
        super().__init__()
        self.register_buffer("ids", torch.eye(num_agents), persistent=False)

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        *parts, last = x if isinstance(x, tuple) else (x,)
        last = torch.cat([last, self.ids.expand(*last.shape[:-1], -1)], dim=-1)
        return (*parts, last) if isinstance(x, tuple) else last


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples so far, of D features for each of M networks; normalises as a layer, clipped.

    Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, num_networks: int, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_networks, size))
        self.register_buffer("var", torch.ones(num_networks, size))
        self.register_buffer("count", torch.zeros(num_networks, size))

    @torch.no_grad()
    def update(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Take in samples x (R, A, D); weight (R, A, 1) or (R, A, D) is 1 for what counts: the living, no padding."""
        if x.ndim != 3:
            raise ValueError(f"samples are (R, A, D), not {tuple(x.shape)}: of numbers (R,) give x[:, None, None]")
        weight = x.new_ones(*x.shape[:2], 1) if weight is None else weight
        axes = (0, 1) if len(self.mean) == 1 else (0,)
        count = weight.expand_as(x).sum(axes).view_as(self.mean)
        mean = (x * weight).sum(axes).view_as(self.mean) / count.clamp(min=1)
        var = ((x - mean).square() * weight).sum(axes).view_as(self.mean) / count.clamp(min=1)
        total, delta = (self.count + count).clamp(min=1), mean - self.mean
        spread = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(torch.where(count > 0, spread / total, self.var))
        self.count += count

    @property
    def std(self) -> torch.Tensor:
        return (self.var + 1e-8).sqrt()

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std

    def denormalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.std + self.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalize(x).clamp(-10, 10)


class StackedCell(nn.Module):
    """What StackedGRU and StackedLSTM share: weights named and initialised as torch's, and the loop over the steps.

    M = A: each agent has its own. M = 1: one serves all. The state of an agent begins with its output; its size is
    `memory_size`.
    """

    num_gates, num_states = 0, 0

    def __init__(self, num_networks: int, size_in: int, size_hidden: int):
        super().__init__()
        self.num_networks, self.size_hidden, self.memory_size = num_networks, size_hidden, self.num_states * size_hidden
        bound, size_gates = size_hidden**-0.5, self.num_gates * size_hidden
        self.weight_ih = nn.Parameter(torch.empty(num_networks, size_in, size_gates).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(num_networks, size_hidden, size_gates).uniform_(-bound, bound))
        self.bias_ih = nn.Parameter(torch.empty(num_networks, 1, size_gates).uniform_(-bound, bound))
        self.bias_hh = nn.Parameter(torch.empty(num_networks, 1, size_gates).uniform_(-bound, bound))

    @staticmethod
    def step(x, remembered, state, sigmoid, tanh, split, concatenate):
        """The state (..., S) after a step; x, remembered (..., G * H) are its gates' two parts. Tensors or arrays."""
        raise NotImplementedError

    def output(self, state):
        """Its part of a state; a slice of all would cost each step of the backward pass a copy."""
        return state if self.num_states == 1 else state[..., : self.size_hidden]

    def forward(self, x: torch.Tensor, state: torch.Tensor, forget: torch.Tensor | None = None, last: bool = False):
        """Run the T steps in rows x (T * N, A, in) from state (N, A, S), which is 0 after those in forget (T * N, A).

        Returns the outputs (T * N, A, H) and the states (T * N, A, S), each as it is after its step; with `last` only
        the last ones (N, A, S).
        """
        (N, A), T = state.shape[:2], len(x) // len(state)

        def by_network(x: torch.Tensor) -> torch.Tensor:  # -> (M, T, B, ...), where B = N * A, or N of each network
            shared = self.num_networks == 1
            return x.reshape(1, -1, N * A, *x.shape[2:]) if shared else x.movedim(1, 0).unflatten(1, (-1, N))

        gates = torch.baddbmm(self.bias_ih, by_network(x).flatten(1, 2), self.weight_ih).unflatten(1, (T, -1))
        keep = [None] * T if forget is None else by_network(~forget)[..., None].to(x.dtype).unbind(1)
        state, states = by_network(state)[:, 0], []
        for gates_now, kept in zip(gates.unbind(1), keep):
            remembered = torch.baddbmm(self.bias_hh, self.output(state), self.weight_hh)
            states.append(self.step(gates_now, remembered, state, *TORCH))
            state = states[-1] if kept is None else states[-1] * kept
        after = torch.stack(states, 1).flatten(1, 2)  # (M, T * B, S)
        after = after[0].unflatten(0, (-1, A)) if self.num_networks == 1 else after.swapaxes(0, 1)
        return self.output(after), after[-N:] if last else after


class StackedGRU(StackedCell):
    """M GRUs; equations and order of the gates as in torch.nn.GRU (Cho et al. 2014). The state is the output."""

    num_gates, num_states = 3, 1

    @staticmethod
    def step(x, remembered, state, sigmoid, tanh, split, concatenate):
        (x_reset, x_keep, x_new), (m_reset, m_keep, m_new) = split(x, 3, -1), split(remembered, 3, -1)
        new = tanh(x_new + sigmoid(x_reset + m_reset) * m_new)
        return new + sigmoid(x_keep + m_keep) * (state - new)


class StackedLSTM(StackedCell):
    """M LSTMs; equations and order of the gates as in torch.nn.LSTM (Hochreiter and Schmidhuber 1997).

    The state is the output beside the cell.
    """

    num_gates, num_states = 4, 2

    @staticmethod
    def step(x, remembered, state, sigmoid, tanh, split, concatenate):
        _, cell = split(state, 2, -1)
        write, keep, new, show = split(x + remembered, 4, -1)
        cell = sigmoid(keep) * cell + sigmoid(write) * tanh(new)
        return concatenate([sigmoid(show) * tanh(cell), cell], -1)

    def forward(self, x: torch.Tensor, state: torch.Tensor, forget: torch.Tensor | None = None, last: bool = False):
        if self.num_networks > 1 or forget is not None or not last:
            return super().forward(x, state, forget, last)
        # What torch's own LSTM can do, all steps in one call, it does in a quarter of the time.
        x, rows = x.reshape(-1, state[..., 0].numel(), x.shape[-1]), state.flatten(0, 1)[None]
        weights = [w[0].T.contiguous() for w in (self.weight_ih, self.weight_hh)]
        weights += [self.bias_ih[0, 0], self.bias_hh[0, 0]]
        h_and_c = tuple(part.contiguous() for part in rows.chunk(2, -1))
        out, *after = torch.lstm(x, h_and_c, weights, True, 1, 0.0, True, False, False)  # True: cuDNN learns only so
        return out.reshape(-1, state.shape[1], self.size_hidden), torch.cat(after, -1).view_as(state)


def numpy_chunk(x: np.ndarray, parts: int, axis: int) -> list[np.ndarray]:
    """np.split along the last axis, in a quarter of its time, which counts at every step."""
    size = x.shape[axis] // parts
    return [x[..., i * size : (i + 1) * size] for i in range(parts)]


TORCH = torch.sigmoid, torch.tanh, torch.chunk, torch.cat
NUMPY = lambda x: 0.5 + 0.5 * np.tanh(0.5 * x), np.tanh, numpy_chunk, np.concatenate


NO_MEMORY = "Recurrent needs a layer that remembers: a StackedGRU, StackedLSTM or StackedCell of yours"


class Recurrent(nn.Sequential):
    """Layers of which some remember (StackedGRU, StackedLSTM): what each agent has seen is in its memory.

    The memory (N, A, S), S = `memory_size`, holds the states of all layers that remember; at first it is 0. Rows are of
    T steps of N environments, step after step.
    """

    CELLS: ClassVar = {"gru": StackedGRU, "lstm": StackedLSTM}

    def __init__(self, *layers):
        super().__init__(*layers)
        if others := [layer for layer in self.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase)]:
            raise TypeError(f"Recurrent carries no memory of {others[0]}: StackedGRU or StackedLSTM(1, in, out)")
        if len(self.cells) < sum(isinstance(layer, StackedCell) for layer in self.modules()):
            raise TypeError("a StackedGRU or StackedLSTM must be a layer of Recurrent itself, not of a layer of it")

    @property
    def cells(self) -> list[StackedCell]:
        return [layer for layer in self if isinstance(layer, StackedCell)]

    @property
    def memory_size(self) -> int:
        if not self.cells:
            raise TypeError(NO_MEMORY)
        return sum(cell.memory_size for cell in self.cells)

    def forward(self, x, memory: torch.Tensor, forget: torch.Tensor | None = None, last: bool = False):  # type: ignore[override]
        """Run the T steps in rows x (T * N, A, D) from `memory`, which is 0 again after the steps in forget (T * N, A).

        Returns outputs (T * N, A, K) and memories (T * N, A, S), each as it is after its step: one that goes on from
        the last is still to be emptied by the last of `forget`. With `last` only the last memories (N, A, S).
        """
        if not self.cells:  # as in a part of one
            raise TypeError(NO_MEMORY)
        states, memories = iter(memory.split([cell.memory_size for cell in self.cells], -1)), []
        for layer in self:
            if isinstance(layer, StackedCell):
                x, after = layer(x, next(states), forget, last)
                memories.append(after)
            else:
                x = layer(x)
        return x, memories[0] if len(memories) == 1 else torch.cat(memories, -1)


def of_each_network(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters (M, ...) of a stacked layer, of which each of its M networks has its own; none of other layers."""
    if (M := getattr(layer, "num_networks", 1)) == 1:
        return []
    own = (p for name, p in layer.named_parameters() if "." not in name or name.startswith("parametrizations."))
    return [p for p in own if p.shape[:1] == (M,)]


def clip_grads_(agent: nn.Module, max_norm: float) -> dict[str, torch.Tensor]:
    """Clip the gradient of every child of `agent` by its own norm; of a stack, that of each of its M networks.

    A max_norm of infinity only measures.

    Returns the norm before, the mean of those of a stack, by the name of the child ("" for the agent's own parameters);
    0 if it is frozen, and nothing of one that has no gradients this time.
    What the networks of a stack share (an ordinary layer among stacked ones) is clipped like one more network.
    """
    norms = {}
    children = {name: [*child.modules()] for name, child in agent.named_children()}
    for name, modules in (children | {"": [agent]}).items():
        stacks = {p for module in modules for p in of_each_network(module)}
        # once, if modules share a parameter
        parameters = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
        by_network = [p.grad for p in parameters if p in stacks and p.grad is not None]
        shared = [p.grad for p in parameters if p not in stacks and p.grad is not None]
        groups = []  # gradients and their norm, () or (M,)
        if shared:
            groups.append((shared, torch.cat([gradient.flatten() for gradient in shared]).norm()))
        for M in dict.fromkeys(map(len, by_network)):  # layers of other numbers of networks are other stacks
            stack = [gradient for gradient in by_network if len(gradient) == M]
            squares = [gradient.flatten(1).square().sum(1) for gradient in stack]  # (M,) each
            groups.append((stack, torch.stack(squares).sum(0).sqrt()))
        for gradients, norm in groups if max_norm < math.inf else ():
            scale = (max_norm / (norm + 1e-6)).clamp(max=1)
            for gradient in gradients:
                gradient *= scale.view((*norm.shape, *[1] * (gradient.ndim - 1)))
        if groups:
            norms[name] = torch.cat([norm.flatten() for _, norm in groups]).mean()
        elif not any(p.requires_grad for p in parameters):
            norms[name] = torch.zeros(())
    return norms


class Networks:
    """The M networks of a stacked module one by one, as views of its parameters, which an optimizer steps apart.

        networks = Networks(agent, M)  # after agent.to(device)
        optimizer = torch.optim.Adam([{"params": networks[m], "lr": learning_rate[m]} for m in range(M)])
        optimizer.zero_grad()
        loss.backward()
        networks.take_gradients(active=[2])  # the others keep their weights, and Adam its moments and steps of them
        optimizer.step()

    What is not stacked, and what is a stack of 1, all networks share: it goes with network 0.
    """

    def __init__(self, module: nn.Module, num_networks: int):
        self.stacked = [p for layer in module.modules() for p in of_each_network(layer)]
        of_stacks = set(self.stacked)
        self.shared = [p for p in module.parameters() if p not in of_stacks]
        self.views = [[p.detach().chunk(num_networks)[m] for p in self.stacked] for m in range(num_networks)]

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, m: int) -> list[torch.Tensor]:
        return self.views[m] if m > 0 else [*self.views[m], *self.shared]

    def take_gradients(self, active: Collection[int]) -> None:
        """Give the networks in `active` the gradients of the module, and the others none: they are left alone.

        The module keeps none of its stacks, which the optimizer's zero_grad() would not know of.
        """
        for m, views in enumerate(self.views):
            for p, view in zip(self.stacked, views):
                view.grad = p.grad.chunk(len(self))[m] if m in active and p.grad is not None else None
        for p in self.stacked:
            p.grad = None
        if 0 not in active:
            for p in self.shared:
                p.grad = None


def as_numpy(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """`network` as a function of NumPy arrays, without gradients; to be made anew after each update of the network.

    For the few rows of one environment step NumPy takes a quarter of torch's time. It knows the layers below, by exact
    type, in nn.Sequential; a network with any other layer is called as it is, through torch: slower, never different.
    Of a Recurrent network the function takes x (N, A, D) and memory (N, A, S), and returns outputs and memory after it.
    """
    if isinstance(network, Recurrent):
        return numpy_recurrent(network)
    layers = numpy_layers(network)
    if layers is None:
        return through_torch(network)

    def forward(x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = layer(x)
        return x

    return forward


def through_torch(network: nn.Module) -> Callable[..., Any]:
    """The network as it is, on arrays."""
    device = next((p.device for p in network.parameters()), None)

    @torch.no_grad()
    def forward(*arrays: np.ndarray) -> Any:
        out = network(*(torch.as_tensor(x, device=device) for x in arrays))
        return tuple(x.cpu().numpy() for x in out) if isinstance(out, tuple) else out.cpu().numpy()

    return forward


def numpy_layers(network: nn.Module) -> list[Callable] | None:
    """The layers of a network as NumPy functions, None if one of them is of an unknown kind."""
    if is_watched(network):
        return None
    if type(network) is nn.Sequential:
        parts = [numpy_layers(layer) for layer in network]
        return None if None in parts else [function for part in parts for function in part or ()]
    make = NUMPY_LAYERS.get(type(network))
    return make and [make(network)]


def is_watched(network: nn.Module) -> bool:
    """Whether somebody watches or replaces what it does."""
    return bool(network._forward_hooks or network._forward_pre_hooks or "forward" in vars(network))


def numpy_linear(layer: nn.Linear):
    weight, bias = to_numpy(layer.weight).T, 0 if layer.bias is None else to_numpy(layer.bias)
    return lambda x: x @ weight + bias


def numpy_stacked_linear(layer: StackedLinear):
    weight, bias = to_numpy(layer.weight), to_numpy(layer.bias)
    if layer.num_networks == 1:
        weight, bias = weight[0], bias[0]
        return lambda x: (x.reshape(-1, x.shape[-1]) @ weight + bias).reshape(*x.shape[:-1], -1)
    return lambda x: (x.swapaxes(0, 1) @ weight + bias).swapaxes(0, 1)


def numpy_ids(layer: AgentIds):
    ids = to_numpy(layer.ids)

    def forward(x: np.ndarray) -> np.ndarray:
        out = np.empty((*x.shape[:-1], x.shape[-1] + len(ids)), x.dtype)  # a fifth of np.concatenate's time
        out[..., : x.shape[-1]], out[..., x.shape[-1] :] = x, ids
        return out

    return forward


def numpy_normalize(layer: RunningMeanStd):
    return lambda x: ((x - to_numpy(layer.mean)) / to_numpy(layer.std)).clip(-10, 10)  # as they are at that moment


def numpy_recurrent(network: Recurrent):
    layers = [(isinstance(layer, StackedCell), numpy_layers(layer)) for layer in network]
    if type(network) is not Recurrent or is_watched(network) or any(functions is None for _, functions in layers):
        return through_torch(network)

    ends = np.cumsum([cell.memory_size for cell in network.cells]).tolist()

    def forward(x: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        states = (memory[..., start:end] for start, end in zip([0, *ends], ends))
        memories = []
        for remembers, functions in layers:
            for function in functions or ():
                if remembers:
                    x, after = function(x, next(states))
                    memories.append(after)
                else:
                    x = function(x)
        return x, memories[0] if len(memories) == 1 else np.concatenate(memories, -1)

    return forward


def numpy_cell(layer: StackedCell):
    """One step: x (N, A, in), state (N, A, S) -> output (N, A, H), state (N, A, S)."""
    shared = layer.num_networks == 1
    weights = [to_numpy(w) for w in (layer.weight_ih, layer.bias_ih, layer.weight_hh, layer.bias_hh)]
    weight_ih, bias_ih, weight_hh, bias_hh = (w[0] for w in weights) if shared else weights

    def step(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = state.shape
        x, state = (a.reshape(-1, a.shape[-1]) if shared else a.swapaxes(0, 1) for a in (x, state))
        state = layer.step(x @ weight_ih + bias_ih, layer.output(state) @ weight_hh + bias_hh, state, *NUMPY)
        state = state.reshape(shape) if shared else state.swapaxes(0, 1)
        return layer.output(state), state

    return step


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


NUMPY_LAYERS = {
    nn.Linear: numpy_linear,
    nn.Identity: lambda layer: lambda x: x,
    nn.Tanh: lambda layer: np.tanh,
    Tanh: lambda layer: np.tanh,
    nn.ReLU: lambda layer: lambda x: np.maximum(x, 0),
    StackedLinear: numpy_stacked_linear,
    AgentIds: numpy_ids,
    RunningMeanStd: numpy_normalize,
    StackedGRU: numpy_cell,
    StackedLSTM: numpy_cell,
}


Bf16 = Literal["off", "on", "auto"]

# The same random numbers as without; in this process, so that nothing is left behind when a run is stopped; tanh as
# what it is of exp, in a third of the time.
OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1, "cpp.use_decompose_tanh": True}


class CompileError(Exception):
    """torch.compile does not work here: its reason in one line."""


class Compilation:
    """Whether functions marked with @compilable are compiled, in this process, and for what device."""

    wanted, device = False, torch.device("cpu")


def compilable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of functions of tensors, such as losses: torch compiles them if it is asked for.

    Gradients are compiled too. A loop is unrolled, one over hundreds of steps takes minutes: keep GAE out of it.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False, options=OPTIONS))  # imports for seconds

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not Compilation.wanted:
            return function(*args)
        # a number would be compiled in, and one that falls over the run compiled anew at every update
        return compiled()(*(torch.tensor(x, device=Compilation.device) if isinstance(x, float) else x for x in args))

    return call


def compile_losses(wanted: bool, device: torch.device) -> None:
    """From now on functions marked with @compilable are compiled, or not. CompileError if this machine cannot."""
    Compilation.wanted = False
    if wanted:
        try:
            torch.compile(torch.sin, options=OPTIONS)(torch.ones(8, device=device))
        except Exception as error:  # of whatever part: Dynamo, Inductor, Triton, the compiler
            raise CompileError(next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)) from error
    Compilation.wanted, Compilation.device = wanted, device


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
