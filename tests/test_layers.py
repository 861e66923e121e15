"""layers.py: stacked networks against networks one by one, statistics against NumPy's, fast acting against torch."""

import math

from cleanmarl.layers import (
    AgentIds,
    Networks,
    Recurrent,
    RunningMeanStd,
    StackedGRU,
    StackedLinear,
    StackedLSTM,
    Tanh,
    as_numpy,
    clip_grads_,
)

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

A, D, H, K = 3, 5, 8, 4


@pytest.mark.parametrize("size_out", [1, K, 20])
@pytest.mark.parametrize("num_rows", [7, 200])  # of A agents: heads of many rows are calculated in another way
@pytest.mark.parametrize("num_networks", [1, A])
def test_a_stack_is_its_layers_one_by_one(num_networks, num_rows, size_out):
    layer = StackedLinear(num_networks, D, size_out).double()
    x = torch.randn(num_rows, A, D, dtype=torch.float64, requires_grad=True)
    inputs = [layer.weight, layer.bias, x]
    of_agents = [F.linear(x[:, a], layer.weight[a % num_networks].T, layer.bias[a % num_networks, 0]) for a in range(A)]
    out, expected = layer(x), torch.stack(of_agents, 1)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, of_definition in zip(torch.autograd.grad((out * weight).sum(), inputs), theirs):
        torch.testing.assert_close(gradient, of_definition)


@pytest.mark.parametrize("num_networks", [1, A])
def test_parts_stand_for_their_concatenation(num_networks):
    layer = StackedLinear(num_networks, 2 * D + 6, K).double()
    state, obs, other = (torch.randn(7, n, size, dtype=torch.float64) for n, size in ((1, 6), (A, D), (A, D)))
    joined = torch.cat([state.expand(-1, A, -1), obs, other], dim=-1)
    torch.testing.assert_close(layer((state, obs, other)), layer(joined))
    with pytest.raises(RuntimeError):
        layer((state, obs))  # a part is missing


def test_a_stack_starts_as_torch_layers_do():
    torch.manual_seed(0)
    weight = StackedLinear(50, 100, 40).weight
    expected = nn.Linear(100, 2000).weight  # uniform in +-1 / sqrt(100)
    assert weight.abs().max() <= 0.1 and abs(weight.std() / expected.std() - 1) < 0.01


def test_the_networks_of_a_stack_learn_apart():
    network = nn.Sequential(StackedLinear(A, D, H), nn.Tanh(), StackedLinear(A, H, 1))
    network(torch.randn(7, A, D))[:, 1].sum().backward()
    for p in network.parameters():
        assert (p.grad[1] != 0).any() and (p.grad[[0, 2]] == 0).all()


def test_ids_follow_what_an_agent_sees():
    x, state = torch.randn(2, 7, A, D), torch.randn(7, 1, 6)
    with_ids = AgentIds(A)(x)
    assert with_ids.shape == (2, 7, A, D + A)
    torch.testing.assert_close(with_ids[..., :D], x)
    torch.testing.assert_close(with_ids[..., D:], torch.eye(A).expand(2, 7, A, A))
    first, second = AgentIds(A)((state, x[0]))
    assert first is state
    torch.testing.assert_close(second, with_ids[0])


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.sampled_from([1, A]),
    st.sampled_from([1, D]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_moments_are_those_of_all_samples_that_count(sizes, num_networks, width, seed):
    """The dead do not, with weights (R, A, 1), nor does padding, with weights (R, A, D)."""
    rng = np.random.default_rng(seed)
    stats, samples = RunningMeanStd(num_networks, D).double(), {key: [] for key in np.ndindex(num_networks, D)}
    for size in sizes:
        x, weight = rng.normal(3, 2, size=(size, A, D)), rng.random((size, A, width)) < 0.7
        stats.update(torch.from_numpy(x), torch.from_numpy(weight).double())
        for r, a, d in zip(*np.nonzero(np.broadcast_to(weight, x.shape))):
            samples[a % num_networks, d].append(x[r, a, d])
    for (m, d), values in samples.items():
        mean, var = (np.mean(values), np.var(values)) if values else (0, 1)
        np.testing.assert_allclose(stats.mean[m, d], mean, atol=1e-9)
        np.testing.assert_allclose(stats.var[m, d], var, atol=1e-9)
        assert stats.count[m, d] == len(values)


def test_normalisation_is_undone_and_clipped():
    stats, x = RunningMeanStd(A, D), torch.randn(50, A, D) * 5 + 2
    stats.update(x)
    torch.testing.assert_close(stats.denormalize(stats.normalize(x)), x, atol=1e-5, rtol=1e-5)
    assert stats(x + 1000).max() == 10 and stats(x - 1000).min() == -10
    assert stats(x).mean().abs() < 1e-5


@pytest.mark.parametrize("max_norm", [2.0, math.inf])
def test_each_network_is_clipped_by_its_own_norm(max_norm):
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(StackedLinear(A, D, H), nn.LayerNorm(H), StackedLinear(A, H, 1))
            self.critic = nn.Sequential(StackedLinear(1, D, H), nn.Tanh(), StackedLinear(1, H, 1))
            self.unused = nn.Linear(2, 2)  # has no gradient
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.log_std, self.num_networks = nn.Parameter(torch.zeros(A, K)), A  # a stack of the agent's own
            self.temperature = nn.Parameter(torch.zeros(()))  # and one for all networks

    torch.manual_seed(0)
    agent, x = Agent(), torch.randn(9, A, D) * torch.tensor([1.0, 30.0, 300.0])[:, None]
    own = (agent.log_std * torch.tensor([0.1, 5.0, 50.0])[:, None]).sum() + 3 * agent.temperature
    (agent.actor(x).sum() + 0.01 * agent.critic(x).sum() + own).backward()
    before = {p: p.grad.clone() for p in agent.parameters() if p.grad is not None}
    norms = clip_grads_(agent, max_norm)

    groups = [[(p, m) for layer in agent.actor[::2] for p in layer.parameters()] for m in range(A)]
    groups += [[(p, slice(None)) for p in agent.actor[1].parameters()]]  # what the stacked networks share
    groups += [[(p, slice(None)) for p in agent.critic.parameters()]]
    groups += [[(agent.log_std, m)] for m in range(A)] + [[(agent.temperature, ...)]]
    expected = []
    for group in groups:
        norm = torch.cat([before[p][m].flatten() for p, m in group]).norm()
        expected.append(norm)
        for p, m in group:
            torch.testing.assert_close(p.grad[m], before[p][m] * min(1, max_norm / (norm + 1e-6)))
    assert min(expected) < 2 < max(expected)  # both cases are there
    torch.testing.assert_close(norms["actor"], torch.stack(expected[: A + 1]).mean())
    torch.testing.assert_close(norms["critic"], expected[A + 1])
    torch.testing.assert_close(norms[""], torch.stack(expected[A + 2 :]).mean())
    assert "unused" not in norms and norms["frozen"] == 0


def test_stacks_of_different_size_in_one_child_are_clipped_apart():
    """As an encoder of each agent and an ensemble of critics."""
    agent = nn.ModuleDict({"critic": nn.ModuleList([StackedLinear(3, D, H), StackedLinear(5, D, H)])})
    torch.manual_seed(0)
    sum((layer(torch.randn(9, len(layer.weight), D)) ** 2).sum() for layer in agent["critic"]).backward()
    before = [
        (layer, m, [p.grad[m].clone() for p in layer.parameters()])
        for layer in agent["critic"]
        for m in range(len(layer.weight))
    ]
    norms = [torch.cat([gradient.flatten() for gradient in gradients]).norm() for *_, gradients in before]
    torch.testing.assert_close(clip_grads_(agent, 2.0)["critic"], torch.stack(norms).mean())
    for (layer, m, gradients), norm in zip(before, norms, strict=True):
        for p, gradient in zip(layer.parameters(), gradients):
            torch.testing.assert_close(p.grad[m], gradient * min(1, 2 / (norm + 1e-6)))


def test_lstms_learn_in_torch_as_when_training():
    class Calls(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.lstm:
                calls.append(args[6])  # train: without it there is no backward pass in cuDNN
            return function(*args, **(kwargs or {}))

    calls, cell = [], StackedLSTM(1, 3, 4)
    with Calls():
        cell(torch.randn(10, A, 3), torch.zeros(2, A, 8), last=True)
    assert calls == [True]


@pytest.mark.parametrize("num_networks", [1, A])
def test_the_last_state_alone_is_the_last_of_all_states(num_networks):
    torch.manual_seed(0)
    for cell in (StackedGRU, StackedLSTM):
        network = Recurrent(cell(num_networks, D, H), nn.Tanh(), cell(num_networks, H, H)).double()
        x, memory = torch.randn(6 * 2, A, D).double(), torch.randn(2, A, network.memory_size).double()
        results = []
        for last in (False, True):
            out, after = network(x, memory, last=last)
            loss = out.square().sum() + after[-2:].square().sum()
            results.append([out, after[-2:], *torch.autograd.grad(loss, list(network.parameters()))])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 3), (), (7,), (600, A, H)])
def test_tanh_and_its_gradients_are_those_of_float64(shape):
    x = 4 * torch.randn(shape)
    if x.ndim == 3:
        x[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-40, 50.0, torch.inf, -torch.inf])
        x = x.transpose(1, 2)  # of any layout
    weight, results = torch.randn(x.shape), []
    for inputs in (x.clone().requires_grad_(), x.double().requires_grad_()):
        y = Tanh()(inputs)
        (gradient,) = torch.autograd.grad((y * weight).sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad((gradient * weight).sum(), inputs)
        results.append([part.detach().double() for part in (y, gradient, second)])
    for ours, exact, atol in zip(*results, (2e-7, 2e-6, 2e-5)):
        torch.testing.assert_close(ours, exact, atol=atol, rtol=0)
    assert Tanh()(torch.tensor([torch.nan])).isnan().all() and Tanh()(x).dtype == torch.float32
    with torch.no_grad():
        assert not Tanh()(x.requires_grad_()).requires_grad


def test_tanh_goes_through_torch_where_it_is_not_numpys():
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.randn(9, dtype=dtype)
        assert torch.equal(Tanh()(x), x.tanh())
    program = torch.export.export(nn.Sequential(Tanh()), (torch.randn(2, 3),))
    assert "aten.tanh" in str(program.graph)


class LoudTanh(nn.Tanh):
    """Looks like a layer that NumPy knows, and is not."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(layer):
    layer.register_forward_hook(lambda module, args, out: out + 1)
    return layer


def patched(layer):
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)
    return layer


KNOWN = {
    "tanh": nn.Tanh,
    "fast tanh": Tanh,
    "relu": nn.ReLU,
    "identity": nn.Identity,
    "linear": lambda: nn.Linear(H, H),
    "no bias": lambda: nn.Linear(H, H, bias=False),
    "shared": lambda: StackedLinear(1, H, H),
    "stacked": lambda: StackedLinear(A, H, H),
    "nested": lambda: nn.Sequential(nn.Linear(H, H), nn.Tanh()),
    "statistics": lambda: RunningMeanStd(1, H),
}
UNKNOWN = {
    "gelu": nn.GELU,
    "norm": lambda: nn.LayerNorm(H),
    "norm without parameters": lambda: nn.LayerNorm(H, elementwise_affine=False),
    "subclass": LoudTanh,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(H, H)),
    "hook": lambda: hooked(nn.Linear(H, H)),
    "patched": lambda: patched(nn.Tanh()),
    "dropout": lambda: nn.Dropout().eval(),
}


@given(st.lists(st.sampled_from([*KNOWN, *UNKNOWN]), max_size=4), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_acting_in_numpy_is_acting_in_torch(names, seed):
    torch.manual_seed(seed)
    layers = [(KNOWN | UNKNOWN)[name]() for name in names]
    network = nn.Sequential(AgentIds(A), StackedLinear(A, D + A, H), *layers, StackedLinear(1, H, K))
    for stats in (m for m in network.modules() if isinstance(m, RunningMeanStd)):
        stats.update(torch.randn(20, A, H) * 3 + 1)
    x = np.random.default_rng(seed).normal(size=(6, A, D)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(x)).numpy()
    out = as_numpy(network)(x)
    assert out.dtype == np.float32 and out.shape == expected.shape
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_known_layers_are_not_run_by_torch(name, monkeypatch):
    network = nn.Sequential(KNOWN[name]())
    act = as_numpy(network)
    monkeypatch.setattr(nn.Module, "__call__", None)
    assert act(np.ones((2, A, H), np.float32)).shape == (2, A, H)


def test_an_unknown_module_acts_by_torch_on_its_own():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRUCell(D, D)

        def forward(self, x):
            return self.gru(x).relu()

    network, x = Network(), np.ones((2, D), np.float32)
    out = as_numpy(network)(x)
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, network(torch.from_numpy(x)).detach().numpy())


@pytest.mark.parametrize("num_networks", [1, A])
@pytest.mark.parametrize("cell, theirs", [(StackedGRU, nn.GRU), (StackedLSTM, nn.LSTM)])
def test_cells_are_those_of_torch_and_forget_where_they_are_told_to(cell, theirs, num_networks):
    T, N = 6, 4
    layer, x = cell(num_networks, D, H).double(), torch.randn(T * N, A, D, dtype=torch.float64)
    state, forget = torch.randn(N, A, layer.memory_size, dtype=torch.float64), torch.rand(T * N, A) < 0.3
    output, states = layer(x, state, forget)
    gradient = dict(zip(("ih", "hh"), torch.autograd.grad(output.sum(), (layer.weight_ih, layer.weight_hh))))
    expected = {name: torch.zeros_like(g) for name, g in gradient.items()}
    assert forget.any() and torch.equal(output, states[..., :H])
    for a in range(A):
        m, rnn, now, outputs = a % num_networks, theirs(D, H).double(), state[None, :, a], []
        for name in gradient:
            getattr(rnn, f"weight_{name}_l0").data = getattr(layer, f"weight_{name}")[m].T.detach().clone()
            getattr(rnn, f"bias_{name}_l0").data = getattr(layer, f"bias_{name}")[m, 0].detach().clone()
        for t in range(T):
            rows = slice(t * N, t * N + N)
            before = tuple(part.contiguous() for part in now.chunk(2, -1)) if theirs is nn.LSTM else now
            out, now = rnn(x[None, rows, a], before)
            now = torch.cat(now, -1) if theirs is nn.LSTM else now
            torch.testing.assert_close(states[rows, a], now[0])
            now = now * ~forget[rows, a, None]
            outputs.append(out)
        for name in gradient:
            weight = getattr(rnn, f"weight_{name}_l0")
            expected[name][m] += torch.autograd.grad(torch.cat(outputs).sum(), weight, retain_graph=True)[0].T
    for name in gradient:
        torch.testing.assert_close(gradient[name], expected[name])


def test_cells_start_as_torch_cells_do():
    torch.manual_seed(0)
    layer, theirs = StackedGRU(50, 20, 100), nn.GRU(20, 100)
    for name, parameter in layer.named_parameters():
        expected = getattr(theirs, f"{name}_l0")
        assert parameter[0].numel() == expected.numel() and parameter.abs().max() <= 0.1
        assert abs(parameter.std() / 0.1 * 3**0.5 - 1) < 0.03  # uniform in +-1 / sqrt(100)


CELLS = {
    "gru": lambda: [StackedGRU(A, H, H)],
    "lstm": lambda: [StackedLSTM(1, H, H)],
    "two": lambda: [StackedLSTM(A, H, 6), StackedLinear(1, 6, H), nn.Tanh(), StackedGRU(1, H, H)],
}


@pytest.mark.parametrize("other", [*KNOWN, *UNKNOWN])
@pytest.mark.parametrize("cells", CELLS)
def test_remembering_in_numpy_is_remembering_in_torch(cells, other):
    torch.manual_seed(0)
    first, second = (KNOWN | UNKNOWN)[other](), (KNOWN | UNKNOWN)[other]()
    rest = first, *CELLS[cells](), second, StackedLinear(1, H, K)
    network = Recurrent(AgentIds(A), StackedLinear(A, D + A, H), *rest).eval()
    T, N = 5, 4
    x, memory = torch.randn(T * N, A, D), torch.randn(N, A, network.memory_size)
    forget = torch.rand(T * N, A) < 0.3
    with torch.no_grad():
        outputs, memories = network(x, memory, forget)
    act, now = as_numpy(network), memory.numpy()
    for t in range(T):
        rows = slice(t * N, t * N + N)
        output, now = act(x[rows].numpy(), now)
        np.testing.assert_allclose(output, outputs[rows], atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(now, memories[rows], atol=1e-5, rtol=1e-4)
        now = now * ~forget[rows, :, None].numpy()


def test_recurrent_names_the_layer_that_it_cannot_carry():
    with pytest.raises(TypeError, match=r"no memory of GRU\(4, 4\): StackedGRU or StackedLSTM\(1, in, out\)"):
        Recurrent(nn.Linear(3, 4), nn.GRU(4, 4))
    with pytest.raises(TypeError, match=r"no memory of GRUCell\(4, 4\)"):  # wherever it is
        Recurrent(nn.Linear(3, 4), nn.Sequential(nn.GRUCell(4, 4)))
    with pytest.raises(TypeError, match="must be a layer of Recurrent itself"):
        Recurrent(nn.Linear(3, 4), nn.Sequential(nn.LayerNorm(4), StackedGRU(1, 4, 4)))
    part = Recurrent(nn.Linear(3, 4), StackedLSTM(1, 4, 4))[:-1]  # is one, too
    with pytest.raises(TypeError, match="Recurrent needs a layer that remembers: a StackedGRU"):
        print(part.memory_size)
    with pytest.raises(TypeError, match="Recurrent needs a layer that remembers: a StackedGRU"):
        part(torch.ones(2, 1, 3), torch.zeros(2, 1, 8))


def test_known_cells_are_not_run_by_torch_and_watched_ones_are(monkeypatch):
    x, memory = np.ones((2, A, H), np.float32), np.zeros((2, A, 2 * H), np.float32)
    plain, watched = Recurrent(StackedLSTM(A, H, H)), Recurrent(StackedLSTM(A, H, H))
    watched[0].register_forward_hook(lambda module, args, out: (out[0] + 1, out[1]))
    act, act_watched = as_numpy(plain), as_numpy(watched)
    output, after = act_watched(x, memory)
    np.testing.assert_allclose(output, after[..., :H] + 1)
    monkeypatch.setattr(nn.Module, "__call__", None)
    assert act(x, memory)[1].shape == (2, A, 2 * H)


def test_networks_step_alone_with_zero_grad_of_module_or_optimizer():
    """Each of three stacked learners, in turn, against one of its own; gradients do not add up from step to step."""
    torch.manual_seed(0)
    x, stacks = torch.randn(5, 3, 2), [nn.Sequential(StackedLinear(3, 2, 1), nn.LayerNorm(1)) for _ in range(2)]
    stacks[1].load_state_dict(stacks[0].state_dict())
    alone = [nn.Linear(2, 1) for _ in range(3)]
    for m, linear in enumerate(alone):
        linear.weight.data, linear.bias.data = (
            stacks[0][0].weight.data[m].T.clone(),
            stacks[0][0].bias.data[m, 0].clone(),
        )
    adams = [torch.optim.Adam(linear.parameters(), lr=0.1) for linear in alone]
    networks = [Networks(stack[0], 3) for stack in stacks]
    optimizers = [torch.optim.Adam([{"params": n[m]} for m in range(3)], lr=0.1) for n in networks]
    for step in range(6):
        m = step % 3
        for stack, n, optimizer, zero in zip(stacks, networks, optimizers, (optimizers[0], stacks[1])):
            zero.zero_grad()
            (stack[0](x) - 1).square().mean().backward()
            n.take_gradients(active=[m])
            optimizer.step()
        adams[m].zero_grad()
        ((alone[m](x[:, m]) - 1).square().sum() / x[..., 0].numel()).backward()
        adams[m].step()
    for stack in stacks:
        for m, linear in enumerate(alone):
            torch.testing.assert_close(stack[0].weight[m].T, linear.weight, rtol=1e-4, atol=1e-5)


def test_parametrized_stacks_are_stepped_and_clipped_one_by_one():
    """Their parameters are those of a child module, which does not say of how many networks they are."""
    torch.manual_seed(0)
    agent = nn.ModuleDict({"actor": nn.Sequential(weight_norm(StackedLinear(A, D, H)), StackedLinear(A, H, 1))})
    agent["actor"][0].register_parameter("gain", nn.Parameter(torch.ones(2 * A)))  # all of them share it
    networks = Networks(agent, A)
    optimizer = torch.optim.SGD([{"params": networks[m]} for m in range(A)], lr=0.1)
    x = torch.randn(9, A, D) * torch.tensor([1.0, 30.0, 300.0])[:, None]
    agent["actor"](x).sum().backward()
    clip_grads_(agent, 2.0)
    stacked = {name: p for name, p in agent.named_parameters() if "gain" not in name}
    assert sum("parametrizations" in name for name in stacked) == 2
    squares = torch.stack([p.grad.flatten(1).square().sum(1) for p in stacked.values()]).sum(0)
    torch.testing.assert_close(squares.sqrt()[1:], torch.full((A - 1,), 2.0))
    before = {name: p.detach().clone() for name, p in stacked.items()}
    networks.take_gradients(active=[1])
    optimizer.step()
    for name, p in stacked.items():
        moved = (p - before[name]).flatten(1).abs().sum(1) > 0
        assert moved.tolist() == [m == 1 for m in range(A)]


def test_statistics_that_go_on_act_as_they_are():
    network = nn.Sequential(RunningMeanStd(1, D))
    act, x = as_numpy(network), torch.randn(9, A, D) * 3 + 1
    network[0].update(x)
    np.testing.assert_allclose(act(x.numpy()), network(x), atol=1e-5)


def test_statistics_of_samples_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"samples are \(R, A, D\), not \(512, 1\)"):
        RunningMeanStd(1, 1).update(torch.rand(512, 1))


def test_networks_of_a_stack_are_initialised_as_the_page_says():
    """docs/change.md: each one's weight as torch.nn.Linear's would be."""
    torch.manual_seed(0)
    layer = StackedLinear(3, 400, 100)
    for init, std in ((torch.nn.init.xavier_uniform_, 500**-0.5 * 2**0.5), (torch.nn.init.kaiming_uniform_, 200**-0.5)):
        for w in layer.weight.detach():
            init(w.T)
        assert layer.weight.std((1, 2)).tolist() == pytest.approx([std] * 3, rel=0.02)
    for w in layer.weight.detach():
        torch.nn.init.orthogonal_(w.T)
    torch.testing.assert_close(layer.weight.mT @ layer.weight, torch.eye(100).expand(3, -1, -1), rtol=0, atol=1e-5)


def test_what_all_networks_share_learns_with_the_first_alone():
    stack = nn.Sequential(StackedLinear(3, 2, 1), nn.LayerNorm(1))
    networks = Networks(stack, 3)
    for active in ([0], [2], [0, 1]):
        stack(torch.randn(5, 3, 2)).sum().backward()
        networks.take_gradients(active)
        assert (stack[1].bias.grad is not None) == (0 in active)
