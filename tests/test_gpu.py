"""Every script with --device cuda: it learns what it learns on the CPU, twice the same; a run may change devices."""

import dataclasses
import importlib
import math
import os
import subprocess
import sys
import time

from cleanmarl import coppo, enjoy, impala_atari_envpool, ippo, ppo, ppo_atari_envpool
from cleanmarl.actors import Actors, tensors
from cleanmarl.checkpoint import random_state, set_random_state
from cleanmarl.layers import compile_losses, use_bf16
from cleanmarl.run import load_checkpoint

import pytest
import torch
from optional import need
from test_continue import FOLDER, OF_AGENTS, SMALL, difference, env_id, logged, state, stop, train
from toys import curves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

GPU = "cuda"
PIXELS = {"total_timesteps": 256, "num_envs": 4, "num_steps": 32, "unroll_length": 32, "eval_episodes": 0}
ALONE = {"total_timesteps": 512, "num_envs": 4, "num_steps": 64, "unroll_length": 64, "eval_episodes": 2}
ALONE |= {"num_actors": 0}
# beside those of many agents; Ray's actors are tried in test_impala_ray.py
OTHERS = [path.stem for path in FOLDER.glob("*.py") if "with Run(" in path.read_text() and path.stem not in OF_AGENTS]
OTHERS = sorted(set(OTHERS) - {"run", "impala_ray"})
NEEDS = {"ppo_atari": "ale_py", "ppo_atari_lstm": "ale_py", "ppo_procgen": "Qt 5"}


def arguments(name, runs_dir, **changes):
    """Of a short run whose minibatches are whole rollouts: in which order they come is another on a GPU."""
    need(NEEDS.get(name, "numpy"))
    script = importlib.import_module(f"cleanmarl.{name}")
    fields = {field.name for field in dataclasses.fields(script.Args)}
    flags = SMALL if name in OF_AGENTS else SMALL | ALONE
    flags |= PIXELS if "atari" in name or "procgen" in name else {}
    if name in OF_AGENTS:
        flags = flags | {"env_id": env_id(name, "toy")}
    elif "continuous" in name:
        flags = flags | {"env_id": "Pendulum-v1"}
    flags = {key: value for key, value in flags.items() if key in fields}
    return script.Args(**flags | {"runs_dir": str(runs_dir)} | changes)


@pytest.fixture
def same_noise(monkeypatch):
    """What is drawn on the GPU is drawn on the CPU and moved."""
    exponential, randn = torch.Tensor.exponential_, torch.randn
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x: x.data.copy_(exponential(torch.empty(x.shape))))
    monkeypatch.setattr(torch, "randn", lambda *shape, device="cpu": randn(*shape).to(device))
    monkeypatch.setattr(torch, "randn_like", lambda x: randn(x.shape).to(x.device))


@pytest.mark.parametrize("name", OF_AGENTS + OTHERS)
def test_a_gpu_learns_what_the_cpu_does(name, same_noise, toy, tmp_path):
    """All that the first update says is the same, to the roundings; the second one's is, twice, to the last bit."""
    args = arguments(name, tmp_path)
    cpu, first, second = (
        train(name, dataclasses.replace(args, device=device, runs_dir=str(tmp_path / folder)))
        for device, folder in (("cpu", "0"), (GPU, "1"), (GPU, "2"))
    )
    ours, theirs = curves(first), curves(cpu)
    assert ours.keys() == theirs.keys()
    for tag in [tag for tag in ours if tag.startswith("train/")]:
        assert all(map(math.isfinite, ours[tag])), tag
        assert ours[tag][0] == pytest.approx(theirs[tag][0], rel=0.01, abs=1e-3), tag
    assert logged(first) == logged(second)
    assert difference(state(first)["modules"], state(second)["modules"]) is None


@pytest.mark.parametrize("name", OF_AGENTS)
def test_a_resumed_run_equals_one_that_was_not_stopped(name, toy, tmp_path, monkeypatch):
    args = arguments(name, tmp_path, device=GPU, checkpoint_interval=40)
    whole = train(name, args)
    stop(monkeypatch, 110, lambda: os.kill(os.getpid(), 15))
    with pytest.raises(SystemExit):
        train(name, args)
    (folder,) = set(tmp_path.iterdir()) - {whole}
    train(name, dataclasses.replace(args, resume=folder))
    assert difference(state(whole), state(folder)) is None
    assert logged(whole) == logged(folder)


@pytest.mark.parametrize("name", OF_AGENTS + OTHERS)
def test_a_run_changes_devices(name, toy, tmp_path, monkeypatch):
    """Begun on the one it goes on on the other and comes back; it is played where there is no GPU."""
    args = arguments(name, tmp_path, device="cpu")
    folder = train(name, args)
    for i, device in enumerate((GPU, "cpu", GPU)):
        total = args.total_timesteps * (i + 2)
        train(name, dataclasses.replace(args, device=device, resume=folder, total_timesteps=total))
        assert load_checkpoint(folder)["step"] >= total  # some end with an episode
    assert enjoy.main(enjoy.Args(folder, episodes=1))["eval/ep_length"] > 0


def test_it_is_played_where_there_is_no_gpu(tmp_path):
    folder = train("ppo", arguments("ppo", tmp_path, device=GPU))
    command = [sys.executable, "-m", "cleanmarl", "enjoy", folder, "--episodes", "2"]
    played = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert played.returncode == 0, played.stderr
    command = [sys.executable, ppo.__file__, "--resume", folder, "--total-timesteps", "1024"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    refused = subprocess.run(command, capture_output=True, text=True, env=env)
    assert refused.returncode == 2 and "--device cuda is not there" in refused.stderr
    resumed = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, env=env)
    assert resumed.returncode == 0, resumed.stderr
    assert load_checkpoint(folder)["step"] == 1024


def test_random_states_of_more_gpus_than_are_here():
    """As of a machine with twice as many: those that are here are set."""
    randoms = random_state()
    drawn = torch.rand(3, device=GPU)
    set_random_state(randoms | {"cuda": randoms["cuda"] * 2})
    assert (torch.rand(3, device=GPU) == drawn).all()


def test_a_gpu_that_is_not_there():
    command = [sys.executable, ppo.__file__, "--device", f"cuda:{torch.cuda.device_count()}"]
    run = subprocess.run(command, capture_output=True, text=True)
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and f"--device cuda:{torch.cuda.device_count()} is not there" in line


def test_more_than_its_memory_is_one_line(tmp_path):
    """A minibatch of 307,200 rows on a thousandth of the GPU."""
    flags = ["--device", GPU, "--num-envs", "1024", "--num-steps", "100", "--num-minibatches", "1"]
    flags += ["--runs-dir", str(tmp_path)]
    code = f"""
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction(0.001)
sys.argv = ["ippo.py", *{flags}]
runpy.run_path({ippo.__file__!r}, run_name="__main__")"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    assert run.stderr.splitlines()[-1].startswith("ippo: not enough memory: CUDA out of memory"), run.stderr


@pytest.mark.parametrize("name", ["ppo", "ippo", "coppo", "ppo_continuous_action", "ppo_atari_envpool"])
def test_compiled_losses_are_the_same(name, toy, tmp_path):
    args = arguments(name, tmp_path, device=GPU)
    if name == "coppo":  # Triton 3.6 could not compile its critic's loss for 90 rows
        args = coppo.Args(total_timesteps=6400, device=GPU, eval_episodes=0, runs_dir=str(tmp_path))
    try:
        plain, compiled = (train(name, dataclasses.replace(args, compile=wanted)) for wanted in (False, True))
    finally:
        compile_losses(False, torch.device("cpu"))
    ours, theirs = curves(compiled), curves(plain)
    for tag in [tag for tag in theirs if tag.startswith("train/")]:
        assert ours[tag][0] == pytest.approx(theirs[tag][0], rel=0.01, abs=1e-3), tag


def test_bf16_is_a_gpus(tmp_path):
    args = arguments("ppo_atari_envpool", tmp_path, device=GPU, bf16="auto")
    assert use_bf16(args)
    precise, rough = (train("ppo_atari_envpool", dataclasses.replace(args, bf16=bf16)) for bf16 in ("off", "auto"))
    ours, theirs = curves(rough), curves(precise)
    for tag in ("train/policy_loss", "train/value_loss", "train/entropy"):
        assert ours[tag][0] == pytest.approx(theirs[tag][0], rel=0.1, abs=0.02), tag


def test_bfloat16_ratios_are_1_before_the_first_step(tmp_path):
    """To two digits: the rounding of a row may depend on how many there are."""
    args = arguments("ppo_atari_envpool", tmp_path, device=GPU, bf16="on")
    envs = ppo_atari_envpool.make_envs(args, 4)
    agent = ppo_atari_envpool.Agent(envs, args).to(GPU)
    obs = torch.randint(0, 256, (64, 4, 84, 84), dtype=torch.uint8, device=GPU)
    with torch.no_grad():
        whole = agent(obs)[0].log_softmax(-1)
        parts = torch.cat([agent(x)[0] for x in obs.split(4)]).log_softmax(-1)
    torch.testing.assert_close(whole, parts, atol=0.02, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_actors_play_with_a_gpus_parameters(deterministic, tmp_path):
    args = arguments("impala_atari_envpool", tmp_path, device=GPU, num_actors=2, deterministic=deterministic)
    envs = impala_atari_envpool.make_envs(args, 1)
    agent = impala_atari_envpool.Agent(envs, args).to(GPU)
    dtype = impala_atari_envpool.unroll_dtype(envs, args)
    with Actors(impala_atari_envpool.Player, args, agent, dtype, 0) as actors:
        for version in range(6):
            with torch.no_grad():
                agent.actor.bias.fill_(float(version))
            slot = actors.take(version)
            assert slot["unrolls"]["obs"].any() and slot["version"] <= version
        for x, shared in actors.parameters.pairs:
            assert x.is_cuda and not shared.is_cuda
        assert [x.device.type for x in tensors(agent)] == ["cuda"] * len(tensors(agent))
    folder = train("impala_atari_envpool", dataclasses.replace(args, total_timesteps=1024))
    assert load_checkpoint(folder)["step"] == 1024


def torchrun(tmp_path, processes: int) -> subprocess.CompletedProcess:
    flags = {"total_timesteps": 128, "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "eval_episodes": 0}
    flags = [str(x) for key, value in flags.items() for x in (f"--{key.replace('_', '-')}", value)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    command = [*launcher, "-m", "cleanmarl.ppo_atari_multigpu", "--device", GPU, *flags, "--runs-dir", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_processes_talk_through_nccl(tmp_path):
    """As many as there are GPUs, up to two; one more is one line."""
    number = min(2, torch.cuda.device_count())
    run = torchrun(tmp_path, number)
    assert run.returncode == 0, run.stderr
    (folder,) = tmp_path.iterdir()
    assert load_checkpoint(folder)["step"] == 128


def test_more_processes_than_gpus(tmp_path):
    number = torch.cuda.device_count()
    start = time.monotonic()
    run = torchrun(tmp_path, number + 1)
    assert run.returncode != 0 and time.monotonic() - start < 60
    assert f"{number + 1} processes of torchrun need a GPU each, and this machine has {number}" in run.stderr
