"""MADDPG as in maddpg_multienvs.py, but the actor is an LSTM, which remembers what an agent no longer observes.

A critic sees the global state and the actions of all agents, Q(s, a_1..a_A); an actor sees what its agent observes.
Whole episodes are kept in a replay buffer. Critics learn by temporal differences, with target networks. The actor
climbs the critic's gradient with respect to its own action, while the others' actions are those of the buffer. Discrete
actions are Gumbel-Softmax samples, hard ones to act and to train critics, soft ones to train the actor. All agents have
one actor, which tells them apart by a one-hot id; with a team's reward they have one critic, else each has its own.
Batches are whole episodes: the actor and the target actor replay them from the first observation on, gradients go back
at most `tbptt` steps, and an update is one step of the optimizer, however long the episodes are.

An environment that ends an episode starts the next one at once, with an LSTM state of zeros, while the others go on
with theirs: none of them waits, and none sees another's state.

Papers: Lowe et al. 2017 (arXiv:1706.02275); Jang et al. 2017, "Categorical reparameterization with Gumbel-Softmax".
"""

import copy
import math
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cleanmarl.cli import NonNegativeInt, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.layers import AgentIds, Recurrent, StackedLinear, StackedLSTM, as_numpy, clip_grads_
from cleanmarl.run import EVAL_SEED, Run, check_replay_size

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from annotated_types import Interval


@dataclass
class Args(RunArgs):
    eval_episodes: int = 100
    save_buffer: bool = True
    """keep the replay buffer in checkpoints; without it a resumed run fills a new one first"""
    log_every: PositiveInt = 10
    """episodes between two points of the curves"""
    eval_steps: NonNegativeInt = 50
    """episodes between two evaluations, with the most probable actions in separate environments; 0 for none"""
    num_eval_ep: PositiveInt = 5
    """episodes of each of these evaluations"""
    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
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
    buffer_size: PositiveInt = 5000
    """episodes in the replay buffer"""
    batch_size: PositiveInt = 10
    """episodes in a batch"""
    normalize_reward: bool = False
    """normalise rewards by the mean and the deviation of those in the replay buffer"""
    actor_hidden_dim: PositiveInt = 32
    """units of a hidden layer of the actor"""
    actor_num_layers: PositiveInt = 1
    """LSTM layers of the actor, after the first, linear one"""
    critic_hidden_dim: PositiveInt = 128
    """units of a hidden layer of a critic"""
    critic_num_layers: NonNegativeInt = 1
    """hidden layers of a critic after the first one"""
    epochs: PositiveInt = 4
    """gradient updates after each round of N episodes, each with a batch of its own"""
    optimizer: Literal["Adam", "AdamW", "SGD"] = "Adam"
    """optimizer of the actor and of the critics"""
    learning_rate_actor: PositiveFloat = 3e-4
    """learning rate of the actor"""
    learning_rate_critic: PositiveFloat = 3e-4
    """learning rate of the critics"""
    target_network_update_freq: PositiveInt = 1
    """updates between two steps of the target networks"""
    polyak: Annotated[float, Interval(gt=0, le=1)] = 0.01
    """how far a step takes the target networks towards the others"""
    reg: UnitFloat = 1e-3
    """weight of the mean squared logit in the actor's loss, against an actor that is too sure; 0 for none"""
    clip_gradients: float = -1.0
    """largest norm of a network's gradient; 0 or less for any"""
    tbptt: PositiveInt = 10
    """steps that the actor's gradient goes back in time: episodes are cut into chunks of this length"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run, with discrete actions."""
    return make(args.env_id, num_envs, discrete=True, **options)


class Agent(nn.Module):
    """The policy of all agents: one network that sees an agent's observations, one by one, and its one-hot id."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        (A, K), hidden = envs.real_actions.shape, args.actor_hidden_dim
        obs_size = envs.single_observation_space.shape[-1] + (A if args.agent_ids else 0)
        layers = [AgentIds(A) if args.agent_ids else nn.Identity(), nn.Linear(obs_size, hidden), nn.ReLU()]
        for _ in range(args.actor_num_layers):
            layers += [StackedLSTM(1, hidden, hidden)]
        self.actor = Recurrent(*layers, nn.ReLU(), nn.Linear(hidden, K))
        self.tbptt = args.tbptt

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, A, K) of episodes from their first step on, illegal ones far below.

        obs (B, T, A, D), action_mask (B, T, A, K), alive (B, T, A): an agent that comes back from death remembers
        nothing. No gradient goes from one chunk of tbptt steps to the one before.
        """
        B, T, A, _ = obs.shape
        memory, outputs = obs.new_zeros(B, A, self.actor.memory_size), []
        comes_back = (alive[:, 1:] > alive[:, :-1]).any()  # if nobody does, torch's own, faster LSTM is enough
        for seen, living in zip(*(x.swapaxes(0, 1).split(self.tbptt) for x in (obs, alive))):
            forget = living.flatten(0, 1) == 0 if comes_back else None
            output, memory = self.actor(seen.flatten(0, 1), memory.detach(), forget, last=True)  # (tbptt * B, A, K)
            memory = memory * living[-1, ..., None]
            outputs.append(output)
        return torch.cat(outputs).unflatten(0, (T, B)).swapaxes(0, 1).masked_fill(~action_mask, -1e8)


class Critic(nn.Module):
    """M centralised critics: M = A, one for each agent's own reward, or M = 1 for that of the team."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        M, hidden = envs.num_agents if args.individual_critics else 1, args.critic_hidden_dim
        layers = [StackedLinear(M, envs.state_size + envs.real_actions.size, hidden), nn.ReLU()]
        for _ in range(args.critic_num_layers):
            layers += [StackedLinear(M, hidden, hidden), nn.ReLU()]
        self.critic = nn.Sequential(*layers, StackedLinear(M, hidden, 1))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))  # here, so that checkpoints have it

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Values (B, T, M) of what all agents do, action (B, T, 1, A, K) one-hot, in a state (B, T, S).

        Or (B, T, A): agent i's values of a joint action i of its own, action (B, T, A, A, K).
        """
        state = state[:, :, None].expand(-1, -1, action.shape[2], -1)
        x = torch.cat([state, action.flatten(3)], dim=-1)  # detail maddpg-1: a critic sees the state and all actions
        return self.critic(x.flatten(0, 1)).view(*state.shape[:2], -1)


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a sample of softmax(logits): -log of exponential noise."""
    return -torch.empty(shape).exponential_().log().numpy()


def first_memory(agent: Agent, num_envs: int, num_agents: int) -> np.ndarray:
    """What the actor remembers before anything was seen, (N, A, memory size)."""
    return np.zeros((num_envs, num_agents, agent.actor.memory_size), np.float32)


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples."""
    actor, memory = as_numpy(agent.actor), None

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        nonlocal memory
        if done.all():  # at the beginning, when the number of environments may be another one
            memory = first_memory(agent, *obs.shape[:2])
        memory[done] = 0
        logits, memory = actor(obs, memory)
        memory[~info["agent_mask"]] = 0
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


class Batch(NamedTuple):
    """B episodes, padded to the longest, of T steps, as the networks learn from them; without the B, one in NumPy.

    What is observed has one more row: what came after the last step.
    """

    obs: torch.Tensor  # (B, T + 1, A, D)
    state: torch.Tensor  # (B, T + 1, S)
    action_mask: torch.Tensor  # (B, T + 1, A, K) bool, True = legal
    action: torch.Tensor  # (B, T, A, K) one-hot
    alive: torch.Tensor  # (B, T, A) 1.0 for living agents, 0.0 for the rest and for the padding
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
        step = (obs, info["state"], info["action_mask"], info["agent_mask"], action, reward)
        for i, playing in enumerate(self.playing):
            playing.append([x[i].copy() for x in step])
        for i in np.flatnonzero(termination | truncation):
            # detail maddpg-7: agents live on after a truncation, as its final mask says, and none after a termination
            survivors = next_info["final_agent_mask"][i] & ~termination[i]
            last = [next_info[key][i] for key in ("final_obs", "final_state", "final_action_mask")]
            self.playing[i].append([*last, survivors, action[i], reward[i]])  # to_episode drops these two
            self.append(self.to_episode(*map(np.array, zip(*self.playing[i]))))
            self.playing[i] = []

    def to_episode(self, obs, state, action_mask, agent_mask, action, reward) -> Batch:
        """An episode of T steps; arrays (T + 1, ...), agent_mask (T + 1, A) bool, reward (T + 1, A)."""
        alive, survive, action, reward = agent_mask[:-1], agent_mask[1:], action[:-1], reward[:-1]
        weight, goes_on = alive, alive & survive
        if not self.individual_critics:
            reward, weight = reward_of_team(reward, alive, self.team_reward), alive.any(-1, keepdims=True)
            goes_on = weight & survive.any(-1, keepdims=True)
        return Batch(obs, state, action_mask, *(x.astype(np.float32) for x in (action, alive, reward, weight, goes_on)))

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
    """Play on to the next multiple of N episodes, from `now`, (obs, info, memory) before it; returns those after it."""
    actor = as_numpy(agent.actor)
    goal = (run.num_episodes // envs.num_envs + 1) * envs.num_envs
    one_hot = np.eye(envs.real_actions.shape[1], dtype=np.float32)
    obs, info, memory = now
    while run.num_episodes < goal:
        logits, memory = actor(obs, memory)
        logits = logits + gumbel_noise(*info["action_mask"].shape)
        action = np.where(info["action_mask"], logits, -np.inf).argmax(-1)  # detail maddpg-2: hard samples act
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, one_hot[action], reward, termination, truncation, next_info)
        memory[~info["agent_mask"]] = 0  # detail recurrent-1: the dead forget, and an episode begins with nothing
        memory[termination | truncation] = 0
        run.step += envs.num_envs
        if "_episode" in next_info:
            run.log_episodes(next_info, buffer.episodes)  # looked through for NaN
        obs, info = next_obs, next_info
    return obs, info, memory


@torch.no_grad()
def critic_targets(target_agent: Agent, target_critic: Critic, batch: Batch, gamma: float) -> torch.Tensor:
    """What the critics learn (B, T, M): r + gamma Q'(s', a'), where a' are hard samples of the target policy."""
    alive = F.pad(batch.alive, (0, 0, 0, 1), value=1.0)  # the dead may be back in the last observation
    logits = target_agent.logits(batch.obs, batch.action_mask, alive)  # it sees the first observation too
    next_action = F.gumbel_softmax(logits[:, 1:], hard=True)  # detail maddpg-5: samples of the target policy
    return batch.reward + gamma * batch.goes_on * target_critic(batch.state[:, 1:], next_action[:, :, None])


def critic_loss(critic: Critic, batch: Batch, target: torch.Tensor) -> torch.Tensor:
    """Each critic's mean squared error (M,) over the steps it learns from."""
    error = critic(batch.state[:, :-1], batch.action[:, :, None]) - target
    # detail maddpg-6: padding weighs nothing
    return (error.square() * batch.weight).sum((0, 1)) / batch.weight.sum((0, 1)).clamp(min=1)


def actor_loss(agent: Agent, critic: Critic, batch: Batch, reg: float = 0.0) -> torch.Tensor:
    """Minus the mean value of the living agents' own soft samples; all other actions are those of the buffer."""
    logits = agent.logits(batch.obs[:, :-1], batch.action_mask[:, :-1], batch.alive)
    own_action = F.gumbel_softmax(logits, hard=False)  # detail maddpg-2: soft samples train the actor
    is_own = torch.eye(own_action.shape[2], dtype=torch.bool, device=own_action.device)[..., None]  # (A, A, 1)
    # detail maddpg-3: joint action i (B, T, A, A, K) is that of the buffer, but for agent i's own
    action = torch.where(is_own, own_action[:, :, None], batch.action[:, :, None])
    q = critic(batch.state[:, :-1], action)  # (B, T, A)
    q = q - reg * (logits * batch.action_mask[:, :-1]).square().mean(-1)  # detail maddpg-8: large logits cost
    return -(q * batch.alive).sum() / batch.alive.sum().clamp(min=1)


def descend(loss: torch.Tensor, network: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> dict:
    """One step of the network down the gradient of the loss; returns its children's norms before clipping."""
    optimizer.zero_grad()
    learned = [p for p in network.parameters() if p.requires_grad]
    if learned:  # none, if a copy freezes the network
        loss.backward(inputs=learned)  # the actor's loss goes through the critics and leaves them alone
    norms = clip_grads_(network, max_norm if max_norm > 0 else math.inf)
    optimizer.step()
    return norms


def update(agent: Agent, critic: Critic, targets, optimizers, batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """One step of the critics, then one of the actor; targets and optimizers are those of (actor, critics)."""
    target = critic_targets(*targets, batch, args.gamma)
    critic_losses = critic_loss(critic, batch, target)
    # The critics share no parameter: the gradient of their sum is each one's gradient of its own loss.
    norms = descend(critic_losses.sum(), critic, optimizers[1], args.clip_gradients)
    loss = actor_loss(agent, critic, batch, args.reg)
    norms |= descend(loss, agent, optimizers[0], args.clip_gradients)
    critic.num_updates += 1
    return {
        "train/critic_loss": critic_losses.detach().mean(),
        "train/critic_gradients": norms["critic"],
        "train/actor_loss": loss.detach(),
        "train/actor_gradients": norms["actor"],
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
    target_agent, target_critic = copy.deepcopy(agent), copy.deepcopy(critic)
    optimizer_class = getattr(torch.optim, args.optimizer)
    actor_optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate_actor, fused=True)
    critic_optimizer = optimizer_class(critic.parameters(), lr=args.learning_rate_critic, fused=True)
    targets, optimizers = (target_agent, target_critic), (actor_optimizer, critic_optimizer)
    check_replay_size(envs, args)
    buffer = Buffer(envs, args)

    modules = {"agent": agent, "critic": critic, "target_agent": target_agent, "target_critic": target_critic}
    modules |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    modules |= {"buffer": buffer} if args.save_buffer else {}
    with Run(args, __file__, **modules) as run:
        memory, metrics = first_memory(agent, args.num_envs, envs.num_agents), {}
        *now, buffer.playing = run.start(envs, memory, buffer.playing)
        while run.step < args.total_timesteps:
            num_episodes = run.num_episodes
            now = collect(agent, envs, now, buffer, run)
            run.carried = now[2], buffer.playing  # for a checkpoint
            for _ in range(args.epochs if len(buffer.episodes) >= args.batch_size else 0):
                batch = buffer.sample(args.batch_size, device)
                metrics = update(agent, critic, targets, optimizers, batch, args)
                if critic.num_updates % args.target_network_update_freq == 0:
                    soft_update(target_agent, agent, args.polyak)
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
