"""MAPPO as in mappo.py, but for continuous actions: every agent's policy is a normal distribution.

Only training is centralised: an agent's critic gets the global state beside the agent's own observation. By default one
actor and one critic serve all agents, who are told apart by a one-hot id; with --no-share-parameters every agent has
its own, stacked, weight (A, in, out). Critics predict normalised returns (PopArt), with a Huber loss. Death masking:
the critic of a dead agent sees zeros (and the id), and what its team earns after its death still counts for it.

A policy acts in a unit of its own, in which every action reaches from -1 to 1; the environment gets it clipped and in
its unit. Observations and states are normalised by running statistics, which are saved with the agent.

Papers: Yu et al. 2021 (arXiv:2103.01955); Huang et al. 2022, "The implementation details of PPO" (ICLR blog).
Parents: mappo.py; its actions are those of ippo_continuous_action.py. Tags such as `detail continuous-5` name the
details; docs/details.md lists them with their tests.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

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

    share_parameters: bool = True
    """one policy and one critic for all agents, who are told apart by a one-hot id"""
    hidden_dim: int = 64
    """units of each of the two hidden layers"""
    learning_rate: float = 7e-4
    """learning rate of the actors' Adam"""
    critic_learning_rate: float = 7e-4
    """learning rate of the critics' Adam"""
    anneal_lr: bool = False
    """let the learning rates fall linearly to 0 over the run"""
    num_envs: int = 128
    """N, environments stepped side by side"""
    num_steps: int = 25
    """T, steps of each environment in one rollout"""
    gamma: float = 0.95
    """discount factor, in [0, 1]; for long episodes, or without --time-limit-bootstrap, rather 0.99"""
    gae_lambda: float = 0.95
    """lambda of GAE, in [0, 1]"""
    num_minibatches: int = 4
    """minibatches of one epoch; must divide num_envs * num_steps, since the agents of a step stay together"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each rollout"""
    clip_coef: float = 0.2
    """epsilon of the clipped objective"""
    value_clip_coef: float = 0.2
    """largest change of the (normalised) value that its loss rewards; 0 for no clipping"""
    huber_delta: float = 10.0
    """error of the (normalised) value from which its loss grows linearly; 0 for the squared error"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: float = 10.0
    """largest norm of the gradient of a network"""
    normalize_obs: bool = True
    """normalise observations and states by their running mean and deviation"""
    normalize_value: bool = True
    """let critics predict normalised returns, by the running mean and deviation (PopArt)"""
    time_limit_bootstrap: bool = True
    """at a time limit add gamma V(final state) to the reward: a truncated episode is not a terminated one"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run; UsageError if their actions are discrete."""
    envs = make(args.env_id, num_envs, **options)
    message = (
        f"mappo_continuous_action.py needs continuous actions and those of {args.env_id} are discrete; try mappo.py"
    )
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
        self.register_buffer("mean", torch.zeros(num_networks, size))
        self.register_buffer("var", torch.ones(num_networks, size))
        self.register_buffer("count", torch.zeros(num_networks, 1))

    def update(self, x: np.ndarray, weight: np.ndarray) -> None:
        """x: (R, A, D); weight: (R, A), True for samples that count and False for those of dead agents."""
        x = torch.from_numpy(x).to(self.mean.device).reshape(-1, *self.mean.shape)
        weight = torch.from_numpy(weight).to(self.mean.device).reshape(-1, *self.count.shape)
        count = weight.sum(0)
        mean = (x * weight).sum(0) / count.clamp(min=1)
        var = ((x - mean).square() * weight).sum(0) / count.clamp(min=1)
        total, delta = (self.count + count).clamp(min=1), mean - self.mean
        spread = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(torch.where(count > 0, spread / total, self.var))
        self.count += count

    def normalize(self, x: np.ndarray) -> np.ndarray:
        mean, std = self.mean.cpu().numpy(), (self.var + 1e-8).sqrt().cpu().numpy()
        # detail continuous-6, detail continuous-7: observations are normalised, then clipped
        return ((x - mean) / std).clip(-10, 10)


class PopArt(nn.Module):
    """Mean and variance of all returns so far, for M critics that predict normalised ones (van Hasselt et al. 2016).

    `update` takes in new returns (Chan et al. 1979, parallel algorithm) and adapts the critics' last layer to them so
    that every value stays what it was, in the unit of the returns.
    """

    def __init__(self, num_networks: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, num_networks))
        self.register_buffer("var", torch.ones(1, num_networks))
        self.register_buffer("count", torch.zeros(()))

    @property
    def std(self) -> torch.Tensor:
        return self.var.clamp(min=1e-2).sqrt()  # the floor of the official implementation

    @torch.no_grad()
    def update(self, mean: torch.Tensor, var: torch.Tensor, count: int, last_layer: StackedLinear) -> None:
        """mean, var: (1, M) of `count` new returns of each network."""
        old_mean, old_std = self.mean.clone(), self.std
        total, delta = self.count + count, mean - self.mean
        spread = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(spread / total)
        self.count.copy_(total)
        last_layer.weight *= (old_std / self.std).view(-1, 1, 1)
        last_layer.bias *= (old_std / self.std).view(-1, 1, 1)
        last_layer.bias += ((old_mean - self.mean) / self.std).view(-1, 1, 1)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std

    def denormalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.std + self.mean


class Agent(nn.Module):
    """The policies and critics of all agents, and the returns' normaliser: M = 1 network shared by all, or M = A.

    Arrays have the agents as second axis, (R, A, ...) with R rows: the agents of one step stay side by side. Inside,
    `by_network` brings them to (M, B, ...), where B = R * A rows of the shared network, or R rows of each agent.
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
        # detail continuous-2: the log standard deviation is a parameter, the same in every state, 0 at first
        self.actor.log_std = nn.Parameter(torch.zeros(num_networks, num_actions))
        self.critic = nn.Sequential(
            StackedLinear(num_networks, envs.state_size + obs_size, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, hidden),
            nn.Tanh(),
            StackedLinear(num_networks, hidden, 1, std=1.0),
        )
        self.value_stats = PopArt(num_networks) if args.normalize_value else None
        self.obs_stats = RunningMeanStd(num_networks, int(envs.obs_sizes.max())) if args.normalize_obs else None
        self.state_stats = RunningMeanStd(1, envs.state_size) if args.normalize_obs else None
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

    def mean(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Weighted mean over each network's samples: x, weight (R, A) -> (1, 1) if shared, else (1, A)."""
        axes = (0, 1) if self.shared else (0,)
        return (x * weight).sum(axes, keepdim=True) / weight.sum(axes, keepdim=True).clamp(min=1)

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        return obs if self.obs_stats is None else self.obs_stats.normalize(obs)

    def with_ids(self, x: np.ndarray) -> np.ndarray:
        """x (R, A, ...), with ids if the networks are shared."""
        ids = [np.broadcast_to(self.ids, (len(x), *self.ids.shape))] if self.shared else []
        return np.concatenate([x, *ids], axis=-1)

    def features(self, obs: np.ndarray) -> np.ndarray:
        """What the actors see: obs (R, A, D), normalised, with ids if they are shared."""
        return self.with_ids(self.normalize(obs))

    def critic_input(self, state: np.ndarray, obs: np.ndarray, alive: np.ndarray) -> tuple[torch.Tensor, ...]:
        """What the critics see: state (R, S), features (R, A, D), both normalised, and alive (R, A)."""
        state = state if self.state_stats is None else self.state_stats.normalize(state)
        seen = state, self.with_ids(self.normalize(obs) * alive[..., None]), alive.astype(np.float32)
        return tuple(torch.from_numpy(x).to(self.critic[0].weight.device) for x in seen)

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """Actions (R, A, K) in the unit of the environment, from the policies' unit, where -1 and 1 are the bounds."""
        # detail continuous-5: the environment gets clipped actions, the rollout keeps the original
        return (self.middle + self.half_range * action).clip(self.low, self.high)

    def action_mean(self, features: torch.Tensor) -> torch.Tensor:
        """Means (R, A, K) of the policies' normal distributions."""
        return self.by_agent(self.actor(self.by_network(features)))

    def normalized_value(self, state: torch.Tensor, features: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Values (R, A) as the critics predict them, from `critic_input`.

        A shared first layer reads the state, which may be large, once for all agents: W [s, x] = W_s s + W_x x.
        """
        first, rest = self.critic[0], self.critic[1:]
        of_state = (state @ first.weight[:, : state.shape[-1]]).swapaxes(0, 1)  # (R, M, H)
        of_agent = torch.baddbmm(first.bias, self.by_network(features), first.weight[:, state.shape[-1] :])
        hidden = self.by_agent(of_agent) + of_state * alive[..., None]
        return self.by_agent(rest(self.by_network(hidden))).squeeze(-1)

    def value(self, *critic_input: torch.Tensor) -> torch.Tensor:
        """Values (R, A) in the unit of the returns."""
        value = self.normalized_value(*critic_input)
        return value if self.value_stats is None else self.value_stats.denormalize(value)


def numpy_actor(agent: Agent):
    """The actors as a NumPy function, features (R, A, D) -> means (R, A, K).

    For the few rows of one step it takes a quarter of torch's time. Who changes the network changes it here too.
    """
    _, w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in agent.actor.parameters())

    def actor(features: np.ndarray) -> np.ndarray:
        x = agent.by_network(features)
        return agent.by_agent(np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3)

    return actor


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their mean actions, or samples."""
    actor, std = numpy_actor(agent), agent.actor.log_std.detach().exp().cpu().numpy()

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        mean = actor(agent.features(obs))
        noise = 0 if greedy else std * torch.randn(mean.shape).numpy()
        return agent.env_action(mean + noise)

    return policy


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments with A agents, NumPy arrays filled in place."""

    obs: np.ndarray  # (T, N, A, D) float32
    state: np.ndarray  # (T, N, S) float32
    action_mask: np.ndarray  # (T, N, A, K) bool, True = the agent has this component
    agent_mask: np.ndarray  # (T, N, A) bool, True = alive
    action: np.ndarray  # (T, N, A, K) float32, as sampled, in the policies' unit
    reward: np.ndarray  # (T, N, A) float32
    done: np.ndarray  # (T, N, A) bool, the episode ended with this step


def gae(reward, value, next_value, done, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimation (Schulman et al. 2016, equation 16), cut where an episode ended.

    reward, value, done: (T, ..., A); next_value: (..., A), of the observation after the last step. Returns (T, ..., A).
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
    actor, std = numpy_actor(agent), agent.actor.log_std.exp().cpu().numpy()
    noise = torch.randn(rollout.action.shape).numpy()
    obs, info = start
    for t in range(args.num_steps):
        rollout.obs[t], rollout.state[t] = obs, info["state"]
        rollout.action_mask[t], rollout.agent_mask[t] = info["action_mask"], info["agent_mask"]
        rollout.action[t] = actor(agent.features(obs)) + std * noise[t]

        obs, reward, termination, truncation, info = envs.step(agent.env_action(rollout.action[t]))
        # Death is no end: a dead agent earns what the living do on average, and its critic knows that it is dead.
        alive = rollout.agent_mask[t]
        of_living = (reward * alive).sum(1, keepdims=True) / alive.sum(1, keepdims=True).clip(1)
        rollout.reward[t] = np.where(alive, reward, of_living)
        rollout.done[t] = (termination | truncation)[:, None]
        if "_episode" in info:
            run.log_episodes(info)
            cut = np.flatnonzero(truncation & ~termination)
            if args.time_limit_bootstrap and len(cut):
                final = info["final_state"][cut], info["final_obs"][cut], info["final_agent_mask"][cut]
                final_value = agent.value(*agent.critic_input(*final))
                rollout.reward[t, cut] += args.gamma * final_value.cpu().numpy()
    return obs, info


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (R, A, ...) with a row for each step of each environment."""

    features: torch.Tensor  # (R, A, D) what the actors see
    state: torch.Tensor  # (R, S) what the critics see
    critic_features: torch.Tensor  # (R, A, D) and this
    action_mask: torch.Tensor  # (R, A, K)
    alive: torch.Tensor  # (R, A) 1.0 for living agents, 0.0 for the rest
    action: torch.Tensor  # (R, A, K)
    log_prob: torch.Tensor  # (R, A) of the policy that acted
    advantage: torch.Tensor  # (R, A) normalised
    return_: torch.Tensor  # (R, A) normalised if the values are
    value: torch.Tensor  # (R, A) likewise


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, next_info: dict, args: Args) -> Batch:
    """Log-probabilities, values, advantages, returns of a rollout; next_obs, next_info are what the last step gave."""
    device = next(agent.parameters()).device
    rows = Rollout(*(x.reshape(-1, *x.shape[2:]) for x in rollout))  # (T * N, ...)

    def to_tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(device)

    features = to_tensor(agent.features(rows.obs))
    state, critic_features, alive = agent.critic_input(rows.state, rows.obs, rows.agent_mask)
    action_mask, action = to_tensor(rows.action_mask), to_tensor(rows.action)
    log_prob = gaussian_log_prob(action, agent.action_mean(features), agent.actor.log_std, action_mask)
    value = agent.value(state, critic_features, alive)
    next_value = agent.value(*agent.critic_input(next_info["state"], next_obs, next_info["agent_mask"])).cpu().numpy()
    values = value.view(rollout.reward.shape).cpu().numpy()
    advantage = gae(rollout.reward, values, next_value, rollout.done, args.gamma, args.gae_lambda)
    advantage = to_tensor(advantage.reshape(rows.reward.shape).astype(np.float32))
    return_ = advantage + value
    if agent.value_stats is not None:  # the critic learns normalised returns, and is compared with normalised values
        everyone = torch.ones_like(alive)
        mean = agent.mean(return_, everyone)
        var = agent.mean((return_ - mean).square(), everyone)
        agent.value_stats.update(mean, var, return_.numel() // mean.numel(), agent.critic[-1])
        return_, value = agent.value_stats.normalize(return_), agent.value_stats.normalize(value)
    if args.norm_adv:
        advantage = advantage - agent.mean(advantage, alive)
        advantage = advantage / (agent.mean(advantage.square(), alive).sqrt() + 1e-8)
    return Batch(features, state, critic_features, action_mask, alive, action, log_prob, advantage, return_, value)


def mappo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The actors' and the critics' loss, each summed over networks that share no parameter, and diagnostics.

    Diagnostics, means over the networks: policy loss, value loss, entropy, approximate KL divergence, clipped fraction.
    """
    mean, log_std = agent.action_mean(batch.features), agent.actor.log_std
    log_prob = gaussian_log_prob(batch.action, mean, log_std, batch.action_mask)
    log_ratio = (log_prob - batch.log_prob) * batch.alive  # 0 for dead agents: their ratio cannot overflow
    ratio = log_ratio.exp()
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.min(batch.advantage * ratio, batch.advantage * clipped_ratio)
    policy_loss = -agent.mean(surrogate, batch.alive)
    entropy = ((log_std + 0.5 * np.log(2 * np.pi * np.e)) * batch.action_mask).sum(-1)  # (R, A)
    entropy = agent.mean(entropy, batch.alive)

    new_value = agent.normalized_value(batch.state, batch.critic_features, batch.alive)
    delta = args.huber_delta or float("inf")
    value_error = F.huber_loss(new_value, batch.return_, reduction="none", delta=delta)
    if args.value_clip_coef > 0:
        clipped_value = batch.value + torch.clamp(new_value - batch.value, -args.value_clip_coef, args.value_clip_coef)
        clipped_error = F.huber_loss(clipped_value, batch.return_, reduction="none", delta=delta)
        value_error = torch.max(value_error, clipped_error)
    # Dead agents count here: what their team goes on to earn is what their death was worth.
    value_loss = agent.mean(value_error, torch.ones_like(batch.alive))

    with torch.no_grad():
        approx_kl = agent.mean(ratio - 1 - log_ratio, batch.alive)
        clipfrac = agent.mean((ratio != clipped_ratio).float(), batch.alive)
        stats = [x.mean() for x in (policy_loss, value_loss, entropy, approx_kl, clipfrac)]
    return (policy_loss - args.ent_coef * entropy).sum(), value_loss.sum(), stats


def stack_parameters(network: nn.Module) -> torch.Tensor:
    """Put the parameters of the M networks of a stack into the rows of one tensor (M, P), which Adam steps at once.

    The network's parameters become views of it: what changes the rows changes the network.
    """
    parameters = list(network.parameters())  # each (M, ...)
    rows = torch.cat([p.detach().flatten(1) for p in parameters], dim=1)
    for p, values in zip(parameters, rows.split([p[0].numel() for p in parameters], dim=1)):
        p.data = values.view_as(p)
    return rows


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict:
    """Several epochs of minibatch steps on one rollout; returns the mean diagnostics."""
    num_rows = len(batch.action)
    all_rows = [group["params"][0] for group in optimizer.param_groups]  # actors (M, P), critics (M, P')
    networks = [list(agent.actor.parameters()), list(agent.critic.parameters())]
    all_stats = []
    for _ in range(args.update_epochs):
        minibatches = [batch]
        if args.num_minibatches > 1:
            order = torch.randperm(num_rows, device=batch.action.device)
            parts = [x[order].split(num_rows // args.num_minibatches) for x in batch]
            minibatches = map(Batch._make, zip(*parts))
        for minibatch in minibatches:
            actor_loss, critic_loss, stats = mappo_loss(agent, minibatch, args)
            for rows, parameters, loss in zip(all_rows, networks, (actor_loss, critic_loss)):
                gradient = torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, parameters)], dim=1)
                norm = gradient.norm(dim=1, keepdim=True)  # (M, 1), of each network
                rows.grad = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
                stats.append(norm.mean())
            optimizer.step()
            all_stats.append(torch.stack(stats))
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "actor_gradients", "critic_gradients"]
    metrics = {f"train/{name}": x for name, x in zip(names, torch.stack(all_stats).mean(0).tolist())}
    return_, value = (x[batch.alive > 0] for x in (batch.return_, batch.value))
    metrics["train/explained_variance"] = (1 - (return_ - value).var() / return_.var()).nan_to_num(0, neginf=0)
    return metrics


def check_args(args: Args) -> None:
    """What can be checked without the environment; raises UsageError."""
    check_positive(args, "num_envs", "num_steps", "num_minibatches", "update_epochs", "torch_threads", "hidden_dim")
    check_positive(args, "learning_rate", "critic_learning_rate", "checkpoint_interval", "max_grad_norm", "clip_coef")
    for name in ("gamma", "gae_lambda"):
        check(0 <= getattr(args, name) <= 1, f"--{name.replace('_', '-')} must be in [0, 1], not {getattr(args, name)}")
    for name in ("value_clip_coef", "huber_delta"):
        check(getattr(args, name) >= 0, f"--{name.replace('_', '-')} must be at least 0, not {getattr(args, name)}")
    steps = args.num_envs * args.num_steps
    message = f"{steps} steps of a rollout are not divisible by --num-minibatches {args.num_minibatches}"
    check(steps % args.num_minibatches == 0, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps} steps"
    check(args.total_timesteps >= steps, message)


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_args(args)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)
    envs = make_envs(args, args.num_envs)
    T, N = args.num_steps, args.num_envs
    (A, D), S, K = envs.single_observation_space.shape, envs.state_size, envs.real_actions.shape[1]
    steps_per_update = T * N

    agent = Agent(envs, args).to(device)
    learning_rates = [args.learning_rate, args.critic_learning_rate]
    groups = [
        {"params": [stack_parameters(network)], "lr": lr}
        for network, lr in zip((agent.actor, agent.critic), learning_rates)
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
    rollout = Rollout(
        obs=np.zeros((T, N, A, D), np.float32),
        state=np.zeros((T, N, S), np.float32),
        action_mask=np.zeros((T, N, A, K), bool),
        agent_mask=np.zeros((T, N, A), bool),
        action=np.zeros((T, N, A, K), np.float32),
        reward=np.zeros((T, N, A), np.float32),
        done=np.zeros((T, N, A), bool),
    )

    num_updates = args.total_timesteps // steps_per_update
    with Run(args, __file__, agent=agent, optimizer=optimizer) as run:
        now = envs.reset(seed=args.seed + run.step)
        for iteration in range(run.step // steps_per_update, num_updates):
            if args.anneal_lr:
                for group, lr in zip(optimizer.param_groups, learning_rates):
                    group["lr"] = lr * (1 - iteration / num_updates)

            now = collect(agent, envs, now, rollout, args, run)
            run.step += steps_per_update
            batch = estimate(agent, rollout, *now, args)
            metrics = update(agent, optimizer, batch, args)
            if agent.obs_stats is not None:  # only now: the update needs the statistics that the rollout acted with
                agent.obs_stats.update(rollout.obs.reshape(-1, A, D), rollout.agent_mask.reshape(-1, A))
                agent.state_stats.update(rollout.state.reshape(-1, 1, S), np.ones((steps_per_update, 1), bool))
            run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
