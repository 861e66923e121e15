"""PPO as in ppo_multidiscrete.py, but invalid actions are masked out (Huang and Ontañón 2020, arXiv:2006.14171).

PPO collects a rollout of T steps from N environments with the current policy, estimates advantages with GAE, and takes
several epochs of minibatch steps on a surrogate objective whose probability ratio is clipped, so that the policy stays
near the one that collected the data. Each component of an action has its own softmax; they are independent, so that
C components of K choices take C * K logits, not K ** C. The mask is a part of the observation, its last C * K numbers.

The default task is Cleaner: three robots in a room with walls, +1 for each tile cleaned, -0.5 for each step; an episode
ends after 100 steps, when all is clean, or when a robot runs against a wall. The write-up used Gym-microRTS.
(envpool's JobShop-v0, ten components of 21 choices, works too, but it is a toy of two operations.)

Papers: Schulman et al. 2017 (arXiv:1707.06347); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Tags such as `detail core-5` name the details; docs/details.md lists them with the tests that prove them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.layers import as_numpy, compilable
from cleanmarl.run import Run, check_rollout_size

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn


@dataclass
class Args(OnPolicyArgs):
    env_id: str = "Cleaner-v0"
    """any envpool id whose actions are vectors of integers with masks: Cleaner-v0, JobShop-v0, MMST-v0, ..."""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, all environments together"""

    learning_rate: PositiveFloat = 2.5e-4
    """learning rate of Adam"""
    num_envs: PositiveInt = 8
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 128
    """T, steps of each environment in one rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 4
    """minibatches of one epoch; must divide num_envs * num_steps"""
    update_epochs: PositiveInt = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: PositiveFloat = 0.1
    """epsilon of the clipped objective"""
    anneal_clip_coef: bool = False
    """let clip_coef fall linearly to 0 over the run"""
    clip_vloss: bool = True
    """clip the change of the value by clip_coef too"""
    ent_coef: NonNegativeFloat = 0.01
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 0.5
    """largest norm of the gradient of all parameters together"""
    target_kl: PositiveFloat | None = None
    """stop the epochs of an update once the approximate KL divergence exceeds this"""
    time_limit_bootstrap: bool = False
    """at a time limit add gamma V(final observation) to the reward; the official implementation does not"""


class VectorObs(gym.vector.VectorWrapper):
    """Observations as vectors (N, D), the mask at their end, and integer actions from 0 to `high` as MultiDiscrete."""

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__(envs)
        empty = gym.vector.utils.create_empty_array(envs.single_observation_space, n=1)
        size = self.vectors(empty).shape[1]
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        space = envs.single_action_space
        if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
            self.single_action_space = gym.spaces.MultiDiscrete(space.high + 1)

    def vectors(self, obs) -> np.ndarray:
        mask = obs["action_mask"].astype(bool)  # (N, C, K), True = legal
        mask[..., 0] |= ~mask.any(-1)  # where nothing is legal (a robot is walled in), 0 counts as legal
        rest = {key: part for key, part in obs.items() if key != "action_mask"}
        vectors = to_vectors(self.env.single_observation_space, rest)
        return np.concatenate([vectors, mask.reshape(len(mask), -1)], axis=1, dtype=np.float32)

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self.vectors(obs), info

    def step(self, action: np.ndarray):
        obs, reward, termination, truncation, info = super().step(action)
        if "final_obs" in info:
            info["final_obs"] = self.vectors(info["final_obs"])
        return self.vectors(obs), reward, termination, truncation, info


def to_vectors(space: gym.Space, obs) -> np.ndarray:
    """Observations of N environments, arrays or dictionaries, as (N, D) float32; integers of a small range one-hot."""
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([to_vectors(space[key], part) for key, part in obs.items()], axis=1)
    if isinstance(space, gym.spaces.Discrete):
        obs = obs[..., None] == np.arange(space.start, space.start + space.n)
    elif isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = int(space.low.min()), int(space.high.max())
        if high - low < 1000:  # else it is no choice among a few, and goes in as a number
            obs = obs[..., None] == np.arange(low, high + 1)
    return obs.reshape(len(obs), -1).astype(np.float32)


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with vectors as observations (integers one-hot); UsageError for other actions."""
    spec = envpool_spec(args.env_id)
    action_space, obs_space = spec.gymnasium_action_space, spec.gymnasium_observation_space
    message = f"this script needs actions of several integers and {args.env_id} has {action_space}"
    check(np.issubdtype(action_space.dtype, np.integer) and len(action_space.shape) == 1, message)
    message = f"this script needs a mask for each component of the action and {args.env_id} has none"
    masks = obs_space.get("action_mask") if isinstance(obs_space, gym.spaces.Dict) else None
    check(masks is not None and masks.shape == (len(action_space.high), action_space.high.max() + 1), message)
    return VectorObs(EnvPool(args.env_id, num_envs, **options))


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    # detail core-2: orthogonal weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Actor(nn.Sequential):
    """Layers that end in logits (B, C * K), given as (B, C, K); choices that are invalid now get -1e8."""

    def __init__(self, choices: torch.Tensor, *layers: nn.Module):
        super().__init__(*layers)
        self.register_buffer("choices", choices, persistent=False)  # (C, K) bool

    def __getitem__(self, part):  # agent.actor[:-1] is layers alone
        return nn.Sequential(*self)[part]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        # detail aux-4: an invalid action has a logit of -1e8, and so no probability and no gradient
        mask = obs[..., -self.choices.numel() :].unflatten(-1, self.choices.shape).bool()
        return super().forward(obs).unflatten(-1, self.choices.shape).masked_fill(~mask, -1e8)


class Agent(nn.Module):
    """Policy logits `actor(obs)` (B, C, K) and state value `critic(obs)` (B, 1), for observations (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size, sizes = envs.single_observation_space.shape[0], torch.as_tensor(envs.single_action_space.nvec)
        choices = torch.arange(int(sizes.max())) < sizes[:, None]  # (C, K): which ones each component has
        num_logits = choices.numel()
        # detail core-13: separate networks, two layers of 64 with tanh
        self.actor = Actor(
            choices,
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_logits), std=0.01),  # small: every action is about as likely at first
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
        logits = actor(obs.astype(np.float32))
        return (logits if greedy else logits + gumbel_noise(*logits.shape)).argmax(-1)

    return policy


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits): -log of exponential noise."""
    return -torch.empty(shape).exponential_().log().numpy()


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments, arrays filled in place."""

    obs: np.ndarray  # (T, N, D) float32
    action: np.ndarray  # (T, N, C) int64
    log_prob: np.ndarray  # (T, N) float32, of the policy that acted
    reward: np.ndarray  # (T, N) float32
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


@torch.no_grad()
def collect(agent: Agent, envs: gym.vector.VectorEnv, obs: np.ndarray, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout, starting from `obs`; returns the observation that follows it.

    Values are not needed meanwhile: they follow for the whole rollout in one batch.
    """
    device = next(agent.parameters()).device
    actor = as_numpy(agent.actor)
    noise = gumbel_noise(*rollout.action.shape, envs.single_action_space.nvec.max())
    logits = np.empty_like(noise)  # (T, N, C, K)
    for t in range(args.num_steps):  # detail core-1: a fixed number of steps, wherever episodes end
        rollout.obs[t] = obs
        logits[t] = actor(rollout.obs[t])
        rollout.action[t] = (logits[t] + noise[t]).argmax(-1)
        obs, rollout.reward[t], termination, truncation, info = envs.step(rollout.action[t].copy())  # theirs to change
        rollout.done[t] = termination | truncation
        if "_episode" in info:
            run.log_episodes(info)
        if args.time_limit_bootstrap:
            for n in np.flatnonzero(truncation & ~termination):
                final_obs = torch.as_tensor(info["final_obs"][n], dtype=torch.float32, device=device)
                rollout.reward[t, n] += args.gamma * agent.critic(final_obs[None]).item()
    run.check_rollout(rollout, obs)
    log_prob = torch.from_numpy(logits).log_softmax(-1).gather(-1, torch.from_numpy(rollout.action)[..., None])
    rollout.log_prob[:] = log_prob.squeeze(-1).sum(-1)
    return obs


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (B, ...); B = T * N, or a minibatch of it."""

    obs: torch.Tensor  # (B, D)
    action: torch.Tensor  # (B, C)
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
    log_probs = agent.actor(batch.obs).log_softmax(-1)  # (B, C, K)
    # detail multidiscrete-1: the components are independent, so their log-probabilities (and entropies) add up
    log_ratio = log_probs.gather(-1, batch.action[..., None]).squeeze(-1).sum(-1) - batch.log_prob
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

    # detail core-10, detail multidiscrete-1: one loss for policy, value and entropy bonus
    entropy = -(log_probs.exp() * log_probs).sum((-2, -1)).mean()
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
        action=np.zeros((T, N, *envs.single_action_space.shape), np.int64),
        log_prob=np.zeros((T, N), np.float32),
        reward=np.zeros((T, N), np.float32),
        done=np.zeros((T, N), bool),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // batch_size
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        obs, _ = run.start(envs)
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
