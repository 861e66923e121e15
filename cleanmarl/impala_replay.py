"""IMPALA with a replay: every batch is drawn from the latest unrolls, evenly or by priority; discrete actions.

V-trace corrects for old steps as it does for the time between acting and learning. Unrolls may begin with each episode
(--remainder), as in DI-engine: what an episode leaves over is dropped, filled up with its last steps before, or with
empty steps, which take no part in any loss. With --num-actors 0 a run repeats exactly, with --deterministic too.

Papers: Espeholt et al. 2018 (arXiv:1802.01561), Schaul et al. 2016 (arXiv:1511.05952). Parent: impala.py, but for what
a batch is, and a mask and a weight in its losses.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cleanmarl.actors import Actors, check_unrolls_size
from cleanmarl.cli import NonNegativeFloat, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import make_gymnasium
from cleanmarl.layers import as_numpy
from cleanmarl.run import Run

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from annotated_types import Ge

PRIORITY_ALPHA, PRIORITY_BETA = 0.6, 0.4  # Schaul et al. 2016, table 3, proportional; their beta rises to 1


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    """any Gymnasium id with Box or Discrete observations and Discrete actions"""
    total_timesteps: PositiveInt = 500_000
    """environment steps that are learned from, all environments together"""

    num_actors: Annotated[int, Ge(0)] = 1
    """actor processes; 0: collect and learn in turn in one process"""
    deterministic: bool = False
    """take one unroll from each actor in turn, and give all of them new parameters at the same time"""
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
    """B, unrolls in a gradient step: of several slots, or a part of one; default: N, one slot"""
    remainder: Literal["keep", "drop", "last", "null_padding"] = "keep"
    """keep: unrolls go on across the ends of episodes; the others begin an unroll with each episode, and what is left
    at its end is dropped, filled up with its last steps before (last), or with empty steps (null_padding)"""
    updates_per_collect: PositiveInt = 4
    """gradient steps for each batch that is collected"""
    replay_size: Annotated[int, Ge(0)] = 400
    """unrolls (T steps of one environment) kept, from which batches are drawn; 0: learn from each batch as it comes"""
    priority: bool = False
    """draw unrolls from the replay by the size of their value errors"""
    priority_is_weight: bool = False
    """weigh the losses against the bias of --priority"""
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
        ("mask", np.bool_, (T,)),  # False: an empty step
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
        steps["obs"][T], steps["mask"][:] = self.obs, True
        # detail impala-1: what acted is older than what learns, and its log-probabilities come with the steps
        log_probs = torch.from_numpy(logits).log_softmax(-1)
        steps["log_prob"][:] = np.take_along_axis(log_probs.numpy(), steps["action"][..., None], -1)[..., 0]


class Cutter:
    """Turns the unrolls of actors, which episodes cross, into unrolls that begin with each episode (--remainder)."""

    def __init__(self, args: Args):
        self.args, self.how, self.complete = args, args.remainder, []
        self.episodes = {}  # (actor, environment) -> its unroll before, the open one, steps in it

    def cut(self, actor: int, unrolls: np.ndarray) -> list[np.ndarray]:
        """The batches (B,) that are complete with `unrolls` (N,), the latest of an actor."""
        complete, (N, T) = self.complete, unrolls["reward"].shape
        B = self.args.batch_size or N
        if self.how == "keep":
            complete.extend(unrolls.copy())  # the memory it lies in is played into again
        for n, unroll in enumerate(unrolls if self.how != "keep" else ()):
            before, now, filled = self.episodes.get((actor, n), (None, np.zeros_like(unroll), 0))
            done, first = unroll["termination"] | unroll["truncation"], 0
            while first < T:
                length = min(T - filled, T - first)
                ends = np.flatnonzero(done[first : first + length])
                length = ends[0] + 1 if len(ends) else length
                copy_steps(now, filled, unroll, first, length)
                filled, first = filled + length, first + length
                if filled == T:
                    complete.append(now)
                    before, now, filled = now, np.zeros_like(unroll), 0
                if len(ends) and filled and self.how != "drop":
                    if self.how == "last" and before is not None:
                        now, rest = before.copy(), now
                        copy_steps(now, 0, before, filled, T - filled)
                        copy_steps(now, T - filled, rest, 0, filled)
                    complete.append(now)
                if len(ends):
                    before, now, filled = None, np.zeros_like(unroll), 0
            self.episodes[actor, n] = before, now, filled
        batches = [np.array(complete[i : i + B]) for i in range(0, len(complete) - B + 1, B)]
        del complete[: len(batches) * B]
        return batches


def copy_steps(target: np.ndarray, at: int, source: np.ndarray, first: int, length: int) -> None:
    """Write `length` steps of an unroll from `first` on into another one, with the observation that follows them."""
    for name in target.dtype.names:
        rows = length + (name == "obs")
        target[name][at : at + rows] = source[name][first : first + rows]


class Replay:
    """The latest unrolls (--replay-size), drawn evenly or by priority (Schaul et al. 2016)."""

    def __init__(self, args: Args, dtype: np.dtype):
        self.args, self.unrolls, self.count = args, np.zeros(args.replay_size, dtype), 0
        self.priority = torch.zeros(args.replay_size)

    def add(self, unrolls: np.ndarray) -> None:
        where = (self.count + np.arange(len(unrolls))) % len(self.unrolls)
        self.unrolls[where] = unrolls
        self.priority[where] = self.priority.max() if self.count else 1.0  # every unroll is likely to be drawn once
        self.count += len(unrolls)

    def sample(self) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """B unrolls, their places, and the weights of their losses."""
        share = self.priority[: self.count] ** (PRIORITY_ALPHA if self.args.priority else 0)
        where = torch.multinomial(share / share.sum(), self.args.batch_size or self.args.num_envs, replacement=True)
        weight = (share[where] / share.sum() * len(share)) ** (-PRIORITY_BETA if self.args.priority_is_weight else 0)
        return self.unrolls[where.numpy()], where, weight / weight.max()

    def state_dict(self) -> dict:
        unrolls = {name: torch.from_numpy(self.unrolls[name].copy()) for name in self.unrolls.dtype.names}
        return {"unrolls": unrolls, "priority": self.priority, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        for name, x in state["unrolls"].items():
            self.unrolls[name] = x.numpy()
        self.priority, self.count = state["priority"], state["count"]


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


def impala_loss(agent: Agent, unrolls: np.ndarray, weight: torch.Tensor, args: Args):
    """The loss of a batch of unrolls, records (B,), its diagnostics by name, and the mean value error of each unroll.

    weight: (B,), of each unroll in the losses.
    """
    device = next(agent.parameters()).device
    # time first, (T, B, ...)
    batch = {name: torch.from_numpy(unrolls[name].swapaxes(0, 1).copy()).to(device) for name in unrolls.dtype.names}
    weight, real, done = weight.to(device), batch["mask"], batch["termination"] | batch["truncation"]

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

    def mean(x: torch.Tensor) -> torch.Tensor:  # over the steps that are not empty
        return (x * weight * real).sum() / real.sum()

    # detail impala-5: one loss for policy, value and entropy bonus, the sum over the batch
    policy_loss = -mean(log_prob * advantage)
    value_loss = 0.5 * mean((value[:-1] - return_).square())
    entropy = -mean((log_probs.exp() * log_probs).sum(-1))
    loss = (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss) * real.sum()

    with torch.no_grad():
        error = (return_ - value[:-1]) * real
        stats = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": (log_rho.exp() - 1 - log_rho)[real].mean(),
            "clipfrac": (log_rho.exp() > args.rho_clip + 1e-5)[real].float().mean(),  # by more than rounding
            "explained_variance": (1 - error[real].var() / return_[real].var()).nan_to_num(0, neginf=0),
        }
        priority = error.abs().sum(0) / real.sum(0)
    return loss, stats, priority


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


def update(agent: Agent, optimizer: torch.optim.Optimizer, replay: Replay, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for B new unrolls; returns the mean diagnostics."""
    all_stats, weight = [], torch.ones(len(unrolls))
    if args.replay_size:
        replay.add(unrolls)
    for _ in range(args.updates_per_collect):
        if args.replay_size:
            unrolls, where, weight = replay.sample()
        loss, stats, priority = impala_loss(agent, unrolls, weight, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail impala-6: one norm over all gradients
        optimizer.step()
        all_stats.append(stats)
        if args.priority:
            replay.priority[where] = priority.cpu().nan_to_num(0, 0) + 1e-6  # where it is NaN run.log tells of it
    return {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check(args.rho_clip >= args.c_clip, f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}")
    batch_size = args.batch_size or args.num_envs
    message = f"--replay-size {args.replay_size} is less than a batch of {batch_size} unrolls; 0 is none"
    check(args.replay_size == 0 or args.replay_size >= batch_size, message)
    check(not args.priority or args.replay_size > 0, "--priority needs a replay: --replay-size")
    check(not args.priority_is_weight or args.priority, "--priority-is-weight needs --priority")
    slot_size = args.num_envs * args.unroll_length
    first = math.ceil(batch_size / args.num_envs) * slot_size
    message = f"--total-timesteps {args.total_timesteps} is less than the {first} steps of one batch"
    check(args.total_timesteps >= first, message)
    device = set_up(args)

    envs = make_envs(args, 1)
    dtype = unroll_dtype(envs, args)
    check_unrolls_size(args, dtype, args.replay_size)
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent, args)
    replay, cutter = Replay(args, dtype), Cutter(args)
    num_updates, metrics = 0, {}  # updates since the start or resume, and metrics of the latest

    with (
        Run(args, __file__, agent=agent, optimizer=optimizer, replay=replay) as run,
        Actors(Player, args, agent, dtype, run.step) as actors,
    ):
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
            for batch in cutter.cut(slot["actor"], unrolls):
                metrics = update(agent, optimizer, replay, batch, args)
                num_updates += args.updates_per_collect
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
