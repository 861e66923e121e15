"""impala_ray.py on a Ray cluster of two nodes, one of which is killed; its loss; two learners that average."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cleanmarl import actors as processes
from cleanmarl import enjoy, impala_ray
from cleanmarl.cli import RunError, UsageError, launch
from cleanmarl.envs import workers
from cleanmarl.run import load_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toys import scalars as learned

SMALL = {"num_actors": 2, "total_timesteps": 640, "num_envs": 4, "unroll_length": 16, "eval_episodes": 0}
SMALL |= {"updates_per_collect": 1}


class Broken(gym.Env):
    """Works where it is looked at, fails when it is played."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.spec.id == "Deadly-v0":
            os._exit(1)
        raise RuntimeError("the environment is broken")


gym.register("RayBroken-v0", Broken)
gym.register("Deadly-v0", Broken)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each: one actor on each of them."""
    pytest.importorskip("ray", reason="ray is not installed: python bootstrap.py ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        )  # actors import this file
        patch.setenv("RAY_raylet_start_wait_time_s", "180")  # a busy machine takes longer than the 30 s that Ray waits
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


def played(args):
    """An agent, and unrolls of another version of it, as a Ray actor returns them."""
    torch.manual_seed(0)
    envs = impala_ray.make_envs(args, 1)
    dtype = processes.slot_dtype(args, impala_ray.unroll_dtype(envs, args))
    actor = processes.RayActor((impala_ray.Player, impala_ray.Agent), args, 2, 0, dtype)
    agent = impala_ray.Agent(envs, args)
    slot = actor.play((3, [x.detach().numpy() for x in processes.tensors(agent)]))[0].copy()
    assert slot["version"] == 3 and slot["actor"] == 2
    stats = impala_ray.impala_loss(agent, slot["unrolls"], args)[1]
    assert abs(stats["approx_kl"]) < 1e-6  # it has acted with these parameters
    with torch.no_grad():
        agent.actor[-1].bias += torch.tensor([0.0, 1.0])
    return agent, slot["unrolls"]


def learn(unrolls, args):
    torch.manual_seed(0)
    agent = impala_ray.Agent(impala_ray.make_envs(args, 1), args)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1 / unrolls["action"].size)  # the loss is a sum over the batch
    metrics = impala_ray.update(agent, optimizer, unrolls, args)
    return [p.detach() for p in agent.parameters()], metrics


def learn_half(rank, folder, args, unrolls):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(learn(unrolls[2 * rank : 2 * (rank + 1)], args), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may still hold a tensor, which aborts an interpreter that is ending


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no Gloo")
def test_two_learners_with_half_a_batch_each_learn_like_one_with_all_of_it(tmp_path):
    args = impala_ray.Args(**SMALL | {"updates_per_collect": 2})
    _, unrolls = played(args)
    mp.spawn(learn_half, (str(tmp_path), args, unrolls), nprocs=2)
    (first, metrics), (second, _) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone, expected = learn(unrolls, args)
    for a, b, c in zip(first, second, alone):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)
    for name in ("policy_loss", "value_loss", "entropy"):
        assert metrics[f"train/{name}"].item() == pytest.approx(expected[f"train/{name}"].item(), abs=1e-4)


def test_the_log_probs_are_those_of_the_version_that_acted(cluster):
    args = impala_ray.Args(**SMALL, address=cluster.address)
    ray = processes.connect(args.address, args.num_actors)
    envs = impala_ray.make_envs(args, 1)
    agent, published, versions = impala_ray.Agent(envs, args), [], []
    dtype = impala_ray.unroll_dtype(envs, args)
    with processes.RayActors(ray, impala_ray.Player, args, agent, dtype, 0) as actors:
        nodes = {actor._ray_actor_id.hex() for actor in actors.calls.values()}
        for version in range(30):
            published.append({name: x.clone() for name, x in agent.state_dict().items()})
            slot = actors.take(version)
            twin = impala_ray.Agent(envs, args)
            twin.load_state_dict(published[int(slot["version"])])
            assert abs(impala_ray.impala_loss(twin, slot["unrolls"], args)[1]["approx_kl"]) < 1e-6
            versions.append(int(slot["version"]))
            with torch.no_grad():
                agent.actor[-1].bias.copy_(torch.tensor([0.0, version % 7 - 3.0]))
    assert len(nodes) == 2 and max(versions) > 20


def test_actors_of_all_learners_have_other_indices_and_so_has_one_that_replaces_another(cluster):
    """Those of the second of two learners are odd; with an index of its own an actor has seeds of its own."""
    args = impala_ray.Args(**SMALL | {"num_actors": 2, "address": cluster.address})
    ray = processes.connect(args.address, args.num_actors)
    envs = impala_ray.make_envs(args, 1)
    agent, dtype = impala_ray.Agent(envs, args), impala_ray.unroll_dtype(envs, args)
    with processes.RayActors(ray, impala_ray.Player, args, agent, dtype, 0, rank=1, world=2) as actors:
        wait_for(lambda: {int(actors.take(0)["actor"]) for _ in range(4)} == {1, 3})
        ray.kill(next(iter(actors.heard)))
        wait_for(lambda: {int(actors.take(0)["actor"]) for _ in range(4)} == {3, 5})
        assert actors.num_deaths == 1


def test_the_other_learners_leave_it_to_the_first_one_when_to_stop():
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        with impala_ray.Follower():
            assert {signal.getsignal(signum) for signum in signals} == {signal.SIG_IGN}
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def start(tmp_path, **flags):
    """A long run in a session of its own, as a terminal starts it."""
    flags = SMALL | {"checkpoint_interval": 640, "total_timesteps": 10**6, "runs_dir": tmp_path} | flags
    flags = [str(x) for key, value in flags.items() for x in (f"--{key.replace('_', '-')}", value)]
    command = [sys.executable, impala_ray.__file__, *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_a_killed_node_is_replaced(cluster, tmp_path):
    """Its actor comes back on a node that joins; the run goes on, resumes, and can be played."""
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    process = start(tmp_path, num_actors=3, address=cluster.address)
    try:
        wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")))
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        (folder,) = tmp_path.iterdir()
        wait_for(lambda: learned(folder).get("time/replaced_actors", [(0, 0)])[-1][1] >= 1)
        before = load_checkpoint(folder)["step"]
        wait_for(lambda: load_checkpoint(folder)["step"] > before + 10 * 64)
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    step = load_checkpoint(folder)["step"]
    assert process.returncode == 130 and f"stopped at step {step:,}" in out
    flags = SMALL | {"num_actors": 3, "address": cluster.address, "total_timesteps": step + 128, "resume": folder}
    impala_ray.main(impala_ray.Args(**flags, runs_dir=str(tmp_path)))
    assert load_checkpoint(folder)["step"] == step + 128
    assert enjoy.main(enjoy.Args(folder, episodes=1))["eval/ep_length"] > 0


def of_session(session: int) -> dict[int, str]:
    """The processes of a session that live: pid -> command line."""
    found = {}
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        try:
            state, _, _, sid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_actor_of_the_ray_it_started(signum, tmp_path):
    pytest.importorskip("ray")
    process = start(tmp_path, num_actors=1)
    try:
        wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")) or process.poll() is not None)
        assert any("ray::RayActor" in command for command in of_session(process.pid).values())
        os.kill(process.pid, signum)
        process.wait(60)
        assert process.returncode == (130 if signum == signal.SIGINT else -signum)
        # after SIGKILL two agents of Ray itself, of the dashboard and of environments, live on for a minute
        agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} if signum == signal.SIGKILL else set()
        wait_for(lambda: all(any(x in command for x in agents) for command in of_session(process.pid).values()), 60)
    finally:
        process.kill()
        process.communicate()


def wait_for(condition, seconds: float = 240):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return value


def test_a_stopped_actor_is_reported_and_goes_on(cluster, tmp_path, monkeypatch, capsys):
    args = impala_ray.Args(**SMALL | {"num_actors": 2, "address": cluster.address}, runs_dir=str(tmp_path))
    envs = impala_ray.make_envs(args, 1)
    agent = impala_ray.Agent(envs, args)
    ray = processes.connect(args.address, args.num_actors)
    with processes.RayActors(ray, impala_ray.Player, args, agent, impala_ray.unroll_dtype(envs, args), 0) as actors:
        wait_for(lambda: {int(actors.take(0)["actor"]) for _ in range(4)} == {0, 1})
        capsys.readouterr()
        monkeypatch.setattr(workers, "SILENCE", 2.0)
        # of these actors alone: on this machine other tests may have theirs
        pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors.heard])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(7, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids]).start()
        for _ in range(2 * processes.CALLS_PER_ACTOR):  # at most these were answered before
            actors.take(0)
        heard = set()
        wait_for(lambda: heard.add(int(actors.take(0)["actor"])) or heard == {0, 1})  # both go on
        turns = []
        for _ in range(16):  # a learner that is slower than its actors hears them by turns
            ray.wait(list(actors.calls), num_returns=len(actors.calls))
            turns.append(int(actors.take(0)["actor"]))
        assert sorted(turns) == [0] * 8 + [1] * 8
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"actor [01] has been silent for \d+ seconds; waiting for it", line) for line in lines)


def test_deterministic_runs_repeat(cluster, tmp_path):
    flags = SMALL | {"deterministic": True, "address": cluster.address, "runs_dir": str(tmp_path)}
    flags |= {"eval_interval": 256, "eval_episodes": 1}
    one, same = (learned(impala_ray.main(impala_ray.Args(**flags))) for _ in range(2))
    for points in (one, same):
        for tag in ("time/SPS", "time/learner_wait"):
            del points[tag]
    assert one == same and len(one["train/policy_loss"]) == 10
    # two actors with two calls each: an unroll is asked for when the fourth one before it is taken
    assert [lag for _, lag in one["train/policy_lag"]] == [0, 1, 2, 3] + [4] * 6
    rates = [impala_ray.Args.learning_rate * (1 - i / 10) for i in range(10)]
    assert [rate for _, rate in one["train/learning_rate"]] == pytest.approx(rates)
    assert [step for step, _ in one["eval/ep_reward"]] == [256, 512, 640]
    constant = learned(impala_ray.main(impala_ray.Args(**flags | {"anneal_lr": False})))
    assert [rate for _, rate in constant["train/learning_rate"]] == pytest.approx([impala_ray.Args.learning_rate] * 10)


def test_an_environment_that_raises_ends_the_run_and_deaths_in_a_row_too(cluster, tmp_path, monkeypatch):
    flags = SMALL | {"num_actors": 1, "address": cluster.address, "runs_dir": str(tmp_path)}
    import ray

    with pytest.raises(RunError, match=r"(?s)an actor failed:.*the environment is broken"):
        impala_ray.main(impala_ray.Args(**flags | {"env_id": "test_impala_ray:RayBroken-v0"}))
    gym.register("Here-v0", Broken)  # and not where the actors are
    with pytest.raises(RunError, match=r"(?s)an actor failed:.*unknown environment 'Here-v0'"):
        impala_ray.main(impala_ray.Args(**flags | {"env_id": "Here-v0"}))
    monkeypatch.setattr(processes, "MOST_DEATHS", 1)
    with pytest.raises(RunError, match="1 actors in a row died before they played"):
        impala_ray.main(impala_ray.Args(**flags | {"env_id": "test_impala_ray:Deadly-v0"}))
    assert not ray.is_initialized()


def torchrun(script, **flags) -> str:
    """What two learners print."""
    flags = [str(x) for key, value in flags.items() for x in (f"--{key.replace('_', '-')}", value)]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_two_learners_with_torchrun(cluster, tmp_path):
    flags = SMALL | {"num_actors": 1, "total_timesteps": 1280, "address": cluster.address, "runs_dir": tmp_path}
    torchrun(impala_ray.__file__, **flags)
    (folder,) = tmp_path.iterdir()
    checkpoint = load_checkpoint(folder)
    assert checkpoint["step"] == 1280 and checkpoint["modules"]["optimizer"]["state"][0]["step"] == 10  # 128 steps each


def test_refused(cluster, tmp_path):
    def refused(**flags):
        with pytest.raises(UsageError) as error:
            impala_ray.main(impala_ray.Args(**SMALL | flags, runs_dir=str(tmp_path / "runs")))
        assert not list(tmp_path.iterdir()) and "\n" not in str(error.value)
        return str(error.value)

    assert "--num-actors 99 of each of 1 learners" in refused(num_actors=99, address=cluster.address)
    for address in ("127.0.0.1:1", "nonsense"):
        assert f"there is no Ray cluster at --address {address}; begin one" in refused(address=address)
    assert "--rho-clip 0.5 must be at least" in refused(rho_clip=0.5)


def test_a_token_that_ray_keeps_is_named(tmp_path, monkeypatch):
    """A local ray.init() leaves it; a cluster that is begun afterwards wants it from everybody."""
    pytest.importorskip("ray", reason="ray is not installed: python bootstrap.py ray")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    for mode, is_named in ((None, True), ("disabled", True), ("token", False)):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        if mode is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(UsageError) as error:
            processes.connect("127.0.0.1:1", 1)
        assert ("auth_token: export RAY_AUTH_MODE=token" in str(error.value)) == is_named


def test_without_ray(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)  # Python's own way to say that a package is not there
    monkeypatch.setattr(sys, "argv", ["impala_ray.py", "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as stopped:
        launch(impala_ray.main, impala_ray.Args)
    out, err = capfd.readouterr()
    assert stopped.value.code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("impala_ray: impala_ray.py needs the package ray: ") and err.count("\n") == 1


def test_what_a_copy_adds_to_checkpoints_is_the_same_for_all_learners_after_a_resume(cluster, tmp_path):
    """A scheduler: that of the second learner would begin anew, with its second update after the resume."""
    text = Path(impala_ray.__file__).read_text()
    for old, new in {
        '    kept = {"agent": agent, "optimizer": optimizer}': (
            "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)\n"
            '    kept = {"agent": agent, "optimizer": optimizer, "scheduler": scheduler}'
        ),
        '                optimizer.param_groups[0]["lr"] = args.learning_rate * (': "                _ = (",
        "                    num_updates += args.updates_per_collect\n": (
            "                    num_updates += args.updates_per_collect\n"
            "                    rate = optimizer.param_groups[0]['lr'] / args.learning_rate\n"
            "                    print(f'rank {rank} step {run.step} lr {rate:.4g}\\n', end='', flush=True)\n"
            "                    begins = slot['unrolls']['obs'][0, 0].tolist()\n"
            "                    print(f'actor {slot[\"actor\"]} of {rank} begins {begins}\\n', end='', flush=True)\n"
            "                    scheduler.step()\n"
        ),
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = tmp_path / "my_impala.py"
    copy.write_text(text)
    runs = tmp_path / "runs"
    flags = SMALL | {"num_actors": 1, "address": cluster.address, "runs_dir": runs}
    out = torchrun(copy, **flags | {"total_timesteps": 256})
    (folder,) = runs.iterdir()
    out += torchrun(copy, total_timesteps=512, resume=folder)
    for rank in range(2):
        for step, rate in ((128, 1), (256, 0.5), (384, 0.25), (512, 0.125)):
            assert f"rank {rank} step {step} lr {rate}\n" in out, out
    # the second learner's actors are odd; no two actors, nor one after a resume, play the same episodes
    played = re.findall(r"^actor (\d) of (\d) begins (.*)", out, re.MULTILINE)
    assert {(actor, rank) for actor, rank, _ in played} == {("0", "0"), ("1", "1")}
    assert len({begins for *_, begins in played}) == len(played) == 8
