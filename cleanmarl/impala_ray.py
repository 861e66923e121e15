"""IMPALA as in impala.py, but its actors are Ray actors, on any number of machines, and learners may be several:

    ray start --head                                                  # on one machine
    ray start --address HOST:6379                                     # on others
    python cleanmarl/impala_ray.py --address auto --num-actors 64     # on any of them
    torchrun --nproc-per-node 4 cleanmarl/impala_ray.py --address auto --device cuda    # --num-actors for each

An actor that dies, or whose machine does, is replaced. Every learner has actors of its own; all step along the mean of
their gradients, through NCCL on GPUs and Gloo on CPUs, and so stay the same. The first one, alone, logs the episodes of
its actors, saves and evaluates.

Paper: Espeholt et al. 2018 (arXiv:1802.01561). Needs the package ray; every machine needs this one.
"""

import io
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from cleanmarl.actors import RayActors, check_unrolls_size, connect
from cleanmarl.cli import NonNegativeFloat, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import make_gymnasium
from cleanmarl.layers import as_numpy
from cleanmarl.run import Run

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """any Gymnasium id with Box or Discrete observations and Discrete actions"""
    total_timesteps: PositiveInt = 500_000
    """environment steps that are learned from, all environments together"""

    address: str | None = None
    """of a Ray cluster: auto, or HOST:PORT; without one, Ray is started on this machine"""
    num_actors: PositiveInt = 2
    """actors of each learner; each takes a CPU of the cluster"""
    deterministic: bool = False
    """take unrolls in the order in which they were asked for"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """rmsprop is the paper's, as TensorFlow has it"""
    learning_rate: PositiveFloat = 1e-3
    """learning rate of the optimizer"""
    optimizer_eps: PositiveFloat = 3.2
    """epsilon: RMSProp adds it to the mean square of a gradient, Adam to its root; losses are sums, and for Adam 3.2
    on sums over 320 steps is 0.01 on means"""
    num_envs: PositiveInt = 16
    """N, environments of each actor; N unrolls fill a slot"""
    unroll_length: PositiveInt = 20
    """T, steps of each environment in one unroll"""
    batch_size: PositiveInt | None = None
    """B, unrolls in a gradient step of each learner: of several slots, or a part of one; default: N, one slot"""
    updates_per_collect: PositiveInt = 4
    """gradient steps for each batch that is collected"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    vtrace_lambda: UnitFloat = 0.95
    """lambda of V-trace"""
    rho_clip: PositiveFloat = 1.0
    """largest importance weight of a value error: where the value function converges to; at least c_clip"""
    c_clip: PositiveFloat = 1.0
    """largest importance weight in the trace: how fast it gets there"""
    pg_rho_clip: PositiveFloat = 1.0
    """largest importance weight of the policy gradient"""
    ent_coef: NonNegativeFloat = 0.001
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 1600.0
    """largest norm of the gradient of all parameters together; 1600 on sums over 320 steps is 5 on means"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with vectors as observations."""
    return make_gymnasium(args.env_id, num_envs, discrete=True, vectors=True, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy logits `actor(obs)` (B, K) and state value `critic(obs)` (B, 1), for observations (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), std=0.01),  # small: every action is about as likely at first
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the most probable action, or a sample."""
    actor = as_numpy(agent.actor)

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = torch.from_numpy(actor(obs.astype(np.float32)))
        return (logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()).numpy()

    return policy


def unroll_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """An unroll, T steps of one environment, as a record."""
    T, D = args.unroll_length, envs.single_observation_space.shape[0]
    fields = [
        ("obs", np.float32, (T + 1, D)),  # the last one follows the last step
        ("action", np.int64, (T,)),
        ("log_prob", np.float32, (T,)),  # of the action, by the policy that acted
        ("reward", np.float32, (T,)),
        ("termination", np.bool_, (T,)),
        ("truncation", np.bool_, (T,)),  # and no termination
        ("final_obs", np.float32, (T, D)),  # of truncated episodes; anything elsewhere
        ("ep_return", np.float32, (T,)),  # of the episode that ended with this step
        ("ep_length", np.int64, (T,)),  # 0: none did
    ]
    return np.dtype(fields, align=True)


class Player:
    """N environments of their own seeds, played one unroll after another, across the ends of episodes."""

    def __init__(self, args: Args, index: int, step: int):
        self.args = args
        self.rng = np.random.default_rng([args.seed, step, index])  # a resumed run begins new episodes
        self.envs = make_envs(args, args.num_envs)
        self.obs, _ = self.envs.reset(seed=int(self.rng.integers(2**31)))

    def play(self, agent: Agent, unrolls: np.ndarray) -> None:
        """Fill `unrolls`, records (N,) of unroll_dtype, with the next T steps by `agent`."""
        T, N, K = self.args.unroll_length, self.args.num_envs, self.envs.single_action_space.n
        steps = {name: unrolls[name].swapaxes(0, 1) for name in unrolls.dtype.names}  # (T, N, ...)
        actor = as_numpy(agent.actor)
        # The argmax of logits + Gumbel noise is a sample of the softmax; -log(exponential) is Gumbel noise.
        noise = -np.log(self.rng.standard_exponential((T, N, K), np.float32).clip(1e-8))  # it may be 0
        logits = np.empty_like(noise)
        steps["ep_length"][:] = 0
        for t in range(T):
            steps["obs"][t] = obs = self.obs.astype(np.float32)
            logits[t] = actor(obs)
            action = (logits[t] + noise[t]).argmax(-1)
            self.obs, reward, termination, truncation, info = self.envs.step(action)
            steps["action"][t], steps["reward"][t] = action, reward
            steps["termination"][t], steps["truncation"][t] = termination, truncation & ~termination
            if "_episode" in info:
                steps["ep_return"][t], steps["ep_length"][t] = info["episode"]["r"], info["episode"]["l"]
            for n in np.flatnonzero(truncation):
                steps["final_obs"][t, n] = info["final_obs"][n]
        steps["obs"][T] = self.obs
        # detail impala-1: what acted is older than what learns, and its log-probabilities come with the steps
        log_probs = torch.from_numpy(logits).log_softmax(-1)
        steps["log_prob"][:] = np.take_along_axis(log_probs.numpy(), steps["action"][..., None], -1)[..., 0]


def vtrace(log_rho, reward, value, next_value, done, *, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    """Targets of the value function and advantages by V-trace (Espeholt et al. 2018, section 4), cut where done.

    Arrays (T, ...): log_rho, the log of the ratio of the policy that learns to the one that acted; value, of the
    observation before each step; next_value, of the one after it: 0 if the step terminated the episode, and the value
    of its final observation if it truncated it. Returns (T, ...), (T, ...).
    """
    largest = math.log(max(rho_clip, c_clip, pg_rho_clip)) + 1  # beyond it all are clipped; exp might overflow
    rho = np.exp(np.minimum(log_rho, largest))
    # detail impala-3: rho weighs the errors, c the trace, and each has a clip of its own
    error = np.minimum(rho, rho_clip) * (reward + gamma * next_value - value)  # TD errors; summed below: v_s - V(x_s)
    decay = gamma * lambda_ * ~done * np.minimum(rho, c_clip)
    # detail impala-2: targets of the value function
    for t in reversed(range(len(error) - 1)):
        error[t] += decay[t] * error[t + 1]
    return_ = value + error
    # detail impala-4: the advantage has the target of the next state, and a clipped rho
    next_return = np.where(done, next_value, np.concatenate([return_[1:], next_value[-1:]]))
    return return_, np.minimum(rho, pg_rho_clip) * (reward + gamma * next_return - value)


def impala_loss(agent: Agent, unrolls: np.ndarray, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch of unrolls, records (B,), and its diagnostics by name."""
    device = next(agent.parameters()).device
    # time first, (T, B, ...)
    batch = {name: torch.from_numpy(unrolls[name].swapaxes(0, 1).copy()).to(device) for name in unrolls.dtype.names}
    done = batch["termination"] | batch["truncation"]

    T, B = done.shape
    log_probs = agent.actor(batch["obs"][:-1].flatten(0, 1)).log_softmax(-1).view(T, B, -1)  # (T, B, K)
    log_prob = log_probs.gather(-1, batch["action"][..., None]).squeeze(-1)
    value = agent.critic(batch["obs"].flatten(0, 1)).view(T + 1, B)
    with torch.no_grad():
        log_rho = log_prob - batch["log_prob"]
        next_value = value[1:] * ~batch["termination"]
        next_value[batch["truncation"]] = agent.critic(batch["final_obs"][batch["truncation"]]).squeeze(-1)
        return_, advantage = vtrace(
            *(x.cpu().numpy() for x in (log_rho, batch["reward"], value[:-1], next_value, done)),
            gamma=args.gamma,
            lambda_=args.vtrace_lambda,
            rho_clip=args.rho_clip,
            c_clip=args.c_clip,
            pg_rho_clip=args.pg_rho_clip,
        )
        return_, advantage = torch.from_numpy(return_).to(device), torch.from_numpy(advantage).to(device)

    # detail impala-5: one loss for policy, value and entropy bonus, the sum over the batch
    policy_loss = -(log_prob * advantage).mean()
    value_loss = 0.5 * (value[:-1] - return_).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss) * (T * B)

    with torch.no_grad():
        stats = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": (log_rho.exp() - 1 - log_rho).mean(),
            "clipfrac": (log_rho.exp() > args.rho_clip + 1e-5).float().mean(),  # by more than rounding
            "explained_variance": (1 - (return_ - value[:-1]).var() / return_.var()).nan_to_num(0, neginf=0),
        }
    return loss, stats


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in TensorFlow, which the paper uses: epsilon inside the root, and a mean square that is 1 at first."""

    def __init__(self, parameters, lr: float, eps: float):
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p]["mean_square"] = torch.ones_like(p)
                    mean_square = self.state[p]["mean_square"].lerp_(p.grad.square(), 0.01)  # decay 0.99
                    # detail impala-8: epsilon stands inside the root
                    p.addcdiv_(p.grad, (mean_square + group["eps"]).sqrt(), value=-group["lr"])


def make_optimizer(agent: Agent, args: Args) -> torch.optim.Optimizer:
    # detail impala-8: RMSProp as the paper has it, or Adam; both on losses that are sums
    if args.optimizer == "rmsprop":
        return RMSProp(agent.parameters(), lr=args.learning_rate, eps=args.optimizer_eps)
    return torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.optimizer_eps, fused=True)


def average(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all learners."""
    if dist.is_initialized():
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for x, mean in zip(tensors, flat.split([x.numel() for x in tensors])):
            x.copy_(mean.view_as(x))


def update(agent: Agent, optimizer: torch.optim.Optimizer, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for B new unrolls; returns the mean diagnostics."""
    all_stats = []
    for _ in range(args.updates_per_collect):
        loss, stats = impala_loss(agent, unrolls, args)
        optimizer.zero_grad()
        loss.backward()
        average([p.grad for p in agent.parameters() if p.grad is not None] + list(stats.values()))
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail impala-6: one norm over all gradients
        optimizer.step()
        all_stats.append(stats)
    return {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}


class Follower:
    """Where the first learner has a Run, the others have this: it counts steps, and does nothing else."""

    step, folder, evaluation_due, start_time = 0, None, False, 0.0

    def __enter__(self):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the first learner decides when to stop
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends those that are left

    check_unrolls = log_episodes = log = evaluate = lambda self, *args, **kwargs: None


def main(args: Args) -> Path | None:
    """Train as `args` says; returns the run folder, in the first learner."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    check(args.rho_clip >= args.c_clip, f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}")
    slot_size = args.num_envs * args.unroll_length * world_size
    batch_size = args.batch_size or args.num_envs
    first = math.ceil(batch_size / args.num_envs) * slot_size
    message = f"--total-timesteps {args.total_timesteps} is less than the {first} steps of one batch"
    check(args.total_timesteps >= first, message)
    local = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if args.device == "cuda" else args.device
    device = set_up(replace(args, device=local))

    envs = make_envs(args, 1)
    dtype = unroll_dtype(envs, args)
    check_unrolls_size(args, dtype)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    num_updates, metrics = 0, {}  # updates since the start or resume, and metrics of the latest
    code = torch.zeros(1, dtype=torch.int32, device=device)
    ray = connect(args.address, args.num_actors, world_size)

    if world_size > 1:
        patience = timedelta(days=1)  # while the first one evaluates, or waits for its actors, the others wait for it
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    kept = {"agent": agent, "optimizer": optimizer}  # in checkpoints, and the same for all learners after a resume
    with Run(args, __file__, **kept) if rank == 0 else Follower() as run:
        if world_size > 1:  # what the first learner has resumed
            file = io.BytesIO()
            torch.save([run.step, *(x.state_dict() for x in kept.values())], file)
            sent = [file.getvalue()]
            dist.broadcast_object_list(sent, device=device)
            # by way of the CPU: unpickled as they are, all would lie on the first GPU
            run.step, *states = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)
            for x, state in zip(kept.values(), states):
                x.load_state_dict(state)
        with RayActors(ray, Player, args, agent, dtype, run.step, rank, world_size) as actors:
            gathered = np.zeros(0, dtype)  # not learned from yet
            while run.step + slot_size <= args.total_timesteps:
                slot = actors.take(num_updates)  # from now on actors get the parameters of now
                run.check_unrolls(slot)
                unrolls, lag = slot["unrolls"], num_updates - slot["version"]
                # detail impala-7: the learning rate falls linearly to 0
                remaining = 1 - run.step / args.total_timesteps
                optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
                run.step += slot_size
                if (ended := unrolls["ep_length"] > 0).any():
                    episodes = {"r": unrolls["ep_return"], "l": unrolls["ep_length"]}
                    run.log_episodes({"_episode": ended, "episode": episodes})
                gathered = np.concatenate([gathered, unrolls])
                while len(gathered) >= batch_size:
                    batch, gathered = np.split(gathered, [batch_size])
                    metrics = update(agent, optimizer, batch, args)
                    num_updates += args.updates_per_collect
                metrics |= {"train/policy_lag": lag, "train/learning_rate": optimizer.param_groups[0]["lr"]}
                metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
                metrics["time/replaced_actors"] = actors.num_deaths
                try:
                    run.log(metrics)
                    if run.evaluation_due:
                        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
                except SystemExit as stopped:  # a signal came, and the state is saved: the others are to end as well
                    code += stopped.code
                if world_size > 1:
                    dist.broadcast(code, 0)
                if code.item():
                    sys.exit(code.item())

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    if world_size > 1:
        dist.destroy_process_group()
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
