"""ppo_atari_multigpu.py: two processes that average their gradients learn like one, and stay the same."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

from cleanmarl import enjoy, ppo_atari_multigpu
from cleanmarl.cli import UsageError
from cleanmarl.envs.pool import EnvPool
from cleanmarl.run import load_checkpoint

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toys import wait_for

pytest.importorskip("envpool")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no Gloo")
SMALL = {"total_timesteps": 128, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL |= {"eval_episodes": 0}
LEARNING = {"norm_adv": False, "num_minibatches": 1, "update_epochs": 3, "max_grad_norm": 0.01}


def random_batch():
    g = torch.Generator().manual_seed(0)
    obs = torch.randint(0, 256, (16, 4, 84, 84), generator=g, dtype=torch.uint8)
    rest = torch.randn(4, 16, generator=g)
    return ppo_atari_multigpu.Batch(obs, torch.randint(0, 4, (16,), generator=g), -rest[0].abs() - 0.1, *rest[1:])


def learn(batch, **settings):
    """The agent's parameters after an update on `batch`, and the diagnostics."""
    args = ppo_atari_multigpu.Args(**LEARNING | settings)
    torch.manual_seed(0)
    agent = ppo_atari_multigpu.Agent(EnvPool("Breakout-v5", 1), args)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    metrics = ppo_atari_multigpu.update(agent, optimizer, batch, 0.2, args)
    return [p.detach().contiguous() for p in agent.parameters()], metrics


def learn_half(rank, folder, settings):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    half = ppo_atari_multigpu.Batch(*(x[8 * rank : 8 * (rank + 1)] for x in random_batch()))
    torch.save(learn(half, **settings), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may still hold a tensor, which aborts an interpreter that is ending


def in_two_processes(folder, **settings):
    mp.spawn(learn_half, (str(folder), settings), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# proves aux-2
def test_two_processes_with_half_a_batch_each_learn_like_one_with_all_of_it(tmp_path):
    (first, first_metrics), (second, second_metrics) = in_two_processes(tmp_path)
    alone, metrics = learn(random_batch())
    start, _ = learn(random_batch(), update_epochs=1, max_grad_norm=1e-9)
    assert max((a - b).abs().max() for a, b in zip(alone, start)) > 1e-3
    for a, b, c in zip(first, second, alone):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        assert first_metrics[f"train/{name}"] == second_metrics[f"train/{name}"]
        assert first_metrics[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"].item(), abs=1e-4)


def test_all_stop_early_together(tmp_path):
    """Otherwise one would wait for the other's gradient forever."""
    (first, _), (second, _) = in_two_processes(tmp_path, target_kl=1e-9)
    alone, _ = learn(random_batch(), update_epochs=1)
    for a, b, c in zip(first, second, alone):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)


def torchrun(tmp_path, *flags, script=None):
    flags = [*flags, "--runs-dir", tmp_path / "runs"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["-m", "cleanmarl.ppo_atari_multigpu"] if script is None else [str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *launcher, *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=tmp_path, env=env, **pipes)


def flags(settings):
    return [str(x) for key, value in settings.items() for x in (f"--{key.replace('_', '-')}", value)]


SPY = """
import os
from pathlib import Path
import torch
from cleanmarl import ppo_atari_multigpu
from cleanmarl.cli import launch

def update(agent, optimizer, batch, *rest):
    file = Path(__file__).with_name(os.environ["RANK"] + ".pt")
    if not file.exists():
        torch.save([agent.state_dict(), optimizer.state_dict(), batch.obs, batch.action], file)
    return learn(agent, optimizer, batch, *rest)

learn, ppo_atari_multigpu.update = ppo_atari_multigpu.update, update
launch(ppo_atari_multigpu.main, ppo_atari_multigpu.Args)
"""


def test_torchrun_resumes_what_one_process_began(tmp_path):
    """Networks and optimisers of both processes, at their first update after it, are those of the checkpoint."""
    folder = ppo_atari_multigpu.main(ppo_atari_multigpu.Args(**SMALL, runs_dir=str(tmp_path / "runs")))
    saved = load_checkpoint(folder)["modules"]
    spy = tmp_path / "ppo_atari_multigpu.py"
    spy.write_text(SPY)
    process = torchrun(tmp_path, "--resume", folder, "--total-timesteps", 256, script=spy)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert list((tmp_path / "runs").iterdir()) == [folder]
    for rank in range(2):
        agent, optimizer, *_ = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(torch.equal(agent[key], x) for key, x in saved["agent"].items())
        for key, state in saved["optimizer"]["state"].items():
            assert all(torch.equal(optimizer["state"][key][name], x) for name, x in state.items())
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 256 and checkpoint["modules"]["optimizer"]["state"][0]["step"] == 8
    metrics = enjoy.main(enjoy.Args(run_dir=folder, episodes=1))
    assert metrics["eval/ep_length"] > 50


def test_each_process_plays_its_share_of_the_environments_and_no_episode_twice(tmp_path):
    """Neither what another process plays, nor what was played before a resume; their actions are their own, too."""
    spy = tmp_path / "ppo_atari_multigpu.py"
    spy.write_text(SPY)
    played = []
    for total in (64, 128):
        settings = SMALL | {"env_id": "Boxing-v5", "total_timesteps": total}
        resumed = ["--resume", *(tmp_path / "runs").iterdir()] if played else []
        out, _ = torchrun(tmp_path, *flags(settings), *resumed, script=spy).communicate(timeout=120)
        files = [tmp_path / f"{rank}.pt" for rank in range(2)]
        played += [torch.load(file, weights_only=True)[2:] for file in files]
        for file in files:
            file.unlink()
    assert [len(obs) for obs, _ in played] == 4 * [2 * 16], out  # of the 4 environments
    for i, (obs, action) in enumerate(played):
        for other, other_action in played[:i]:
            assert (obs[:2] != other[:2]).any()  # the first observations
            assert (action != other_action).float().mean() > 0.5


def test_what_a_copy_adds_to_checkpoints_is_the_same_in_all_processes_after_a_resume(tmp_path):
    """A scheduler: that of a second process would begin anew, with its second update after the resume."""
    text = Path(ppo_atari_multigpu.__file__).read_text()
    for old, new in {
        '    kept = {"agent": agent, "optimizer": optimizer}': (
            "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)\n"
            '    kept = {"agent": agent, "optimizer": optimizer, "scheduler": scheduler}'
        ),
        '            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)\n': "",
        "            code = torch.zeros(": (
            "            rate = optimizer.param_groups[0]['lr']\n"
            "            print(f'rank {rank} step {run.step} lr {rate:.3g}\\n', end='', flush=True)\n"
            "            scheduler.step()\n            code = torch.zeros("
        ),
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = tmp_path / "my_ppo.py"
    copy.write_text(text)
    line = [sys.executable, copy, *flags(SMALL), "--runs-dir", tmp_path / "runs"]
    out = subprocess.run(line, capture_output=True, text=True, timeout=120).stdout  # in one process
    (folder,) = (tmp_path / "runs").iterdir()
    process = torchrun(tmp_path, "--resume", folder, "--total-timesteps", 256, script=copy)
    out += process.communicate(timeout=120)[0]
    assert process.returncode == 0, out
    for step, rate in ((64, "0.00025"), (128, "0.000125"), (192, "6.25e-05"), (256, "3.13e-05")):
        for rank in range(1 if step <= 128 else 2):
            assert f"rank {rank} step {step} lr {rate}\n" in out, out


def test_a_signal_saves_and_ends_all_processes(tmp_path):
    process = torchrun(tmp_path, *flags(SMALL | {"total_timesteps": 10_000_000, "checkpoint_interval": 1}))
    # once there is one, both have learned
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")) or process.poll() is not None, 240)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"stopped at step {load_checkpoint(folder)['step']:,}; continue with --resume" in out, out


def test_what_does_not_divide(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    args = ppo_atari_multigpu.Args(**SMALL, runs_dir=str(tmp_path))
    with pytest.raises(UsageError, match="--num-envs 4 is not divisible by the number of processes, 3"):
        ppo_atari_multigpu.main(args)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="15 steps of a process must be a multiple"):
        ppo_atari_multigpu.main(dataclasses.replace(args, num_steps=15))
    assert not list(tmp_path.iterdir())
