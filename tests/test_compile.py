"""--compile: the same run as without, edits followed, one line where it cannot be. --bf16: where it is faster."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

from cleanmarl import (
    coma,
    coma_lstm,
    coppo_matrix,
    impala_atari_envpool,
    ppo,
    ppo_atari,
    ppo_atari_lstm,
    ppo_procgen,
    ppo_selfplay,
)
from cleanmarl.cli import launch
from cleanmarl.layers import compilable, compile_losses, use_bf16
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from optional import need, needs
from toys import curves

COMPILER = needs("g++")
CPU = torch.device("cpu")


@pytest.fixture
def compiling():
    """Functions marked with @compilable are compiled within the test."""
    torch._dynamo.reset()
    compile_losses(True, CPU)
    yield
    compile_losses(False, CPU)


@COMPILER
def test_runs_are_the_same_and_go_on_without(tmp_path, capsys):
    """Within 1e-5 all along; a checkpoint has the same names, and goes on in a run that compiles nothing."""
    sizes = {"total_timesteps": 1024, "num_envs": 2, "num_steps": 64, "eval_episodes": 2, "runs_dir": str(tmp_path)}
    plain, compiled = (ppo.main(ppo.Args(**sizes, compile=wanted)) for wanted in (False, True))
    assert capsys.readouterr().out.count("compiling the loss") == 1
    ours, theirs = curves(compiled), curves(plain)
    assert len(ours["train/policy_loss"]) == 8
    for name in [name for name in theirs if not name.startswith("time/")]:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    states = [load_checkpoint(folder)["modules"]["agent"] for folder in (plain, compiled)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    longer = sizes | {"total_timesteps": 1280, "resume": compiled}
    assert load_checkpoint(ppo.main(ppo.Args(**longer)))["step"] == 1280


@COMPILER
def test_what_cannot_be_compiled_runs_as_before(compiling):
    """A loss that somebody has edited: it calls NumPy, prints, and decides by a number."""
    seen = []

    @compilable
    def loss(x):
        y = x.square().mean()
        seen.append(y.detach().numpy().copy())
        return y if y.item() > 1 else -y

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for scale, sign in ((1, 1), (0.1, -1), (3, 1)):
        y = loss(x * scale)
        assert y.item() == pytest.approx(sign * 2.5 * scale**2) and len(seen) == [1, 0.1, 3].index(scale) + 1
        assert torch.autograd.grad(y, x)[0].tolist() == pytest.approx([sign * scale**2, sign * 2 * scale**2])


@COMPILER
def test_random_numbers_are_the_same(compiling):
    @compilable
    def draw(x):
        return torch.rand_like(x) + x

    results = []
    for function in (draw, draw.__wrapped__):
        torch.manual_seed(3)
        results.append(function(torch.zeros(5)).tolist())
    assert results[0] == results[1]


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled within the test, by a backend that only counts."""
    found, compile_ = [], torch.compile

    def backend(graph, _):
        found.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, options, **flags: compile_(f, backend=backend, **flags))
    yield found
    compile_losses(False, CPU)


def test_a_clip_coefficient_that_falls_is_compiled_once(graphs, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "ppo_loss", compilable(ppo.ppo_loss.__wrapped__))
    sizes = {"num_envs": 8, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1, "eval_episodes": 0}
    sizes |= {"total_timesteps": 12 * 128, "runs_dir": str(tmp_path), "anneal_clip_coef": True}
    folders = [ppo.main(ppo.Args(**sizes, compile=wanted)) for wanted in (True, False)]
    assert len(graphs) == 2  # with the try whether this machine can
    torch.testing.assert_close(*(load_checkpoint(folder)["modules"]["agent"] for folder in folders))


@pytest.mark.parametrize("script", [coma, coma_lstm, coppo_matrix])
def test_a_loss_is_compiled_once_while_exploration_falls(script, graphs, tmp_path, monkeypatch):
    shares = []
    for name in ("actor_loss", "critic_loss"):
        monkeypatch.setattr(script, name, compilable(getattr(script, name).__wrapped__))
    monkeypatch.setattr(script.Run, "log", lambda run, metrics: shares.append(metrics["train/epsilon"]))
    sizes = {"num_envs": 2, "num_steps": 4, "total_timesteps": 96, "eval_episodes": 0, "runs_dir": str(tmp_path)}
    sizes |= {"num_minibatches": 1, "update_epochs": 1} if script is coppo_matrix else {}
    script.main(script.Args(**sizes, compile=True, epsilon_start=0.5, epsilon_end=0.0, epsilon_timesteps=96))
    assert (
        len(shares) == len(set(shares)) == 12 and len(graphs) == 3
    )  # of actor, critics, and the try whether this machine can


def test_a_network_with_a_memory_is_compiled_once_wherever_episodes_begin(graphs, tmp_path, monkeypatch):
    need("ale_py", "cv2")
    script, places, counts = ppo_atari_lstm, set(), []

    def spy(agent, optimizer, batch, *rest):
        places.update(batch.start[:, i].sum().item() for i in range(4))
        metrics = update(agent, optimizer, batch, *rest)
        counts.append(len(graphs))
        return metrics

    update = script.update
    monkeypatch.setattr(script, "update", spy)
    monkeypatch.setattr(script.Agent, "remember", script.Agent.remember)  # as it was, after the test
    monkeypatch.setattr(script, "ppo_loss", compilable(script.ppo_loss.__wrapped__))
    sizes = {"num_envs": 4, "num_steps": 64, "num_minibatches": 4, "update_epochs": 1, "total_timesteps": 768}
    script.main(script.Args(**sizes, eval_episodes=0, compile=True, runs_dir=str(tmp_path)))
    assert len(places) > 2 and len(set(counts)) == 1 and len(counts) == 3


def test_without_a_compiler_it_ends_with_one_line(tmp_path):
    argv = ["cleanmarl/ppo.py", "--compile", "--runs-dir", str(tmp_path / "runs")]
    env = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    assert result.returncode == 2 and not (tmp_path / "runs").exists()
    assert re.fullmatch(r"ppo: --compile needs a C\+\+ compiler .*No working C\+\+ compiler.*\n", result.stderr)


@pytest.mark.parametrize(
    "reason, end",
    [
        (
            "PassManager::run failed",
            "cannot compile a loss of this script here (PassManager::run failed); run it without",
        ),
        # what torch keeps of a compilation that was killed
        (
            "/a/b.main.so: file too short",
            "was killed earlier, and left /a/b.main.so unfinished: delete it and start again",
        ),
        ("Ctrl-C", None),
    ],
)
def test_a_loss_that_the_compiler_cannot_compile_ends_with_one_line(reason, end, tmp_path, monkeypatch, capsys):
    """A backend that can do what is tried at the start and breaks at the loss, as Triton has done on a GPU."""

    def backend(graph, _):
        if len(graph.graph.nodes) > 10:
            if reason == "Ctrl-C":  # which the compiler gets as well
                os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError(reason)
        return graph

    compile_ = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, options, **flags: compile_(f, backend=backend, **flags))
    monkeypatch.setattr(ppo, "ppo_loss", compilable(ppo.ppo_loss.__wrapped__))
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--compile", "--runs-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        launch(ppo.main, ppo.Args)
    compile_losses(False, CPU)
    (folder,) = tmp_path.iterdir()
    assert load_checkpoint(folder)["step"] == 0  # no step has been learned from
    said = capsys.readouterr()
    if end is None:
        assert stopped.value.code == 130 and "error" not in said.err
        assert said.out.splitlines()[-1] == f"stopped at step 0; continue with --resume {folder}"
    else:
        saved, line = said.err.splitlines()[-2:]
        assert stopped.value.code == 1 and saved.startswith(f"saved step 0 in {folder}")
        assert line == f"ppo: --compile {end}"


ATARI = SimpleNamespace(
    single_observation_space=gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), single_action_space=gym.spaces.Discrete(6)
)


@pytest.mark.parametrize("script", [impala_atari_envpool, ppo_atari, ppo_atari_lstm])
def test_bf16_is_close_and_gives_float32(script):
    """Of the scripts that other tests do not ask; on a few pictures, two of them one after another."""
    results = []
    for choice in ("off", "on"):
        torch.manual_seed(0)
        agent = script.Agent(ATARI, script.Args(bf16=choice))
        obs, start = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.bool)
        if script is ppo_atari:
            results.append(agent(obs[0]))
        elif script is ppo_atari_lstm:
            results.append(agent(obs, ppo_atari_lstm.first_state(agent, 3), start)[:2])
        else:
            zeros = torch.zeros(2, 3, dtype=torch.long)
            results.append(agent(obs, start, zeros, zeros.float(), torch.zeros(2, 3, agent.state_size))[:2])
    assert all(x.dtype == torch.float32 for x in results[1]) and (results[0][1] != results[1][1]).any()
    torch.testing.assert_close(*results, atol=0.05, rtol=0.05)


def test_bf16_auto_asks_the_machine(monkeypatch):
    for script in (ppo_procgen, ppo_selfplay):
        for features, expected in (({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
            assert use_bf16(script.Args(bf16="auto")) is expected
            assert use_bf16(script.Args(bf16="on")) and not use_bf16(script.Args())
