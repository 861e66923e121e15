"""IMPALA as in impala.py, but for continuous actions: a normal distribution, normalised observations and rewards.

The learner keeps the statistics of what the actors see. Those of observations are the first layer of both networks:
actors get them with the parameters. Unrolls hold observations and rewards as they are.

Paper: Espeholt et al. 2018 (arXiv:1802.01561); normalisation as in ppo_continuous_action.py.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cleanmarl.actors import Actors, check_unrolls_size
from cleanmarl.cli import NonNegativeFloat, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import make_gymnasium
from cleanmarl.layers import RunningMeanStd, as_numpy
from cleanmarl.run import Run

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from annotated_types import Ge


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"
    """any Gymnasium id with Box or Discrete observations and Box actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps that are learned from, all environments together"""

    num_actors: Annotated[int, Ge(0)] = 1
    """actor processes; 0: collect and learn in turn in one process"""
    deterministic: bool = False
    """take one unroll from each actor in turn, and give all of them new parameters at the same time"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """rmsprop is the paper's, as TensorFlow has it"""
    learning_rate: PositiveFloat = 5e-4
    """learning rate of the optimizer"""
    optimizer_eps: PositiveFloat = 5e-3
    """epsilon: RMSProp adds it to the mean square of a gradient, Adam to its root; losses are sums"""
    num_envs: PositiveInt = 8
    """N, environments of each actor; N unrolls fill a slot"""
    unroll_length: PositiveInt = 64
    """T, steps of each environment in one unroll"""
    batch_size: PositiveInt | None = None
    """B, unrolls in a gradient step: of several slots, or a part of one; default: N, one slot"""
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
    ent_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 256.0
    """largest norm of the gradient of all parameters together"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with vectors as observations."""
    # detail continuous-5: the environment clips the action to its range, the unroll keeps the original
    wrappers = [gym.wrappers.ClipAction]
    return make_gymnasium(args.env_id, num_envs, discrete=False, vectors=True, wrappers=wrappers, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy mean `actor(obs)` (B, K), `log_std` (K,), state value `critic(obs)` (B, 1), for observations (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        # detail continuous-6, detail continuous-7: normalised observations, clipped to [-10, 10]
        self.obs_stats, self.return_stats = RunningMeanStd(1, obs_size), RunningMeanStd(1, 1)
        # detail continuous-4: separate networks
        self.actor = nn.Sequential(
            self.obs_stats,
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), std=0.01),  # small: the mean is about 0 at first
        )
        self.critic = nn.Sequential(
            self.obs_stats,
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        # detail continuous-2: the log standard deviation is a parameter, the same in every state, 0 at first
        self.log_std = nn.Parameter(torch.zeros(num_actions))

    def observe(self, unrolls: np.ndarray) -> None:
        """Take unrolls, records (N,), into the statistics of observations and of discounted returns."""
        for stats, x in ((self.obs_stats, unrolls["obs"][:, :-1]), (self.return_stats, unrolls["discounted"])):
            stats.update(torch.from_numpy(x.reshape(-1, 1, stats.mean.shape[1])).to(stats.mean.device))

    def scale_reward(self, reward: torch.Tensor) -> torch.Tensor:
        # detail continuous-8, detail continuous-9: divided by the deviation of the discounted return, and clipped
        return (reward / self.return_stats.std).clamp(-10, 10)


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the mean action, or a sample."""
    actor, std = as_numpy(agent.actor), agent.log_std.detach().exp().cpu().numpy()

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        mean = actor(obs.astype(np.float32))
        return mean if greedy else mean + std * torch.randn(mean.shape).numpy()

    return policy


def unroll_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """An unroll, T steps of one environment, as a record."""
    T, D, K = args.unroll_length, envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    fields = [
        ("obs", np.float32, (T + 1, D)),  # the last one follows the last step
        ("action", np.float32, (T, K)),  # as sampled
        ("log_prob", np.float32, (T,)),  # of the action, by the policy that acted
        ("reward", np.float32, (T,)),
        ("discounted", np.float32, (T,)),  # return of the episode so far, for the scale of rewards
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
        self.discounted = np.zeros(args.num_envs, np.float32)

    def play(self, agent: Agent, unrolls: np.ndarray) -> None:
        """Fill `unrolls`, records (N,) of unroll_dtype, with the next T steps by `agent`."""
        T, N, K = self.args.unroll_length, self.args.num_envs, self.envs.single_action_space.shape[0]
        steps = {name: unrolls[name].swapaxes(0, 1) for name in unrolls.dtype.names}  # (T, N, ...)
        actor, log_std = as_numpy(agent.actor), agent.log_std.detach().cpu()
        std, noise = log_std.exp().numpy(), self.rng.standard_normal((T, N, K), np.float32)
        mean = np.empty_like(noise)
        steps["ep_length"][:] = 0
        for t in range(T):
            steps["obs"][t] = obs = self.obs.astype(np.float32)
            mean[t] = actor(obs)
            action = mean[t] + std * noise[t]
            self.obs, reward, termination, truncation, info = self.envs.step(action)
            steps["action"][t], steps["reward"][t] = action, reward
            steps["termination"][t], steps["truncation"][t] = termination, truncation & ~termination
            steps["discounted"][t] = self.discounted = self.args.gamma * self.discounted + steps["reward"][t]
            self.discounted[termination | truncation] = 0
            if "_episode" in info:
                steps["ep_return"][t], steps["ep_length"][t] = info["episode"]["r"], info["episode"]["l"]
            for n in np.flatnonzero(truncation):
                steps["final_obs"][t, n] = info["final_obs"][n]
        steps["obs"][T] = self.obs
        # detail impala-1: what acted is older than what learns, and its log-probabilities come with the steps
        action = torch.from_numpy(steps["action"].copy())
        steps["log_prob"][:] = gaussian_log_prob(action, torch.from_numpy(mean), log_std)


def gaussian_log_prob(action: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Log density (...) of actions (..., K) under normal distributions."""
    # detail continuous-1: continuous actions have a normal distribution
    log_prob = -0.5 * ((action - mean) / log_std.exp()).square() - (log_std + 0.5 * np.log(2 * np.pi))
    # detail continuous-3: the components are independent, so the log-probability of an action is the sum of theirs
    return log_prob.sum(-1)


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

    reward = agent.scale_reward(batch["reward"])
    T, B = done.shape
    mean = agent.actor(batch["obs"][:-1].flatten(0, 1)).view(T, B, -1)  # (T, B, K)
    log_prob = gaussian_log_prob(batch["action"], mean, agent.log_std)
    value = agent.critic(batch["obs"].flatten(0, 1)).view(T + 1, B)
    with torch.no_grad():
        log_rho = log_prob - batch["log_prob"]
        next_value = value[1:] * ~batch["termination"]
        next_value[batch["truncation"]] = agent.critic(batch["final_obs"][batch["truncation"]]).squeeze(-1)
        return_, advantage = vtrace(
            *(x.cpu().numpy() for x in (log_rho, reward, value[:-1], next_value, done)),
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
    entropy = (agent.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()
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


def update(agent: Agent, optimizer: torch.optim.Optimizer, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for B new unrolls; returns the mean diagnostics."""
    all_stats = []
    for _ in range(args.updates_per_collect):
        loss, stats = impala_loss(agent, unrolls, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail impala-6: one norm over all gradients
        optimizer.step()
        all_stats.append(stats)
    return {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check(args.rho_clip >= args.c_clip, f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}")
    slot_size = args.num_envs * args.unroll_length
    batch_size = args.batch_size or args.num_envs
    first = math.ceil(batch_size / args.num_envs) * slot_size
    message = f"--total-timesteps {args.total_timesteps} is less than the {first} steps of one batch"
    check(args.total_timesteps >= first, message)
    device = set_up(args)

    envs = make_envs(args, 1)
    dtype = unroll_dtype(envs, args)
    check_unrolls_size(args, dtype)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    num_updates, metrics = 0, {}  # updates since the start or resume, and metrics of the latest

    with (
        Run(args, __file__, agent=agent, optimizer=optimizer) as run,
        Actors(Player, args, agent, dtype, run.step) as actors,
    ):
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
            agent.observe(unrolls)  # after the updates: it changes the policy
            metrics |= {"train/policy_lag": lag, "train/learning_rate": optimizer.param_groups[0]["lr"]}
            metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
            run.log(metrics)
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
