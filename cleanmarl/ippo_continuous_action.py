"""IPPO as in ippo.py, but for continuous actions: every agent's policy is a normal distribution.

The networks of all agents are stacked, weight (A, in, out), so that one batched product evaluates them all; no gradient
crosses from one agent to another, so each learns exactly as if it were trained alone on the same data. With
--share-parameters one network serves all agents and a one-hot id tells them apart. Every setting marked "per agent"
takes one value, or one for each agent: --gamma 0.99 or --gamma 0.99 0.95 0.99.

A policy acts in a unit of its own, in which every action reaches from -1 to 1; the environment gets it clipped and in
its unit. Observations and rewards are normalised by running statistics, which are saved with the agent.

Papers: de Witt et al. 2020 (arXiv:2011.09533); Huang et al. 2022, "The implementation details of PPO" (ICLR blog).
Parent: ippo.py. Tags such as `detail continuous-5` name the details; docs/details.md lists them with their tests.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.run import Run, check, check_positive, find_device, launch, seed_everything


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policies' samples, the minibatches and the environments"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, mps; small networks are fastest on the CPU"""
    torch_threads: int = 1
    """threads of torch on the CPU"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    resume: Path | None = None
    """run folder to continue; --total-timesteps may be raised"""
    eval_episodes: int = 100
    """episodes of the evaluation at the end, with the most probable actions; 0 for none"""
    capture_video: bool = False
    """record an episode at the end into the run folder"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    env_id: str = "mpe/simple_spread_v3?continuous_actions=True"
    """family/name of a multi-agent environment with continuous actions"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, all environments together, however many agents act in each"""

    share_parameters: bool = False
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    hidden_dim: int = 64
    """units of each of the two hidden layers"""
    learning_rate: tuple[float, ...] = (5e-4,)
    """learning rate of Adam, per agent"""
    lr_schedule: tuple[Literal["constant", "linear", "kl-adaptive"], ...] = ("linear",)
    """constant, linear fall to 0, or steered by the KL divergence of each epoch; per agent"""
    lr_kl_target: float = 0.008
    """KL divergence that the kl-adaptive schedule aims at"""
    num_envs: int = 16
    """N, environments stepped side by side"""
    num_steps: int = 50
    """T, steps of each environment in one rollout"""
    gamma: tuple[float, ...] = (0.95,)
    """discount factor, in [0, 1], per agent; for long episodes, or without --time-limit-bootstrap, rather 0.99"""
    gae_lambda: tuple[float, ...] = (0.95,)
    """lambda of GAE, in [0, 1], per agent"""
    num_minibatches: int = 2
    """minibatches of one epoch; must divide num_envs * num_steps (times the agents, with shared parameters)"""
    update_epochs: tuple[int, ...] = (8,)
    """passes over each rollout, per agent"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: tuple[float, ...] = (0.2,)
    """epsilon of the clipped objective, per agent"""
    value_clip_coef: tuple[float, ...] = (0.0,)
    """largest change of the value that its loss rewards, per agent; 0 for no clipping"""
    ent_coef: tuple[float, ...] = (0.0,)
    """weight of the entropy bonus, per agent"""
    vf_coef: tuple[float, ...] = (1.0,)
    """weight of the value loss, per agent"""
    max_grad_norm: tuple[float, ...] = (0.5,)
    """largest norm of the gradient of an agent's two networks, per agent"""
    target_kl: tuple[float, ...] = (0.0,)
    """an agent whose KL divergence exceeds this skips the rest of the update, per agent; 0 for never"""
    normalize_obs: bool = True
    """normalise observations by their running mean and deviation, each agent's own"""
    normalize_value: bool = False
    """let critics predict normalised returns, by the running mean and deviation, each agent's own"""
    normalize_reward: bool = True
    """divide rewards by the running deviation of the discounted return, per agent"""
    reward_scale: tuple[float, ...] = (1.0,)
    """rewards, normalised or not, are multiplied by this before learning, per agent"""
    time_limit_bootstrap: bool = True
    """at a time limit add gamma V(final observation) to the reward: a truncated episode is not a terminated one"""
    random_timesteps: int = 0
    """environment steps of uniformly random actions at the start, without learning"""
    learning_starts: int = 0
    """environment steps before the first update"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run; UsageError if their actions are discrete."""
    envs = make(args.env_id, num_envs, **options)
    message = f"ippo_continuous_action.py needs continuous actions and those of {args.env_id} are discrete; try ippo.py"
    message += ", or continuous_actions=True in the id" if args.env_id.startswith("mpe/") else ""
    check(envs.continuous, message)
    return envs


class StackedLinear(nn.Module):
    """M linear layers as one batched product: (M, B, in) -> (M, B, out)."""

    def __init__(self, num_networks: int, size_in: int, size_out: int, std: float = np.sqrt(2)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_networks, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(num_networks, 1, size_out))
        for weight in self.weight.detach():
            nn.init.orthogonal_(weight, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples so far, for M networks and D features (Chan et al. 1979, parallel algorithm)."""

    def __init__(self, num_networks: int, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_networks, 1, size))
        self.register_buffer("var", torch.ones(num_networks, 1, size))
        self.register_buffer("count", torch.zeros(num_networks, 1, 1))

    def update(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """x: (M, B, D); weight: (M, B, 1), 1 for samples that count and 0 for those of dead agents."""
        count = weight.sum(1, keepdim=True)
        mean = (x * weight).sum(1, keepdim=True) / count.clamp(min=1)
        var = ((x - mean).square() * weight).sum(1, keepdim=True) / count.clamp(min=1)
        total = (self.count + count).clamp(min=1)
        delta = mean - self.mean
        spread = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(torch.where(count > 0, spread / total, self.var))
        self.count += count

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / (self.var + 1e-8).sqrt()

    def denormalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.var + 1e-8).sqrt() + self.mean


class Agent(nn.Module):
    """The policies and critics of all agents, and their normalisers: M = A networks, or M = 1 shared by all.

    Arrays of the environment have the agents as second axis, (R, A, ...) with R rows; `by_network` brings arrays and
    tensors to (M, B, ...), where B = R rows of each agent, or B = R * A rows of the shared network.
    """

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        self.num_agents, self.shared = envs.num_agents, args.share_parameters
        self.ids = np.eye(self.num_agents, dtype=np.float32)
        num_networks = 1 if self.shared else self.num_agents
        obs_size = int(envs.obs_sizes.max()) + (self.num_agents if self.shared else 0)
        num_actions, hidden = int(envs.action_sizes.max()), args.hidden_dim
        # detail continuous-4: separate networks, two layers with tanh
        self.actor = nn.Sequential(
            StackedLinear(num_networks, obs_size, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, num_actions, std=0.01),  # small: the mean is about 0 at first
        )
        self.critic = nn.Sequential(
            StackedLinear(num_networks, obs_size, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, 1, std=1.0),
        )
        # detail continuous-2: the log standard deviation is a parameter, the same in every state, 0 at first
        self.log_std = nn.Parameter(torch.zeros(num_networks, 1, num_actions))
        self.obs_stats = RunningMeanStd(num_networks, obs_size) if args.normalize_obs else None
        self.value_stats = RunningMeanStd(num_networks, 1) if args.normalize_value else None
        self.return_stats = RunningMeanStd(self.num_agents, 1) if args.normalize_reward else None
        self.running_return = np.zeros((envs.num_envs, self.num_agents))  # discounted, of the episodes under way
        space = envs.single_action_space  # actions that an agent does not have stay 0
        self.low, self.high = (np.where(envs.real_actions, bound, 0) for bound in (space.low, space.high))
        is_bounded = np.isfinite(self.high - self.low)  # where it is not, both units are the same
        low, high = np.where(is_bounded, self.low, -1), np.where(is_bounded, self.high, 1)
        self.middle, self.half_range = (high + low) / 2, (high - low) / 2

    def by_network(self, x):
        """(R, A, ...) -> (M, B, ...)."""
        return x.reshape(1, -1, *x.shape[2:]) if self.shared else x.swapaxes(0, 1)

    def by_agent(self, x):
        """(M, B, ...) -> (R, A, ...)."""
        return x.reshape(-1, self.num_agents, *x.shape[2:]) if self.shared else x.swapaxes(0, 1)

    def features(self, obs: np.ndarray) -> np.ndarray:
        """What the networks see: obs (R, A, D), with ids if they are shared -> (M, B, D), not yet normalised."""
        if self.shared:
            with_ids = np.empty((*obs.shape[:2], obs.shape[2] + self.num_agents), np.float32)
            with_ids[..., : obs.shape[2]], with_ids[..., obs.shape[2] :] = obs, self.ids
            obs = with_ids
        return self.by_network(obs)

    def normalize(self, features: torch.Tensor) -> torch.Tensor:
        # detail continuous-6, detail continuous-7: observations are normalised, then clipped
        return features if self.obs_stats is None else self.obs_stats.normalize(features).clamp(-10, 10)

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """Actions (R, A, K) in the unit of the environment, from the policies' unit, where -1 and 1 are the bounds."""
        # detail continuous-5: the environment gets clipped actions, the rollout keeps the original
        return (self.middle + self.half_range * action).clip(self.low, self.high)

    def scale_reward(self, reward: np.ndarray, done: np.ndarray, agent_mask: np.ndarray, gamma) -> np.ndarray:
        """Rewards (T, N, A) of a rollout, scaled by statistics that take in the rollout first; gamma: (A,), or one."""
        return_ = np.empty_like(reward)
        for t in range(len(reward)):
            return_[t] = self.running_return = self.running_return * gamma + reward[t]
            self.running_return[done[t]] = 0
        samples = np.stack([return_, agent_mask]).reshape(2, -1, self.num_agents, 1).swapaxes(1, 2)  # (2, A, T * N, 1)
        self.return_stats.update(*torch.from_numpy(samples).to(self.return_stats.mean.device))
        # detail continuous-8: rewards are divided by the deviation of the discounted return; their mean stays
        reward = reward / (self.return_stats.var + 1e-8).sqrt().cpu().numpy().ravel()
        # detail continuous-9: reward clipping
        return reward.clip(-10, 10)

    def value(self, features: torch.Tensor) -> torch.Tensor:
        """Values (M, B) in the unit of the returns. features: normalised."""
        value = self.critic(features)
        return (value if self.value_stats is None else self.value_stats.denormalize(value)).squeeze(-1)


def numpy_actor(agent: Agent):
    """The actors as a NumPy function, features (M, B, D) -> means (M, B, K).

    For the few rows of one step it takes a quarter of torch's time. Who changes the network changes it here too.
    """
    w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in agent.actor.parameters())
    if agent.obs_stats is not None:
        mean, std = agent.obs_stats.mean.cpu().numpy(), (agent.obs_stats.var + 1e-8).sqrt().cpu().numpy()

    def actor(x: np.ndarray) -> np.ndarray:
        if agent.obs_stats is not None:
            x = ((x - mean) / std).clip(-10, 10)
        return np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3

    return actor


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their mean actions, or samples."""
    actor, std = numpy_actor(agent), agent.log_std.detach().exp().cpu().numpy()

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        mean = actor(agent.features(obs))
        noise = 0 if greedy else std * torch.randn(mean.shape).numpy()
        return agent.env_action(agent.by_agent(mean + noise))

    return policy


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments with A agents, NumPy arrays filled in place."""

    obs: np.ndarray  # (T, N, A, D) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = the agent has this component
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A, K) float32, as sampled, in the policies' unit
    reward: np.ndarray  # (T, N, A) float32, scaled
    done: np.ndarray  # (T, N, A) bool, the episode ended or the agent died with this step


def gae(reward, value, next_value, done, gamma, gae_lambda) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16), cut where an episode ended.

    reward, value, done: (T, ..., A); next_value: (..., A), of the observation after the last step; gamma, gae_lambda:
    numbers, or (A,) one per agent. Returns (T, ..., A).
    """
    nonterminal = 1.0 - done
    following = np.concatenate([value[1:], next_value[None]])
    advantage = reward + gamma * nonterminal * following - value  # the TD errors
    decay = gamma * gae_lambda * nonterminal
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += decay[t] * advantage[t + 1]
    return advantage


def gaussian_log_prob(action, mean, log_std, action_mask) -> torch.Tensor:
    """Log density (...) of actions (..., K) under normal distributions, of the components that action_mask has."""
    # detail continuous-1: continuous actions have a normal distribution
    log_prob = -0.5 * ((action - mean) / log_std.exp()).square() - (log_std + 0.5 * np.log(2 * np.pi))
    # detail continuous-3: the components are independent, so the log-probability of an action is the sum of theirs
    return (log_prob * action_mask).sum(-1)


@torch.no_grad()
def collect(agent: Agent, envs: MultiAgentVectorEnv, start, rollout: Rollout, args: Args, run: Run):
    """Step the environments for one rollout from `start`, the (obs, info) before it; returns the (obs, info) after it.

    Only actions are needed meanwhile: values and log-probabilities follow for the whole rollout in one batch.
    """
    device = next(agent.parameters()).device
    gamma, reward_scale = np.array(args.gamma, np.float32), np.array(args.reward_scale, np.float32)
    actor, std = numpy_actor(agent), agent.log_std.exp().cpu().numpy()
    noise, bootstrap = torch.randn(rollout.action.shape).numpy(), np.zeros_like(rollout.reward)
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.action_mask[t], rollout.agent_mask[t] = obs, info["action_mask"], info["agent_mask"]
        warm_up = run.step + t * args.num_envs < args.random_timesteps
        action = agent.by_agent(actor(agent.features(obs)) + std * agent.by_network(noise[t]))
        rollout.action[t] = torch.empty(action.shape).uniform_(-1, 1).numpy() if warm_up else action

        obs, rollout.reward[t], termination, truncation, info = envs.step(agent.env_action(rollout.action[t]))
        done = termination | truncation
        # Death ends an agent's own episode; at the end of the whole episode `info` is of the next one already.
        rollout.done[t] = done[:, None] | (rollout.agent_mask[t] & ~info["agent_mask"])
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if args.time_limit_bootstrap and len(cut):
                final_features = torch.from_numpy(agent.features(info["final_obs"][cut])).to(device)
                final_value = agent.by_agent(agent.value(agent.normalize(final_features))).cpu().numpy()
                bootstrap[t, cut] = gamma * final_value * info["final_agent_mask"][cut]
    reward = rollout.reward
    if agent.return_stats is not None:
        reward = agent.scale_reward(reward, rollout.done, rollout.agent_mask, gamma)
    rollout.reward[:] = reward * reward_scale + bootstrap
    return obs, info


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (M, B, ...)."""

    features: torch.Tensor  # (M, B, D) normalised observations
    action_mask: torch.Tensor  # (M, B, K)
    alive: torch.Tensor  # (M, B) 1.0 for living agents, 0.0 for the rest
    action: torch.Tensor  # (M, B, K)
    log_prob: torch.Tensor  # (M, B) of the policy that acted
    advantage: torch.Tensor  # (M, B)
    return_: torch.Tensor  # (M, B) normalised if the values are
    value: torch.Tensor  # (M, B) likewise


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, args: Args) -> Batch:
    """Log-probabilities, values, advantages, returns of a rollout; next_obs (N, A, D) is the observation after it."""
    device = next(agent.parameters()).device

    def by_network(x: np.ndarray) -> torch.Tensor:  # (T, N, A, ...) -> (M, B, ...)
        return agent.by_network(torch.from_numpy(x).to(device).flatten(0, 1))

    def by_agent(x: torch.Tensor) -> np.ndarray:  # (M, B) -> (T, N, A) or (N, A)
        return agent.by_agent(x).reshape(-1, *next_obs.shape[:2]).cpu().numpy()

    obs = rollout.obs.reshape(-1, *next_obs.shape[1:])  # (T * N, A, D)
    features = agent.normalize(torch.from_numpy(agent.features(obs)).to(device))
    next_features = agent.normalize(torch.from_numpy(agent.features(next_obs)).to(device))
    action_mask, action = by_network(rollout.action_mask), by_network(rollout.action)
    alive = by_network(rollout.agent_mask).float()
    log_prob = gaussian_log_prob(action, agent.actor(features), agent.log_std, action_mask)
    value = agent.value(features)
    next_value = by_agent(agent.value(next_features))[0]
    gamma, gae_lambda = np.array(args.gamma), np.array(args.gae_lambda)
    advantage = gae(rollout.reward, by_agent(value), next_value, rollout.done, gamma, gae_lambda)
    advantage = by_network(advantage.astype(np.float32))
    return_ = advantage + value
    if agent.value_stats is not None:  # the critic learns normalised returns, and is compared with normalised values
        agent.value_stats.update(return_[..., None], alive[..., None])
        return_ = agent.value_stats.normalize(return_[..., None]).squeeze(-1)
        value = agent.value_stats.normalize(value[..., None]).squeeze(-1)
    return Batch(features, action_mask, alive, action, log_prob, advantage, return_, value)


class Settings(NamedTuple):
    """Settings of an update: a number where one value was given, (M, 1) where the agents have their own."""

    ratio_low: float | torch.Tensor  # 1 - clip_coef
    ratio_high: float | torch.Tensor  # 1 + clip_coef
    value_clip: float | torch.Tensor | None  # infinite for agents without value clipping; None if none has it
    ent_coef: float | torch.Tensor
    vf_coef: float | torch.Tensor
    max_grad_norm: float | torch.Tensor


def make_settings(args: Args, device: torch.device) -> Settings:
    """The arguments that an update computes with."""

    def per_network(values):
        return values[0] if len(values) == 1 else torch.tensor(values, device=device)[:, None]

    clip_coef = per_network(args.clip_coef)
    value_clip = per_network([c if c > 0 else float("inf") for c in args.value_clip_coef])
    value_clip = value_clip if any(args.value_clip_coef) else None
    ent_coef, vf_coef, max_grad_norm = map(per_network, (args.ent_coef, args.vf_coef, args.max_grad_norm))
    return Settings(1 - clip_coef, 1 + clip_coef, value_clip, ent_coef, vf_coef, max_grad_norm)


def ippo_loss(agent: Agent, batch: Batch, settings: Settings, norm_adv: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each network's own PPO loss (M,), and its diagnostics (5, M): policy, value, entropy, approx_kl, clipfrac."""
    # (M, B) weights that turn a sum into the mean over the samples of living agents
    weight = batch.alive / batch.alive.sum(1, keepdim=True).clamp(min=1)

    log_prob = gaussian_log_prob(batch.action, agent.actor(batch.features), agent.log_std, batch.action_mask)
    log_ratio = (log_prob - batch.log_prob) * batch.alive  # 0 for dead agents: their ratio cannot overflow
    ratio = log_ratio.exp()

    advantage = batch.advantage
    if norm_adv:
        advantage = advantage - (advantage * weight).sum(1, keepdim=True)
        advantage = advantage / ((advantage.square() * weight).sum(1, keepdim=True).sqrt() + 1e-8)

    clipped_ratio = torch.clamp(ratio, settings.ratio_low, settings.ratio_high)
    policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio)

    new_value = agent.critic(batch.features).squeeze(-1)
    if settings.value_clip is not None:
        new_value = batch.value + torch.clamp(new_value - batch.value, -settings.value_clip, settings.value_clip)
    value_loss = (new_value - batch.return_).square()

    entropy = ((agent.log_std + 0.5 * np.log(2 * np.pi * np.e)) * batch.action_mask).sum(-1)
    loss = policy_loss + settings.vf_coef * value_loss - settings.ent_coef * entropy

    with torch.no_grad():
        approx_kl = ratio - 1 - log_ratio
        clipped = (ratio != clipped_ratio).float()
        stats = (torch.stack([policy_loss, value_loss, entropy, approx_kl, clipped]) * weight).sum(-1)
    return (loss * weight).sum(1), stats


def stack_parameters(agent: Agent) -> torch.Tensor:
    """Put all parameters of network m into row m of one tensor (M, P), which makes a row a network to the optimizer.

    The agent's parameters become views of it: what changes the rows changes the agent.
    """
    parameters = list(agent.parameters())  # each (M, ...)
    rows = torch.cat([p.detach().flatten(1) for p in parameters], dim=1)
    for p, values in zip(parameters, rows.split([p[0].numel() for p in parameters], dim=1)):
        p.data = values.view_as(p)
    return rows


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, settings: Settings, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    num_networks, batch_size = batch.alive.shape
    parameters = list(agent.parameters())
    rows = [row for group in optimizer.param_groups for row in group["params"]]  # row m: the parameters of network m
    target_kl = np.broadcast_to(args.target_kl, num_networks)
    active = np.ones(num_networks, bool)  # networks that still learn from this rollout
    all_stats = []
    for epoch in range(max(args.update_epochs)):
        active &= epoch < np.array(args.update_epochs)
        learning = active.copy()
        minibatches = [batch]
        if args.num_minibatches > 1:
            order = torch.randperm(batch_size, device=batch.action.device)
            parts = [x[:, order].split(batch_size // args.num_minibatches, dim=1) for x in batch]
            minibatches = map(Batch._make, zip(*parts))
        for minibatch in minibatches:
            loss, stats = ippo_loss(agent, minibatch, settings, args.norm_adv)
            if target_kl.any():
                active &= (target_kl == 0) | (stats[3].cpu().numpy() <= target_kl)
            # The losses share no parameter: the gradient of their sum is each network's gradient of its own loss.
            gradient = torch.cat([g.flatten(1) for g in torch.autograd.grad(loss.sum(), parameters)], dim=1)  # (M, P)
            gradient *= (settings.max_grad_norm / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
            for row, row_gradient, is_active in zip(rows, gradient.unbind(), active):
                row.grad = row_gradient if is_active else None  # Adam leaves a row without gradient alone
            optimizer.step()
            all_stats.append(stats)
        if "kl-adaptive" in args.lr_schedule:
            epoch_kl = torch.stack(all_stats[-args.num_minibatches :])[:, 3].mean(0)  # (M,)
            adapt_learning_rate(optimizer, epoch_kl, learning, args)
        if not active.any():
            break
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"]
    metrics = {f"train/{name}": x for name, x in zip(names, torch.stack(all_stats).mean((0, 2)).tolist())}
    return_, value = (x[batch.alive > 0] for x in (batch.return_, batch.value))
    metrics["train/explained_variance"] = (1 - (return_ - value).var() / return_.var()).nan_to_num(0, neginf=0)
    return metrics


def adapt_learning_rate(optimizer: torch.optim.Optimizer, kl: torch.Tensor, learning: np.ndarray, args: Args) -> None:
    """The kl-adaptive schedule: policies that are learning slow down 1.5 times if they move too far, or speed up."""
    schedules = np.broadcast_to(args.lr_schedule, len(optimizer.param_groups))
    for m in np.flatnonzero((schedules == "kl-adaptive") & learning):
        group = optimizer.param_groups[m]
        if kl[m] > 2 * args.lr_kl_target:
            group["lr"] = max(group["lr"] / 1.5, 1e-6)
        elif kl[m] < args.lr_kl_target / 2:
            group["lr"] = min(group["lr"] * 1.5, 1e-2)


def check_args(args: Args) -> None:
    """What can be checked without the environment; raises UsageError."""
    check_positive(args, "num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate", "torch_threads")
    check_positive(args, "hidden_dim", "checkpoint_interval", "max_grad_norm", "clip_coef", "lr_kl_target")
    for name in ("gamma", "gae_lambda"):
        check(all(0 <= x <= 1 for x in getattr(args, name)), f"--{name.replace('_', '-')} must be in [0, 1]")
    for name in ("value_clip_coef", "target_kl"):
        check(all(x >= 0 for x in getattr(args, name)), f"--{name.replace('_', '-')} must be at least 0")


def check_per_agent(args: Args, num_agents: int) -> None:
    """Check the lengths of the settings that are given once or per agent."""
    of_rewards = ["gamma", "gae_lambda", "reward_scale"]
    of_networks = ["learning_rate", "lr_schedule", "update_epochs", "clip_coef", "value_clip_coef", "ent_coef"]
    of_networks += ["vf_coef", "max_grad_norm", "target_kl"]
    for name in of_rewards + of_networks:
        flag, length = f"--{name.replace('_', '-')}", len(getattr(args, name))
        check(length in (1, num_agents), f"{flag} takes one value or one for each of {num_agents} agents, not {length}")
        if args.share_parameters and name in of_networks:
            check(length == 1, f"{flag} takes one value with --share-parameters, not {length}: there is one network")


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_args(args)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)
    envs = make_envs(args, args.num_envs)
    T, N = args.num_steps, args.num_envs
    (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]
    check_per_agent(args, A)
    steps_per_update = T * N
    samples = steps_per_update * (A if args.share_parameters else 1)
    message = f"{samples} samples of a rollout are not divisible by --num-minibatches {args.num_minibatches}"
    check(samples % args.num_minibatches == 0, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps_per_update} steps"
    check(args.total_timesteps >= steps_per_update, message)

    agent = Agent(envs, args).to(device)
    rows = stack_parameters(agent)
    learning_rate = np.broadcast_to(args.learning_rate, len(rows)).tolist()
    groups = [{"params": [row], "lr": lr} for row, lr in zip(rows, learning_rate)]
    if len(args.learning_rate) == len(args.lr_schedule) == 1 and "kl-adaptive" not in args.lr_schedule:
        groups = [{"params": list(rows), "lr": learning_rate[0]}]  # one call of Adam for all
    optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
    rollout = Rollout(
        obs=np.zeros((T, N, A, D), np.float32),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A, K), np.float32),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
    )

    settings = make_settings(args, device)
    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        now = envs.reset(seed=args.seed + run.step)
        for iteration in range(run.step // steps_per_update, num_updates):
            for group, lr, schedule in zip(optimizer.param_groups, learning_rate, args.lr_schedule * len(rows)):
                if schedule == "linear":
                    group["lr"] = lr * (1 - iteration / num_updates)

            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            batch = estimate(agent, rollout, now[0], args)
            metrics = {}
            at_random = run.step - steps_per_update < args.random_timesteps  # the rollout began so
            if not at_random and run.step >= args.learning_starts:
                metrics = update(agent, optimizer, batch, settings, args)
                metrics["train/learning_rate"] = np.mean([group["lr"] for group in optimizer.param_groups])
            if agent.obs_stats is not None:  # only now: the update needs the statistics that the rollout acted with
                features = agent.features(rollout.obs.reshape(steps_per_update, A, D))
                agent.obs_stats.update(torch.from_numpy(features).to(device), batch.alive[..., None])
            run.log(metrics)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
