"""PPO as in ppo.py, but for continuous actions, with the 9 details that its official implementation adds for them.

PPO collects a rollout of T steps from N environments with the current policy, estimates advantages with GAE, and takes
several epochs of minibatch steps on a surrogate objective whose probability ratio is clipped, so that the policy stays
near the one that collected the data. The policy is a normal distribution; observations and rewards are normalised
with running statistics, which belong to the agent: they are saved with it and stay as they are in an evaluation.

Papers: Schulman et al. 2017 (arXiv:1707.06347); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Tags such as `detail core-5` name the details; docs/details.md lists them with the tests that prove them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs import make_gymnasium
from cleanmarl.layers import as_numpy, compilable
from cleanmarl.run import Run, check_rollout_size

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn


@dataclass
class Args(OnPolicyArgs):
    env_id: str = "HalfCheetah-v5"
    """any Gymnasium id with Box or Discrete observations and Box actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, all environments together"""

    learning_rate: PositiveFloat = 3e-4
    """learning rate of Adam"""
    num_envs: PositiveInt = 1
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 2048
    """T, steps of each environment in one rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 32
    """minibatches of one epoch; must divide num_envs * num_steps"""
    update_epochs: PositiveInt = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: PositiveFloat = 0.2
    """epsilon of the clipped objective"""
    anneal_clip_coef: bool = False
    """let clip_coef fall linearly to 0 over the run"""
    clip_vloss: bool = True
    """clip the change of the value by clip_coef too"""
    ent_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 0.5
    """largest norm of the gradient of all parameters together"""
    target_kl: PositiveFloat | None = None
    """stop the epochs of an update once the approximate KL divergence exceeds this"""
    time_limit_bootstrap: bool = False
    """at a time limit add gamma V(final observation) to the reward; the official implementation does not"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with vectors as observations."""
    # detail continuous-5: the environment clips the action to its range, the rollout keeps the original
    wrappers = [gym.wrappers.ClipAction]
    return make_gymnasium(args.env_id, num_envs, discrete=False, vectors=True, wrappers=wrappers, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    # detail core-2: orthogonal weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMeanStd:
    """Mean and standard deviation of everything seen so far (Welford 1962), in NumPy's float64."""

    def __init__(self, shape: int | tuple = ()):
        self.count, self.mean, self.squares = np.array(1e-4), np.zeros(shape), np.full(shape, 1e-4)

    def update(self, x: np.ndarray) -> None:
        """Take in one row from each environment, x (N, ...)."""
        self.count += len(x)
        delta = x - self.mean
        self.mean += delta.sum(0) / self.count
        self.squares += (delta * (x - self.mean)).sum(0)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / self.count + 1e-8)


class Agent(nn.Module):
    """Policy mean `actor(obs)` (B, K), `log_std` (K,), state value `critic(obs)` (B, 1), for observations (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        # detail core-13, detail continuous-4: separate networks, two layers of 64 with tanh
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), std=0.01),  # small: the mean is about 0 at first
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )
        # detail continuous-2: the log standard deviation is a parameter, the same in every state, 0 at first
        self.log_std = nn.Parameter(torch.zeros(num_actions))
        self.obs_stats, self.return_stats = RunningMeanStd(obs_size), RunningMeanStd()
        self.running_return = np.zeros(envs.num_envs)  # discounted, of the episodes under way

    def statistics(self) -> dict[str, RunningMeanStd]:
        return {name.removesuffix("_stats"): x for name, x in vars(self).items() if isinstance(x, RunningMeanStd)}

    def get_extra_state(self) -> dict:  # part of the state_dict: a checkpoint holds the statistics too
        return {name: {key: torch.tensor(x) for key, x in vars(s).items()} for name, s in self.statistics().items()}

    def set_extra_state(self, state: dict) -> None:
        for name, stats in self.statistics().items():
            vars(stats).update({key: x.numpy().copy() for key, x in state[name].items()})

    def normalize_obs(self, obs: np.ndarray) -> np.ndarray:
        # detail continuous-6: normalization of observations by one mean and deviation for all environments
        obs = (obs - self.obs_stats.mean) / self.obs_stats.std
        # detail continuous-7: observation clipping
        return obs.clip(-10, 10).astype(np.float32)

    def scale_reward(self, reward: np.ndarray) -> np.ndarray:
        # detail continuous-8: reward scaling by the deviation of the discounted return; the mean stays
        reward = reward / self.return_stats.std
        # detail continuous-9: reward clipping
        return reward.clip(-10, 10)


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the mean action, or a sample."""
    actor, std = as_numpy(agent.actor), agent.log_std.detach().exp().cpu().numpy()

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        mean = actor(agent.normalize_obs(obs))
        return mean if greedy else mean + std * torch.randn(mean.shape).numpy()

    return policy


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments, arrays filled in place."""

    obs: np.ndarray  # (T, N, D) float32, normalised
    action: np.ndarray  # (T, N, K) float32, as sampled
    log_prob: np.ndarray  # (T, N) float32, of the policy that acted
    reward: np.ndarray  # (T, N) float32, scaled
    done: np.ndarray  # (T, N) bool, the episode ended with this step


def gae(reward, value, next_value, done, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16), cut where an episode ended.

    reward, value, done: (T, ...); next_value: (...), of the observation after the last step. Returns (T, ...).
    """
    # detail core-5: generalized advantage estimation
    nonterminal = 1 - done.astype(value.dtype)
    following = np.concatenate([value[1:], next_value[None]])
    advantage = reward + gamma * nonterminal * following - value  # the TD errors
    decay = gamma * gae_lambda * nonterminal
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += decay[t] * advantage[t + 1]
    return advantage


def gaussian_log_prob(action: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Log density (...) of actions (..., K) under normal distributions."""
    # detail continuous-1: continuous actions have a normal distribution
    log_prob = -0.5 * ((action - mean) / log_std.exp()).square() - (log_std + 0.5 * np.log(2 * np.pi))
    # detail continuous-3: the components are independent, so the log-probability of an action is the sum of theirs
    return log_prob.sum(-1)


@torch.no_grad()
def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout, starting from normalised `obs`; returns the one that follows it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    device = next(agent.parameters()).device
    actor = as_numpy(agent.actor)
    noise = (agent.log_std.exp() * torch.randn(rollout.action.shape, device=device)).cpu().numpy()
    mean = np.empty_like(noise)  # (T, N, K)
    raw_obs = np.zeros((args.num_steps + 1, *obs.shape))  # to check: in clipped ones nothing is infinite
    raw_obs[0] = obs  # normalised, which leaves NaN as it is
    for t in range(args.num_steps):  # detail core-1: a fixed number of steps, wherever episodes end
        rollout.obs[t] = obs
        mean[t] = actor(rollout.obs[t])
        rollout.action[t] = mean[t] + noise[t]
        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        rollout.done[t] = termination | truncation
        agent.running_return = agent.running_return * args.gamma + reward
        agent.return_stats.update(agent.running_return)
        agent.running_return[rollout.done[t]] = 0
        rollout.reward[t] = agent.scale_reward(reward)
        raw_obs[t + 1] = obs
        agent.obs_stats.update(obs)
        obs = agent.normalize_obs(obs)
        if "_episode" in info:
            run.log_episodes(info)
        if args.time_limit_bootstrap:
            for n in np.flatnonzero(truncation & ~termination):
                final_obs = torch.from_numpy(agent.normalize_obs(info["final_obs"][n])).to(device)
                rollout.reward[t, n] += args.gamma * agent.critic(final_obs[None]).item()
    run.check_rollout(rollout._replace(obs=raw_obs), obs)
    action, log_std = torch.from_numpy(rollout.action), agent.log_std.cpu()
    rollout.log_prob[:] = gaussian_log_prob(action, torch.from_numpy(mean), log_std)
    return obs


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (B, ...); B = T * N, or a minibatch of it."""

    obs: torch.Tensor  # (B, D)
    action: torch.Tensor  # (B, K)
    log_prob: torch.Tensor  # (B,) of the policy that acted
    advantage: torch.Tensor  # (B,)
    return_: torch.Tensor  # (B,) targets of the value function
    value: torch.Tensor  # (B,) what it said before the update


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, args: Args) -> Batch:
    """Values, advantages and returns of a rollout; next_obs (N, D) is the observation that follows it."""
    device = next(agent.parameters()).device
    # copies: a batch that is kept stays what it is
    obs, action, log_prob = (torch.tensor(x, device=device) for x in (rollout.obs, rollout.action, rollout.log_prob))
    value = agent.critic(obs.flatten(0, 1)).view(rollout.reward.shape)  # (T, N)
    next_value = agent.critic(torch.as_tensor(next_obs, dtype=torch.float32, device=device)).squeeze(-1).cpu().numpy()
    advantage = gae(rollout.reward, value.cpu().numpy(), next_value, rollout.done, args.gamma, args.gae_lambda)
    advantage = torch.from_numpy(advantage).to(device)
    return_ = advantage + value  # detail core-5: TD(lambda) returns
    return Batch(*(x.flatten(0, 1) for x in (obs, action, log_prob, advantage, return_, value)))


@compilable
def ppo_loss(agent: Agent, batch: Batch, clip_coef: float, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one minibatch, and its diagnostics by name."""
    log_ratio = gaussian_log_prob(batch.action, agent.actor(batch.obs), agent.log_std) - batch.log_prob
    ratio = log_ratio.exp()

    # detail core-7: advantages are normalised per minibatch, not per rollout
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    # detail core-8: clipped surrogate objective
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()

    # detail core-9: the change of the value is clipped likewise
    new_value = agent.critic(batch.obs).squeeze(-1)
    value_error = (new_value - batch.return_).square()
    if args.clip_vloss:
        clipped_value = batch.value + (new_value - batch.value).clamp(-clip_coef, clip_coef)
        value_error = torch.max(value_error, (clipped_value - batch.return_).square())
    value_loss = 0.5 * value_error.mean()

    # detail core-10: one loss for policy, value and entropy bonus
    entropy = (agent.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    # detail core-12: debug variables; the KL estimator k3 of joschu.net/blog/kl-approx.html
    with torch.no_grad():
        stats = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
        }
    return loss, stats


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, clip_coef: float, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    batch_size = len(batch.obs)
    all_stats = []
    for _ in range(args.update_epochs):
        # detail core-6: every sample is used once per epoch, in random minibatches
        order = torch.randperm(batch_size, device=batch.obs.device)
        shuffled = [x[order].split(batch_size // args.num_minibatches) for x in batch]
        for minibatch in zip(*shuffled):
            loss, stats = ppo_loss(agent, Batch(*minibatch), clip_coef, args)
            optimizer.zero_grad()
            loss.backward()
            # detail core-11: one norm over all gradients
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            all_stats.append(stats)
        # detail aux-3: early stopping, by approx_kl
        if args.target_kl is not None and stats["approx_kl"] > args.target_kl:
            break
    metrics = {f"train/{name}": torch.stack([stats[name] for stats in all_stats]).mean() for name in all_stats[0]}
    unexplained = (batch.return_ - batch.value).var()
    metrics["train/explained_variance"] = (1 - unexplained / batch.return_.var()).nan_to_num(0, neginf=0)
    return metrics


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    batch_size = args.num_envs * args.num_steps
    message = f"{batch_size} steps of a rollout must be a multiple (2+) of --num-minibatches {args.num_minibatches}"
    check(batch_size % args.num_minibatches == 0 and batch_size > args.num_minibatches, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {batch_size} steps"
    check(args.total_timesteps >= batch_size, message)
    device = set_up(args)

    envs = make_envs(args, args.num_envs)  # detail core-1: vectorized architecture
    agent = Agent(envs, args).to(device)
    # detail core-3: Adam's epsilon is 1e-5, not the library's 1e-8
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    T, N = args.num_steps, args.num_envs
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), np.float32),
        action=np.zeros((T, N, *envs.single_action_space.shape), np.float32),
        log_prob=np.zeros((T, N), np.float32),
        reward=np.zeros((T, N), np.float32),
        done=np.zeros((T, N), bool),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // batch_size
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        obs, _ = run.start(envs)
        agent.obs_stats.update(obs)
        obs = agent.normalize_obs(obs)
        for iteration in range(run.step // batch_size, num_updates):
            # detail core-4, detail aux-1: learning rate and clip range fall linearly to 0
            remaining = 1 - iteration / num_updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
            clip_coef = args.clip_coef * (remaining if args.anneal_clip_coef else 1)

            obs = collect(agent, envs, obs, rollout, args, run)
            run.step += batch_size
            batch = estimate(agent, rollout, obs, args)
            metrics = update(agent, optimizer, batch, clip_coef, args)
            run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
