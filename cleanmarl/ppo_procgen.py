"""PPO as in ppo_atari_envpool.py, but for Procgen (Cobbe et al. 2020), games whose levels are generated anew each time.

PPO collects a rollout of T steps from N environments with the current policy, estimates advantages with GAE, and takes
several epochs of minibatch steps on a surrogate objective whose probability ratio is clipped, so that the policy stays
near the one that collected the data. Policy and value function share the residual network of IMPALA. Rewards are scaled
by running statistics, which belong to the agent and are saved with it; the returns it reports are those of the game.

envpool spends a step on each reset: `EnvPool` makes it at once, so that the rollout holds no step that the agent did
not choose. Procgen draws with the system's Qt 5 libraries: apt install libqt5gui5.

Papers: Schulman et al. 2017 (arXiv:1707.06347); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Tags such as `detail core-5` name the details; docs/details.md lists them with the tests that prove them.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.layers import Bf16, compilable, use_bf16
from cleanmarl.run import Run, check_rollout_size

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn


@dataclass
class Args(OnPolicyArgs):
    env_id: str = "StarpilotEasy-v0"
    """any Procgen game of envpool, <Game>Easy-v0, <Game>Hard-v0, ..."""
    total_timesteps: PositiveInt = 25_000_000
    """environment steps of the whole run, all environments together"""

    learning_rate: PositiveFloat = 5e-4
    """learning rate of Adam"""
    num_envs: PositiveInt = 64
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 256
    """T, steps of each environment in one rollout"""
    anneal_lr: bool = False
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.999
    """discount factor"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 8
    """minibatches of one epoch; must divide num_envs * num_steps"""
    update_epochs: PositiveInt = 3
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: PositiveFloat = 0.2
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
    bf16: Bf16 = "off"
    """convolutions in bfloat16: "auto" where the machine is made for it, a GPU or a CPU with AVX512-BF16 or AMX"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with colour pictures (3, 64, 64) as observations; UsageError for other games."""
    message = f"this script needs a Procgen game, such as StarpilotEasy-v0, and {args.env_id} is none"
    check("distribution_mode" in envpool_spec(args.env_id).config._fields, message)
    return EnvPool(args.env_id, num_envs, **options)


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


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    # detail core-2: orthogonal weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """x plus two convolutions of it."""

    def __init__(self, size: int):
        super().__init__()
        first, second = nn.Conv2d(size, size, 3, padding=1), nn.Conv2d(size, size, 3, padding=1)
        self.layers = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Agent(nn.Module):
    """Policy logits (B, K) and state value (B,), for observations (B, 3, 64, 64) uint8."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        num_colours, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
        # detail procgen-1: the residual network of IMPALA, with torch's own initial weights
        layers = []
        for before, after in pairwise([num_colours, 16, 32, 32]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [Residual(after), Residual(after)]
        self.network = nn.Sequential(*layers, nn.Flatten(), nn.ReLU(), nn.Linear(32 * 8 * 8, 256), nn.ReLU())
        self.actor = layer_init(nn.Linear(256, num_actions), std=0.01)  # small: actions about equally likely at first
        self.critic = layer_init(nn.Linear(256, 1), std=1.0)
        self.to(memory_format=torch.channels_last)  # makes convolutions faster
        self.bf16 = use_bf16(args)
        self.return_stats = RunningMeanStd()
        self.running_return = np.zeros(envs.num_envs)  # discounted, of the episodes under way

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # detail atari-9: pixels are scaled to [0, 1]
        # bfloat16 may be rounded otherwise for N rows than for a minibatch: then the first ratio is 1 to two digits
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(obs.to(torch.float32, memory_format=torch.channels_last).div_(255))
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)

    def statistics(self) -> dict[str, RunningMeanStd]:
        return {name.removesuffix("_stats"): x for name, x in vars(self).items() if isinstance(x, RunningMeanStd)}

    def get_extra_state(self) -> dict:  # part of the state_dict: a checkpoint holds the statistics too
        return {name: {key: torch.tensor(x) for key, x in vars(s).items()} for name, s in self.statistics().items()}

    def set_extra_state(self, state: dict) -> None:
        for name, stats in self.statistics().items():
            vars(stats).update({key: x.numpy().copy() for key, x in state[name].items()})

    def scale_reward(self, reward: np.ndarray, done: np.ndarray, gamma: float) -> np.ndarray:
        """The rewards of a step, divided by the deviation of the discounted return so far; done ends the return."""
        self.running_return = self.running_return * gamma + reward
        self.return_stats.update(self.running_return)
        self.running_return[done] = 0
        # detail continuous-8, detail continuous-9: reward scaling, and clipping of the scaled rewards
        return (reward / self.return_stats.std).clip(-10, 10)


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the most probable action, or a sample."""
    device = next(agent.parameters()).device

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = agent(torch.as_tensor(obs, device=device))[0].numpy(force=True)
        return (logits if greedy else logits + gumbel_noise(*logits.shape)).argmax(-1)

    return policy


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits): -log of exponential noise."""
    return -torch.empty(shape).exponential_().log().numpy()


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments, arrays filled in place."""

    obs: np.ndarray  # (T, N, 3, 64, 64) uint8
    action: np.ndarray  # (T, N) int64
    log_prob: np.ndarray  # (T, N) float32, of the policy that acted
    reward: np.ndarray  # (T, N) float32, scaled
    done: np.ndarray  # (T, N) bool, the episode ended with this step
    value: np.ndarray  # (T, N) float32


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

    Values come along with the actions, since both share a network.
    """
    device = next(agent.parameters()).device
    noise = gumbel_noise(*rollout.action.shape, envs.single_action_space.n)
    logits = np.empty_like(noise)  # (T, N, K)
    for t in range(args.num_steps):  # detail core-1: a fixed number of steps, wherever episodes end
        rollout.obs[t] = obs
        logits[t], rollout.value[t] = (x.cpu().numpy() for x in agent(torch.from_numpy(rollout.obs[t]).to(device)))
        rollout.action[t] = (logits[t] + noise[t]).argmax(-1)
        obs, reward, termination, truncation, info = envs.step(rollout.action[t])
        rollout.done[t] = termination | truncation
        rollout.reward[t] = agent.scale_reward(reward, rollout.done[t], args.gamma)
        if "_episode" in info:
            run.log_episodes(info)
        if args.time_limit_bootstrap:
            for n in np.flatnonzero(truncation & ~termination):
                final_obs = torch.as_tensor(info["final_obs"][n], device=device)
                rollout.reward[t, n] += args.gamma * agent(final_obs[None])[1].item()
    run.check_rollout(rollout, obs)
    log_prob = torch.from_numpy(logits).log_softmax(-1).gather(-1, torch.from_numpy(rollout.action)[..., None])
    rollout.log_prob[:] = log_prob.squeeze(-1)
    return obs


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (B, ...); B = T * N, or a minibatch of it."""

    obs: torch.Tensor  # (B, 3, 64, 64) uint8
    action: torch.Tensor  # (B,)
    log_prob: torch.Tensor  # (B,) of the policy that acted
    advantage: torch.Tensor  # (B,)
    return_: torch.Tensor  # (B,) targets of the value function
    value: torch.Tensor  # (B,) what it said before the update


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, args: Args) -> Batch:
    """Advantages and returns of a rollout; next_obs (N, 3, 64, 64) is the observation that follows it."""
    device = next(agent.parameters()).device
    _, next_value = agent(torch.as_tensor(next_obs, device=device))
    advantage = gae(rollout.reward, rollout.value, next_value.cpu().numpy(), rollout.done, args.gamma, args.gae_lambda)
    arrays = rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage
    obs, action, log_prob, value, advantage = (torch.from_numpy(x).to(device) for x in arrays)
    return_ = advantage + value  # detail core-5: TD(lambda) returns
    return Batch(*(x.flatten(0, 1) for x in (obs, action, log_prob, advantage, return_, value)))


@compilable
def ppo_loss(agent: Agent, batch: Batch, clip_coef: float, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one minibatch, and its diagnostics by name."""
    logits, new_value = agent(batch.obs)
    log_probs = logits.log_softmax(-1)  # (B, K)
    log_ratio = log_probs.gather(-1, batch.action[:, None]).squeeze(-1) - batch.log_prob
    ratio = log_ratio.exp()

    # detail core-7: advantages are normalised per minibatch, not per rollout
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    # detail core-8: clipped surrogate objective
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()

    # detail core-9: the change of the value is clipped likewise
    value_error = (new_value - batch.return_).square()
    if args.clip_vloss:
        clipped_value = batch.value + (new_value - batch.value).clamp(-clip_coef, clip_coef)
        value_error = torch.max(value_error, (clipped_value - batch.return_).square())
    value_loss = 0.5 * value_error.mean()

    # detail core-10: one loss for policy, value and entropy bonus
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
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
        obs=np.zeros((T, N, *envs.single_observation_space.shape), envs.single_observation_space.dtype),
        action=np.zeros((T, N), np.int64),
        log_prob=np.zeros((T, N), np.float32),
        reward=np.zeros((T, N), np.float32),
        done=np.zeros((T, N), bool),
        value=np.zeros((T, N), np.float32),
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
