"""MASAC as in masac.py, but for continuous actions: normal samples, squashed by tanh.

Every agent maximises its reward and the entropy of its policy, weighted by a temperature. A critic sees the global
state and the actions of all agents, Q(s, a_1..a_A). The actor climbs the gradient of the critic's value, less its own
log-probability times the temperature, with respect to its own sample; the others' actions are the buffer's. Targets
take samples of the present policies: there are target networks of the critics only. Of two critics the smaller value
counts. The temperature of each agent follows its entropy, which is to be a number for each component of its action.

All agents have one actor, which tells them apart by a one-hot id; with a team's reward they have one pair of critics,
else each has its own. Policies act in a unit of their own, in which every action reaches from -1 to 1; environments
get it in theirs.

Papers: Haarnoja et al. 2018 (arXiv:1812.05905); Lowe et al. 2017 (arXiv:1706.02275), for the critics.
"""

import copy
import math
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cleanmarl.cli import NonNegativeInt, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, StackedLinear, as_numpy, clip_grads_
from cleanmarl.run import EVAL_SEED, Run, check_replay_size

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval, Lt


@dataclass
class Args(RunArgs):
    eval_episodes: int = 100
    save_buffer: bool = True
    """keep the replay buffer in checkpoints; without it a resumed run fills a new one first"""
    log_every: PositiveInt = 10
    """episodes between two points of the curves"""
    eval_steps: NonNegativeInt = 50
    """episodes between two evaluations, without noise in separate environments; 0 for none"""
    num_eval_ep: PositiveInt = 5
    """episodes of each of these evaluations"""
    env_id: str = "mpe/simple_spread_v3?continuous_actions=True"
    """family/name of a multi-agent environment with continuous actions"""
    total_timesteps: PositiveInt = 1_000_000
    """environment steps of the whole run, however many agents act in each; the last episodes are played to their end"""

    agent_ids: bool = True
    """add a one-hot id to the observation: without it the agents' common actor cannot tell them apart"""
    num_envs: PositiveInt = 4
    """N, environments stepped side by side"""
    individual_critics: bool | None = None
    """a critic for each agent's own reward, or one for the mean reward; by default one if the reward is the team's"""
    gamma: UnitFloat = 0.95
    """discount factor"""
    target_entropy: Annotated[float, Lt(0.69)] = -1.0
    """entropy that the temperature aims at, for each component of an action from -1 to 1 (if uniform: log 2)"""
    buffer_size: PositiveInt = 5000
    """episodes in the replay buffer"""
    batch_size: PositiveInt = 10
    """episodes in a batch"""
    normalize_reward: bool = False
    """normalise rewards by the mean and the deviation of those in the replay buffer"""
    actor_hidden_dim: PositiveInt = 32
    """units of a hidden layer of the actor"""
    actor_num_layers: NonNegativeInt = 1
    """hidden layers of the actor after the first one"""
    critic_hidden_dim: PositiveInt = 128
    """units of a hidden layer of a critic"""
    critic_num_layers: NonNegativeInt = 1
    """hidden layers of a critic after the first one"""
    epochs: PositiveInt = 4
    """gradient updates after each round of N episodes, each with a batch of its own"""
    optimizer: Literal["Adam", "AdamW", "SGD"] = "Adam"
    """optimizer of the actor, the temperatures and the critics"""
    learning_rate_actor: PositiveFloat = 1e-3
    """learning rate of the actor and of the temperatures"""
    learning_rate_critic: PositiveFloat = 1e-3
    """learning rate of the critics"""
    target_network_update_freq: PositiveInt = 1
    """updates between two steps of the target networks"""
    polyak: Annotated[float, Interval(gt=0, le=1)] = 0.01
    """how far a step takes the target networks towards the others"""
    clip_gradients: float = -1.0
    """largest norm of a network's gradient; 0 or less for any"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with continuous actions."""
    return make(args.env_id, num_envs, discrete=False, **options)


class Agent(nn.Module):
    """The policy of all agents, one network that sees an agent's observation and its id, and their temperatures."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        (A, K), hidden = envs.real_actions.shape, args.actor_hidden_dim
        obs_size = envs.single_observation_space.shape[-1] + (A if args.agent_ids else 0)
        layers = [AgentIds(A) if args.agent_ids else nn.Identity(), nn.Linear(obs_size, hidden), nn.ReLU()]
        for _ in range(args.actor_num_layers):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.actor = nn.Sequential(*layers, nn.Linear(hidden, 2 * K))  # means and log standard deviations
        self.log_temperature = nn.Parameter(torch.zeros(A))
        self.real_actions = envs.real_actions.astype(np.float32)  # actions that an agent does not have stay 0
        self.register_buffer("real", torch.from_numpy(self.real_actions), persistent=False)
        space = envs.single_action_space
        one_sided = (np.isfinite(space.low) != np.isfinite(space.high))[envs.real_actions]
        message = f"{args.env_id} has actions with a bound on one side only, which a policy that ends in tanh cannot"
        check(not one_sided.any(), f"{message} reach: give them two, or none")
        is_bounded = np.isfinite(space.high - space.low)  # where it is not, both units are the same
        low, high = np.where(is_bounded, space.low, -1), np.where(is_bounded, space.high, 1)
        self.middle, self.half_range = (high + low) / 2, (high - low) / 2
        self.low, self.high = space.low, space.high

    @property
    def temperature(self) -> torch.Tensor:
        """The weight (A,) of each agent's entropy."""
        return self.log_temperature.exp()

    def normal(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation (..., A, K) of actions before tanh, of an actor's output (..., A, 2 K)."""
        mean, log_std = output.chunk(2, dim=-1)
        return mean, log_std.clamp(-20, 2).exp()

    def sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (B, T, A, K) in [-1, 1] and their log-probabilities (B, T, A); obs (B, T, A, D)."""
        mean, std = self.normal(self.actor(obs.flatten(0, 1)).unflatten(0, obs.shape[:2]))
        noise = torch.randn_like(mean)
        x = mean + std * noise
        log_prob = -0.5 * noise.square() - std.log() - 0.5 * math.log(2 * math.pi)
        # detail masac-6: tanh changes the density, by its slope: log(1 - tanh(x)^2), written stably
        log_prob = log_prob - 2 * (math.log(2) - x - F.softplus(-2 * x))
        return x.tanh() * self.real, (log_prob * self.real).sum(-1)

    def act(self, output: np.ndarray, greedy: bool) -> np.ndarray:
        """Actions (N, A, K) in [-1, 1] of an actor's output (N, A, 2 K): samples, or what the means become."""
        mean, std = self.normal(torch.from_numpy(output))
        return (mean if greedy else mean + std * torch.randn_like(mean)).tanh().numpy() * self.real_actions

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """Actions (N, A, K) in the unit of the environment."""
        action = (self.middle + self.half_range * action).astype(np.float32)
        return action.clip(self.low, self.high) * self.real_actions  # roundings


class Critic(nn.Module):
    """M pairs of centralised critics: M = A, one for each agent's own reward, or M = 1 for that of the team."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        M = envs.num_agents if args.individual_critics else 1
        size = envs.state_size + envs.real_actions.size
        self.critic, self.critic2 = (self.network(M, size, args) for _ in range(2))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))  # here, so that checkpoints have it

    @staticmethod
    def network(M: int, size: int, args: Args) -> nn.Sequential:
        """M networks from what a critic sees to a value."""
        hidden = args.critic_hidden_dim
        layers = [StackedLinear(M, size, hidden), nn.ReLU()]
        for _ in range(args.critic_num_layers):
            layers += [StackedLinear(M, hidden, hidden), nn.ReLU()]
        return nn.Sequential(*layers, StackedLinear(M, hidden, 1))

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values (2, B, T, M), by both critics, of what all agents do, action (B, T, 1, A, K), in a state (B, T, S).

        Or (2, B, T, A): agent i's values of a joint action i of its own, action (B, T, A, A, K).
        """
        state = state[:, :, None].expand(-1, -1, action.shape[2], -1)
        x = torch.cat([state, action.flatten(3)], dim=-1)  # detail maddpg-1: a critic sees the state and all actions
        x = x.flatten(0, 1)
        return torch.stack([self.critic(x), self.critic2(x)]).squeeze(-1).unflatten(1, state.shape[:2])


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: what their means become, or samples."""
    actor = as_numpy(agent.actor)

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        return agent.env_action(agent.act(actor(obs), greedy))

    return policy


class Batch(NamedTuple):
    """B episodes, padded to the longest, of T steps, as the networks learn from them; without the B, one in NumPy.

    What is observed has one more row: what came after the last step.
    """

    obs: torch.Tensor  # (B, T + 1, A, D)
    state: torch.Tensor  # (B, T + 1, S)
    action: torch.Tensor  # (B, T, A, K) in [-1, 1]
    alive: torch.Tensor  # (B, T, A) 1.0 for living agents, 0.0 for the rest and for the padding
    survive: torch.Tensor  # (B, T, A) the same after the step
    reward: torch.Tensor  # (B, T, M) that each critic learns from
    weight: torch.Tensor  # (B, T, M) 1.0 where it does
    goes_on: torch.Tensor  # (B, T, M) 0.0 if no value follows: a termination, the agent's death, or the last if M = 1


class Buffer:
    """The last `buffer_size` episodes, and those that are being played in the N environments."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        self.team_reward, self.individual_critics = envs.team_reward, args.individual_critics
        self.normalize_reward = args.normalize_reward
        self.episodes = deque(maxlen=args.buffer_size)  # detail maddpg-6: whole episodes, the oldest is forgotten
        self.playing = [[] for _ in range(envs.num_envs)]  # the steps so far of each environment's episode
        self.moments = 0.0  # count, sum and sum of squares (3, M) of all rewards that critics learn from

    def add(self, obs, info, action, reward, termination, truncation, next_info) -> None:
        """One step of every environment, action (N, A, K), and the info after it; see cleanmarl.envs."""
        step = (obs, info["state"], info["agent_mask"], action, reward)
        for i, playing in enumerate(self.playing):
            playing.append([x[i].copy() for x in step])
        for i in np.flatnonzero(termination | truncation):
            # detail maddpg-7: agents live on after a truncation, as its final mask says, and none after a termination
            survivors = next_info["final_agent_mask"][i] & ~termination[i]
            last = next_info["final_obs"][i], next_info["final_state"][i]
            self.playing[i].append([*last, survivors, action[i], reward[i]])  # to_episode drops these two
            self.append(self.to_episode(*map(np.array, zip(*self.playing[i]))))
            self.playing[i] = []

    def to_episode(self, obs, state, agent_mask, action, reward) -> Batch:
        """An episode of T steps; arrays (T + 1, ...), agent_mask (T + 1, A) bool, reward (T + 1, A)."""
        alive, survive, action, reward = agent_mask[:-1], agent_mask[1:], action[:-1], reward[:-1]
        weight, goes_on, action = alive, alive & survive, action * alive[..., None]  # the dead do nothing
        if not self.individual_critics:
            reward, weight = reward_of_team(reward, alive, self.team_reward), alive.any(-1, keepdims=True)
            goes_on = weight & survive.any(-1, keepdims=True)
        floats = action, alive, survive, reward, weight, goes_on
        return Batch(obs, state, *(x.astype(np.float32) for x in floats))

    def append(self, episode: Batch) -> None:
        if len(self.episodes) == self.episodes.maxlen:
            self.moments = self.moments - reward_moments(self.episodes[0])
        self.episodes.append(episode)
        self.moments = self.moments + reward_moments(episode)

    def sample(self, batch_size: int, device: torch.device) -> Batch:
        """Episodes drawn with replacement."""
        index = torch.randint(len(self.episodes), (batch_size,)).tolist()
        batch = Batch(*map(padded, zip(*(self.episodes[i] for i in index))))
        if self.normalize_reward:
            mean, std = self.reward_statistics()
            batch = batch._replace(reward=((batch.reward - mean) / (std + 1e-6)).astype(np.float32))
        return Batch(*(torch.from_numpy(x).to(device) for x in batch))

    def reward_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation (M,) of the rewards in the buffer, as the critics see them."""
        count, total, squares = self.moments
        mean = total / count.clip(1)
        return mean, np.sqrt((squares / count.clip(1) - mean**2).clip(0))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The episodes, one after the other. Those being played go with the environments: see `run.start`."""
        lengths = np.array([[len(x) for x in episode] for episode in self.episodes], np.int64)  # of each field
        state = {"moments": np.asarray(self.moments), "lengths": lengths}
        state |= dict(zip(Batch._fields, map(np.concatenate, zip(*self.episodes))))
        return {key: torch.from_numpy(x) for key, x in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        moments, lengths, *fields = (x.numpy() for x in state.values())
        for episode in zip(*(np.split(x, np.cumsum(rows)[:-1]) for x, rows in zip(fields, zip(*lengths), strict=True))):
            self.append(Batch(*(x.copy() for x in episode)))  # a view would keep the memory of all
        self.moments = moments  # to the last digit: added up in another order they would differ


def padded(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """B arrays (T, ...) as one (B, T, ...), with zeros after the shorter ones."""
    x = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(x, arrays):
        row[: len(array)] = array
    return x


def reward_moments(episode: Batch) -> np.ndarray:
    """Count, sum and sum of squares (3, M) of the rewards that each critic learns from."""
    reward = episode.reward.astype(np.float64)
    return np.array([(episode.weight * reward**power).sum(0) for power in range(3)])


def reward_of_team(reward: np.ndarray, alive: np.ndarray, team_reward: bool) -> np.ndarray:
    """What the team earns (..., 1): what each of its living agents does, else the mean of what all A have of their own.

    reward, alive (..., A). The mean of the living alone would rise with the death of an agent that earns little.
    """
    earners = alive.sum(-1, keepdims=True).clip(1) if team_reward else alive.shape[-1]
    return (reward * alive).sum(-1, keepdims=True) / earners


def collect(agent: Agent, envs: MultiAgentVectorEnv, now, buffer: Buffer, run: Run):
    """Play on to the next multiple of N episodes, from `now`, the (obs, info) before it; returns that after it."""
    actor = as_numpy(agent.actor)
    goal = (run.num_episodes // envs.num_envs + 1) * envs.num_envs
    obs, info = now
    while run.num_episodes < goal:
        action = agent.act(actor(obs), greedy=False)
        next_obs, reward, termination, truncation, next_info = envs.step(agent.env_action(action))
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        run.step += envs.num_envs
        if "_episode" in next_info:
            run.log_episodes(next_info, buffer.episodes)  # looked through for NaN
        obs, info = next_obs, next_info
    return obs, info


@torch.no_grad()
def critic_targets(agent: Agent, target_critic: Critic, batch: Batch, gamma: float) -> torch.Tensor:
    """What the critics learn (B, T, M): r + gamma V(s'), where V is min Q'(s', a') - temperature log pi(a'|o')."""
    next_action, log_prob = agent.sample(batch.obs[:, 1:])
    next_action = (next_action * batch.survive[..., None])[:, :, None]  # (B, T, 1, A, K)
    q = target_critic(batch.state[:, 1:], next_action).amin(0)  # detail masac-2: the smaller of two values
    entropy = -agent.temperature * log_prob * batch.survive  # detail masac-3: the entropy belongs to the value
    if q.shape[-1] == 1:  # a team's that of all who live
        entropy = entropy.sum(-1, keepdim=True)
    return batch.reward + gamma * batch.goes_on * (q + entropy)


def critic_loss(critic: Critic, batch: Batch, target: torch.Tensor) -> torch.Tensor:
    """Each mean squared error (M,), the sum of both critics', over the steps they learn from."""
    error = critic(batch.state[:, :-1], batch.action[:, :, None]) - target  # (2, B, T, M)
    # detail maddpg-6: padding weighs nothing
    return (error.square() * batch.weight).sum((0, 1, 2)) / batch.weight.sum((0, 1)).clamp(min=1)


def actor_loss(agent: Agent, critic: Critic, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the living agents' mean soft value beside the others' actions of the buffer; and entropies (B, T, A)."""
    own_action, log_prob = agent.sample(batch.obs[:, :-1])
    is_own = torch.eye(own_action.shape[2], dtype=torch.bool, device=own_action.device)[..., None]  # (A, A, 1)
    # detail maddpg-3: joint action i (B, T, A, A, K) is that of the buffer, but for agent i's own
    action = torch.where(is_own, own_action[:, :, None], batch.action[:, :, None])
    q = critic(batch.state[:, :-1], action).amin(0)  # detail masac-2: here, too; (B, T, A)
    q = q - agent.temperature.detach() * log_prob
    return -(q * batch.alive).sum() / batch.alive.sum().clamp(min=1), -log_prob.detach()


def temperature_loss(agent: Agent, entropy: torch.Tensor, batch: Batch, target_entropy: float) -> torch.Tensor:
    """What lowers the temperature of agents with an entropy (B, T, A) above their target, and raises that of others."""
    # detail masac-5: the target is in proportion to the components of an agent's actions, for the living alone
    target = target_entropy * agent.real.sum(-1)
    return (agent.temperature * (entropy - target) * batch.alive).sum() / batch.alive.sum().clamp(min=1)


def descend(loss: torch.Tensor, network: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> dict:
    """One step of the network down the gradient of the loss; returns its children's norms before clipping."""
    optimizer.zero_grad()
    learned = [p for p in network.parameters() if p.requires_grad]
    if learned:  # none, if a copy freezes the network
        loss.backward(inputs=learned)  # the actor's loss goes through the critics and leaves them alone
    norms = clip_grads_(network, max_norm if max_norm > 0 else math.inf)
    optimizer.step()
    return norms


def update(agent: Agent, critic: Critic, target_critic, optimizers, batch, args: Args) -> dict[str, torch.Tensor]:
    """One step of the critics, then one of actor and temperatures; optimizers are those of (agent, critics)."""
    target = critic_targets(agent, target_critic, batch, args.gamma)
    critic_losses = critic_loss(critic, batch, target)
    # The critics share no parameter: the gradient of their sum is each one's gradient of its own loss.
    norms = descend(critic_losses.sum(), critic, optimizers[1], args.clip_gradients)
    loss, entropy = actor_loss(agent, critic, batch)
    temperature = agent.temperature.mean().detach()
    total = loss + temperature_loss(agent, entropy, batch, args.target_entropy)
    norms |= descend(total, agent, optimizers[0], args.clip_gradients)
    critic.num_updates += 1
    return {
        "train/critic_loss": critic_losses.detach().mean(),
        "train/critic_gradients": norms["critic"],
        "train/actor_loss": loss.detach(),
        "train/actor_gradients": norms["actor"],
        "train/entropy": (entropy * batch.alive).sum() / batch.alive.sum().clamp(min=1),
        "train/temperature": temperature,
        "train/num_updates": critic.num_updates,
    }


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """Move the target's parameters the share `polyak` of the way to the network's; its buffers become the network's."""
    for ours, theirs in zip(target.parameters(), network.parameters()):
        ours.lerp_(theirs, polyak)  # detail maddpg-4: targets follow slowly
    for ours, theirs in zip(target.buffers(), network.buffers()):
        ours.copy_(theirs)


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    message = f"--batch-size {args.batch_size} episodes do not fit into --buffer-size {args.buffer_size}"
    check(args.batch_size <= args.buffer_size, f"{message}; lower the one or raise the other")
    device = set_up(args)
    envs, eval_envs = make_envs(args, args.num_envs), make_envs(args, args.num_eval_ep)
    if args.individual_critics is None:
        args = replace(args, individual_critics=not envs.team_reward)  # for the run folder

    agent, critic = Agent(envs, args).to(device), Critic(envs, args).to(device)
    target_critic = copy.deepcopy(critic)
    optimizer_class = getattr(torch.optim, args.optimizer)
    actor_optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate_actor, fused=True)
    critic_optimizer = optimizer_class(critic.parameters(), lr=args.learning_rate_critic, fused=True)
    optimizers = actor_optimizer, critic_optimizer
    check_replay_size(envs, args)
    buffer = Buffer(envs, args)

    modules = {"agent": agent, "critic": critic, "target_critic": target_critic}
    modules |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    modules |= {"buffer": buffer} if args.save_buffer else {}
    with Run(args, __file__, **modules) as run:
        *now, buffer.playing = run.start(envs, buffer.playing)
        metrics = {}
        while run.step < args.total_timesteps:
            num_episodes = run.num_episodes
            now = collect(agent, envs, now, buffer, run)
            for _ in range(args.epochs if len(buffer.episodes) >= args.batch_size else 0):
                batch = buffer.sample(args.batch_size, device)
                metrics = update(agent, critic, target_critic, optimizers, batch, args)
                if critic.num_updates % args.target_network_update_freq == 0:
                    soft_update(target_critic, critic, args.polyak)
            if args.eval_steps and run.num_episodes // args.eval_steps > num_episodes // args.eval_steps:
                seed = args.seed + EVAL_SEED + run.num_episodes
                run.write(run.play(eval_envs, make_policy(agent), args.num_eval_ep, seed))
            is_due = run.num_episodes // args.log_every > num_episodes // args.log_every
            run.log(metrics, is_due or run.step >= args.total_timesteps)
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_eval_ep)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_eval_ep)
    envs.close()
    eval_envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
