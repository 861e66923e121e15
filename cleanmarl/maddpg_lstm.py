"""MADDPG as in maddpg.py, but the actor is an LSTM, which remembers what an agent no longer observes.

A critic sees the global state and the actions of all agents, Q(s, a_1..a_A); an actor sees what its agent observes.
Whole episodes are kept in a replay buffer. Critics learn by temporal differences, with target networks. The actor
climbs the critic's gradient with respect to its own action, while the others' actions are those of the buffer. Discrete
actions are Gumbel-Softmax samples, hard ones to act and to train critics, soft ones to train the actor. All agents have
one actor, which tells them apart by a one-hot id; with a shared reward they have one critic, else each has its own.
Batches are whole episodes: the actor and the target actor replay them from the first observation on, gradients go back
at most `tbptt` steps, and an update is one step of the optimizer, however long the episodes are.

Papers: Lowe et al. 2017 (arXiv:1706.02275); Jang et al. 2017, "Categorical reparameterization with Gumbel-Softmax".
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from cleanmarl.envs import MultiAgentVectorEnv, make
from cleanmarl.run import EVAL_SEED, Run, check, check_positive, evaluate, find_device, launch, seed_everything


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policies' samples, the batches and the environments"""
    device: str = "cpu"
    """torch device: cpu, cuda, cuda:1, mps; small networks are fastest on the CPU"""
    torch_threads: int = 1
    """threads of torch on the CPU"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    save_buffer: bool = True
    """keep the replay buffer in checkpoints; without it a resumed run fills a new one first"""
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
    log_every: int = 10
    """episodes between two points of the curves"""
    eval_steps: int = 50
    """episodes between two evaluations, with the most probable actions in separate environments"""
    num_eval_ep: int = 5
    """episodes of each of these evaluations"""

    env_id: str = "mpe/simple_spread_v3"
    """family/name of a multi-agent environment with discrete actions"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, however many agents act in each; the last episode is played to its end"""

    agent_ids: bool = True
    """add a one-hot id to the observation: without it the agents' common actor cannot tell them apart"""
    individual_critics: bool | None = None
    """a critic for each agent's own reward, or one for the mean reward; by default one if all agents earn the same"""
    gamma: float = 0.99
    """discount factor, in [0, 1]"""
    buffer_size: int = 5000
    """episodes in the replay buffer"""
    batch_size: int = 10
    """episodes in a batch"""
    normalize_reward: bool = False
    """normalise rewards by the mean and the deviation of those in the replay buffer"""
    actor_hidden_dim: int = 32
    """units of a hidden layer of the actor"""
    actor_num_layers: int = 1
    """LSTM layers of the actor, after the first, linear one"""
    critic_hidden_dim: int = 128
    """units of a hidden layer of a critic"""
    critic_num_layers: int = 1
    """hidden layers of a critic after the first one"""
    train_freq: int = 1
    """episodes between two updates"""
    optimizer: Literal["Adam", "AdamW", "SGD"] = "Adam"
    """optimizer of the actor and of the critics"""
    learning_rate_actor: float = 6e-4
    """learning rate of the actor"""
    learning_rate_critic: float = 6e-4
    """learning rate of the critics"""
    target_network_update_freq: int = 1
    """updates between two steps of the target networks"""
    polyak: float = 0.005
    """how far a step takes the target networks towards the others, in (0, 1]"""
    clip_gradients: float = -1.0
    """largest norm of a network's gradient; 0 or less for any"""
    tbptt: int = 10
    """steps that the actor's gradient goes back in time: episodes are cut into chunks of this length"""


def make_envs(args: Args, num_envs: int, **options) -> MultiAgentVectorEnv:
    """The environments of a run; UsageError if their actions are continuous."""
    envs = make(args.env_id, num_envs, **options)
    message = f"maddpg_lstm.py needs discrete actions and those of {args.env_id} are continuous"
    check(not envs.continuous, f"{message}; try maddpg_continuous_action.py")
    return envs


def have_shared_reward(envs: MultiAgentVectorEnv, seed: int, num_steps: int = 200) -> bool:
    """Whether the environment says that its agents are one team, or all who live earn the same when played at random.

    Every environment is played for `num_steps`; False too if nobody earns anything. A guess that errs on the safe side:
    critics of their own suit a shared reward too, unless agents die before its end.
    """
    if envs.team_reward:
        return True
    rng = np.random.default_rng(seed)
    _, info = envs.reset(seed=seed)
    is_earned = False
    for _ in range(num_steps):
        alive, action_mask = info["agent_mask"], info["action_mask"]
        action = (rng.random(action_mask.shape) * action_mask).argmax(-1)
        _, reward, _, _, info = envs.step(action)
        if (np.where(alive, reward, np.inf).min(1) < np.where(alive, reward, -np.inf).max(1)).any():
            return False
        is_earned |= bool((reward != 0).any())
    return is_earned


class Agent(nn.Module):
    """The policy of all agents: one recurrent network that sees an agent's observation and its one-hot id."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        num_actions, hidden = int(envs.action_sizes.max()), args.actor_hidden_dim
        ids = torch.eye(envs.num_agents) if args.agent_ids else torch.zeros(envs.num_agents, 0)
        self.register_buffer("ids", ids)
        self.tbptt = args.tbptt
        self.encoder = nn.Sequential(nn.Linear(int(envs.obs_sizes.max()) + ids.shape[1], hidden), nn.ReLU())
        self.lstm = nn.LSTM(hidden, hidden, args.actor_num_layers, batch_first=True)
        self.head = nn.Linear(hidden, num_actions)

    def logits(self, obs: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, A, K) of episodes from their first step on, illegal ones far below.

        obs (B, T, A, D), action_mask (B, T, A, K). No gradient goes from one chunk of tbptt steps to the one before.
        """
        features = torch.cat([obs, self.ids.expand(*obs.shape[:-1], -1)], dim=-1)
        hidden = self.encoder(features).swapaxes(1, 2).flatten(0, 1)  # (B * A, T, hidden)
        outputs, state = [], None  # no state is a state of zeros
        for chunk in hidden.split(self.tbptt, dim=1):
            output, state = self.lstm(chunk, state)
            state = tuple(x.detach() for x in state)
            outputs.append(output)
        hidden = torch.cat(outputs, dim=1).unflatten(0, (len(obs), -1)).swapaxes(1, 2)
        return self.head(hidden.relu()).masked_fill(~action_mask, -1e8)


class StackedLinear(nn.Module):
    """M linear layers as one batched product: (M, B, in) -> (M, B, out)."""

    def __init__(self, num_networks: int, size_in: int, size_out: int):
        super().__init__()
        bound = size_in**-0.5  # as nn.Linear has it
        self.weight = nn.Parameter(torch.empty(num_networks, size_in, size_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_networks, 1, size_out).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Critic(nn.Module):
    """M centralised critics: M = A, one for each agent's own reward, or M = 1 for a shared one."""

    def __init__(self, envs: MultiAgentVectorEnv, args: Args):
        super().__init__()
        self.num_networks = M = envs.num_agents if args.individual_critics else 1
        self.state_size, hidden = envs.state_size, args.critic_hidden_dim
        layers = [StackedLinear(M, self.state_size + envs.real_actions.size, hidden), nn.ReLU()]
        for _ in range(args.critic_num_layers):
            layers += [StackedLinear(M, hidden, hidden), nn.ReLU()]
        self.network = nn.Sequential(*layers, StackedLinear(M, hidden, 1))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))  # here, so that checkpoints have it

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """All critics' values (B, T, M) of a joint action; state (B, T, S), action (B, T, A, K) one-hot."""
        x = torch.cat([state, action.flatten(2)], dim=-1).flatten(0, 1)
        return self.network(x.expand(self.num_networks, -1, -1)).squeeze(-1).T.unflatten(0, state.shape[:2])

    def with_own_action(self, state: torch.Tensor, action: torch.Tensor, own_action: torch.Tensor) -> torch.Tensor:
        """Agent i's value (B, T, A) if i takes own_action (B, T, A, K) and the others take action; for all i at once.

        The first layer is linear: its output for the actions of the buffer changes by what the own action changes.
        """
        first, rest = self.network[0], self.network[1:]
        x = torch.cat([state, action.flatten(2)], dim=-1).flatten(0, 1)
        weight = first.weight[:, self.state_size :].unflatten(1, action.shape[2:])  # (M, A, K, hidden)
        weight = weight.diagonal().movedim(-1, 0) if self.num_networks > 1 else weight[0]  # (A, K, hidden)
        change = (own_action - action).flatten(0, 1).swapaxes(0, 1) @ weight  # (A, B * T, hidden)
        hidden = first(x.expand(self.num_networks, -1, -1)) + change
        q = rest(hidden.reshape(self.num_networks, -1, hidden.shape[-1]))  # row i to critic i, or all to the only one
        return q.reshape(action.shape[2], *state.shape[:2]).movedim(0, -1)


def numpy_actor(agent: Agent):
    """The actor as a NumPy function of obs (N, A, D) and state -> logits (N, A, K) and the state after this step.

    Who changes the network changes it here too. For few rows it takes a quarter of torch's time. A state is
    (2, layers, N, A, hidden): the LSTM's output and its cell.
    """
    (w_in, b_in), (w_out, b_out), layers = (
        [p.detach().cpu().numpy() for p in module.parameters()] for module in (agent.encoder, agent.head, agent.lstm)
    )
    w_in, id_weight = np.split(w_in.T, [w_in.shape[1] - agent.ids.shape[1]])
    b_in = b_in + agent.ids.cpu().numpy() @ id_weight  # (A, hidden): an id adds a row of the weight
    layers = [(layers[k].T, layers[k + 1].T, layers[k + 2] + layers[k + 3]) for k in range(0, len(layers), 4)]

    def actor(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, new_state = np.maximum(x @ w_in + b_in, 0), np.empty_like(state)
        for k, (w_x, w_h, bias) in enumerate(layers):
            gates = x @ w_x + state[0, k] @ w_h + bias
            i, f, g, o = np.split(gates, 4, axis=-1)
            new_state[1, k] = sigmoid(f) * state[1, k] + sigmoid(i) * np.tanh(g)
            new_state[0, k] = x = sigmoid(o) * np.tanh(new_state[1, k])
        return np.maximum(x, 0) @ w_out.T + b_out, new_state

    return actor


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # without overflow


def first_state(agent: Agent, num_envs: int) -> np.ndarray:
    """The LSTM's state before anything was seen, (2, layers, N, A, hidden)."""
    return np.zeros((2, agent.lstm.num_layers, num_envs, len(agent.ids), agent.lstm.hidden_size), np.float32)


def gumbel_noise(*shape: int) -> np.ndarray:
    """Noise that makes argmax(logits + noise) a hard Gumbel-Softmax sample, from torch's generator."""
    return -torch.empty(shape).exponential_().log().numpy()


def make_policy(agent: Agent, greedy: bool = True):
    """The agents as a function of (obs, info, done) for `evaluate`: their most probable legal actions, or samples."""
    actor, state = numpy_actor(agent), None

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        nonlocal state
        if done.all():  # at the beginning, when the number of environments may be another one
            state = first_state(agent, len(obs))
        state[:, :, done] = 0
        logits, state = actor(obs, state)
        noise = 0 if greedy else gumbel_noise(*logits.shape)
        return np.where(info["action_mask"], logits + noise, -np.inf).argmax(-1)

    return policy


class Episodes(NamedTuple):
    """R episodes of up to L - 1 steps. Row t is of step t; the row after the last step is of what came after it."""

    obs: np.ndarray  # (R, L, A, D) float32
    state: np.ndarray  # (R, L, S) float32
    action_mask: np.ndarray  # (R, L, A, K) bool, True = legal
    agent_mask: np.ndarray  # (R, L, A) bool, True = alive; after a termination nobody is, after a truncation they are
    action: np.ndarray  # (R, L, A) int64
    reward: np.ndarray  # (R, L, A) float32


class Batch(NamedTuple):
    """B episodes as the networks learn from them: tensors, padded to the longest, of T steps."""

    obs: torch.Tensor  # (B, T + 1, A, D)
    state: torch.Tensor  # (B, T + 1, S)
    action_mask: torch.Tensor  # (B, T + 1, A, K)
    action: torch.Tensor  # (B, T, A, K) one-hot
    alive: torch.Tensor  # (B, T, A) 1.0 for living agents, 0.0 for the rest and for the padding
    reward: torch.Tensor  # (B, T, M) that each critic learns from
    weight: torch.Tensor  # (B, T, M) 1.0 where it does
    goes_on: torch.Tensor  # (B, T, M) 0.0 where there is no value after the step: a termination, or the agent's death


class Buffer:
    """The last `buffer_size` episodes, and those that are being played in the N environments.

    Arrays are allocated once, and anew with twice the length when an episode turns out to be longer. The system backs
    them with memory as they fill.
    """

    def __init__(self, envs: MultiAgentVectorEnv, args: Args, num_rows: int = 32):
        self.individual_critics, self.normalize_reward = args.individual_critics, args.normalize_reward
        (A, D), K = envs.single_observation_space.shape, envs.real_actions.shape[1]

        def allocate(num_episodes: int) -> Episodes:
            R, L = num_episodes, num_rows
            return Episodes(
                obs=np.zeros((R, L, A, D), np.float32),
                state=np.zeros((R, L, envs.state_size), np.float32),
                action_mask=np.zeros((R, L, A, K), bool),
                agent_mask=np.zeros((R, L, A), bool),
                action=np.zeros((R, L, A), np.int64),
                reward=np.zeros((R, L, A), np.float32),
            )

        self.episodes, self.playing = allocate(args.buffer_size), allocate(envs.num_envs)
        self.lengths = np.zeros(args.buffer_size, np.int64)
        self.reward_moments = np.zeros((args.buffer_size, 3, A if args.individual_critics else 1))
        self.size = self.next = 0  # number of episodes, and where the next one goes: in place of the oldest
        self.rows, self.t = np.arange(envs.num_envs), np.zeros(envs.num_envs, np.int64)

    def grow(self, num_rows: int) -> None:
        """Make room for episodes of num_rows - 1 steps."""

        def longer(x: np.ndarray, count: int) -> np.ndarray:
            y = np.zeros((x.shape[0], num_rows, *x.shape[2:]), x.dtype)
            y[:count, : x.shape[1]] = x[:count]
            return y

        self.episodes = Episodes(*(longer(x, self.size) for x in self.episodes))
        self.playing = Episodes(*(longer(x, len(x)) for x in self.playing))

    def add(self, obs, info, action, reward, termination, truncation, next_info) -> None:
        """One step of every environment: what was seen, done and earned, and the info after it; see cleanmarl.envs."""
        if self.t.max() + 1 == self.playing.obs.shape[1]:
            self.grow(2 * self.playing.obs.shape[1])
        step = (obs, info["state"], info["action_mask"], info["agent_mask"], action, reward)
        for array, values in zip(self.playing, step):
            array[self.rows, self.t] = values
        self.t += 1
        for i in np.flatnonzero(termination | truncation):
            last = (i, self.t[i])
            self.playing.obs[last], self.playing.state[last] = next_info["final_obs"][i], next_info["final_state"][i]
            self.playing.action_mask[last] = next_info["final_action_mask"][i]
            self.playing.agent_mask[last] = next_info["final_agent_mask"][i] & ~termination[i]
            for array, values in zip(self.episodes, self.playing):
                array[self.next, : self.t[i] + 1] = values[i, : self.t[i] + 1]
            self.lengths[self.next] = self.t[i]
            self.reward_moments[self.next] = self.moments(slice(self.next, self.next + 1))[0]
            self.size = max(self.size, self.next + 1)
            self.next = (self.next + 1) % len(self.lengths)
            self.t[i] = 0

    def sample(self, batch_size: int, device: torch.device) -> Batch:
        """Episodes drawn with replacement."""
        index = torch.randint(self.size, (batch_size,)).numpy()
        lengths = self.lengths[index]
        T = lengths.max()
        obs, state, action_mask, agent_mask, action, reward = (x[index, : T + 1] for x in self.episodes)
        is_step = np.arange(T) < lengths[:, None]  # (B, T): no padding
        alive, survive = agent_mask[:, :T] & is_step[..., None], agent_mask[:, 1:]
        reward = reward[:, :T]
        if self.individual_critics:
            weight, goes_on = alive, alive & survive
        else:
            reward = mean_of_living(reward, alive)
            weight, goes_on = alive.any(-1, keepdims=True), (alive.any(-1) & survive.any(-1))[..., None]
        if self.normalize_reward:
            mean, std = self.reward_statistics()
            reward = (reward - mean) / (std + 1e-6)
        one_hot = np.eye(action_mask.shape[-1], dtype=np.float32)[action[:, :T]]
        floats = (x.astype(np.float32) for x in (alive, reward, weight, goes_on))
        return Batch(*(torch.from_numpy(x).to(device) for x in (obs, state, action_mask, one_hot, *floats)))

    def moments(self, index: slice) -> np.ndarray:
        """Count, sum and sum of squares (R, 3, M) of the rewards in episodes of the buffer, as the critics see them."""
        steps = np.arange(self.episodes.obs.shape[1]) < self.lengths[index, None]
        alive = self.episodes.agent_mask[index] & steps[..., None]
        reward = self.episodes.reward[index].astype(np.float64)
        if not self.individual_critics:
            reward, alive = mean_of_living(reward, alive), alive.any(-1, keepdims=True)
        return np.stack([(alive * reward**power).sum(1) for power in range(3)], axis=1)

    def reward_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation (M,) of the rewards in the buffer, as the critics see them."""
        count, total, squares = self.reward_moments[: self.size].sum(0)
        mean = total / count.clip(1)
        return mean, np.sqrt((squares / count.clip(1) - mean**2).clip(0))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is filled, as tensors. The episodes being played are left out: a resumed run starts new ones."""
        lengths = self.lengths[: self.size]
        num_rows = int(lengths.max(initial=0)) + 1
        filled = {key: x[: self.size, :num_rows].copy() for key, x in self.episodes._asdict().items()}
        filled |= {"lengths": lengths.copy(), "next": np.array(self.next)}
        return {key: torch.from_numpy(x) for key, x in filled.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        filled = {key: x.numpy() for key, x in state.items()}
        self.size, self.next = len(filled["lengths"]), int(filled["next"])
        num_rows = filled["obs"].shape[1]
        if num_rows > self.episodes.obs.shape[1]:
            self.grow(num_rows)
        for key, array in self.episodes._asdict().items():
            array[: self.size, :num_rows] = filled[key]
        self.lengths[: self.size] = filled["lengths"]
        self.reward_moments[: self.size] = self.moments(slice(self.size))


def mean_of_living(reward: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """The mean (..., 1) of the rewards (..., A) of agents that are alive (..., A); 0 if none is."""
    return (reward * alive).sum(-1, keepdims=True) / alive.sum(-1, keepdims=True).clip(1)


def collect(agent: Agent, envs: MultiAgentVectorEnv, now, buffer: Buffer, run: Run):
    """Play until an episode ends, from `now`, the (obs, info, LSTM state) before it; returns those after it."""
    actor, num_episodes = numpy_actor(agent), run.num_episodes + 1
    obs, info, state = now
    while run.num_episodes < num_episodes:
        logits, state = actor(obs, state)
        logits += gumbel_noise(*logits.shape)
        action = np.where(info["action_mask"], logits, -np.inf).argmax(-1)
        next_obs, reward, termination, truncation, next_info = envs.step(action)
        buffer.add(obs, info, action, reward, termination, truncation, next_info)
        state[:, :, termination | truncation] = 0  # the next observation is the first of an episode
        run.step += envs.num_envs
        if "_episode" in next_info:
            run.log_episodes(next_info)
        obs, info = next_obs, next_info
    return obs, info, state


@torch.no_grad()
def critic_targets(target_agent: Agent, target_critic: Critic, batch: Batch, gamma: float) -> torch.Tensor:
    """What the critics learn (B, T, M): r + gamma Q'(s', a'), where a' are hard samples of the target policy."""
    logits = target_agent.logits(batch.obs, batch.action_mask)  # it sees the first observation too
    next_action = F.gumbel_softmax(logits[:, 1:], hard=True)
    return batch.reward + gamma * batch.goes_on * target_critic(batch.state[:, 1:], next_action)


def critic_loss(critic: Critic, batch: Batch, target: torch.Tensor) -> torch.Tensor:
    """Each critic's mean squared error (M,) over the steps it learns from."""
    error = critic(batch.state[:, :-1], batch.action) - target
    return (error.square() * batch.weight).sum((0, 1)) / batch.weight.sum((0, 1)).clamp(min=1)


def actor_loss(agent: Agent, critic: Critic, batch: Batch) -> torch.Tensor:
    """Minus the mean value of the living agents' own soft samples; all other actions are those of the buffer."""
    own_action = F.gumbel_softmax(agent.logits(batch.obs[:, :-1], batch.action_mask[:, :-1]), hard=False)
    q = critic.with_own_action(batch.state[:, :-1], batch.action, own_action)
    return -(q * batch.alive).sum() / batch.alive.sum().clamp(min=1)


def descend(
    loss: torch.Tensor, network: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, num_networks: int = 1
) -> torch.Tensor:
    """One step down the gradient of the loss, which each of the stacked networks clips; returns their mean norm."""
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.cat([g.reshape(num_networks, -1) for g in gradients], dim=1).norm(dim=1)  # (M,)
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        gradients = [g * scale.reshape(-1, *[1] * (g.ndim - 1)) for g in gradients]
    for p, g in zip(parameters, gradients):
        p.grad = g
    optimizer.step()
    return norm.mean()


def update(agent: Agent, critic: Critic, targets, optimizers, batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """One step of the critics, then one of the actor; targets and optimizers are those of (actor, critics)."""
    target = critic_targets(*targets, batch, args.gamma)
    loss = critic_loss(critic, batch, target)
    # The critics share no parameter: the gradient of their sum is each one's gradient of its own loss.
    norm = descend(loss.sum(), critic, optimizers[1], args.clip_gradients, critic.num_networks)
    metrics = {"train/critic_loss": loss.detach().mean(), "train/critic_gradients": norm}
    loss = actor_loss(agent, critic, batch)
    norm = descend(loss, agent, optimizers[0], args.clip_gradients)
    critic.num_updates += 1
    metrics |= {"train/actor_loss": loss.detach(), "train/actor_gradients": norm}
    return metrics | {"train/num_updates": critic.num_updates}


@torch.no_grad()
def soft_update(target: nn.Module, network: nn.Module, polyak: float) -> None:
    """Move the target's parameters the share `polyak` of the way to the network's."""
    for ours, theirs in zip(target.parameters(), network.parameters()):
        ours.lerp_(theirs, polyak)


def check_args(args: Args) -> None:
    """What can be checked without the environment; raises UsageError."""
    check_positive(args, "total_timesteps", "batch_size", "train_freq", "target_network_update_freq", "torch_threads")
    check_positive(args, "actor_hidden_dim", "critic_hidden_dim", "learning_rate_actor", "learning_rate_critic")
    check_positive(args, "log_every", "eval_steps", "num_eval_ep", "checkpoint_interval", "tbptt", "actor_num_layers")
    check(args.critic_num_layers >= 0, f"--critic-num-layers must be 0 or more, not {args.critic_num_layers}")
    check(0 <= args.gamma <= 1, f"--gamma must be in [0, 1], not {args.gamma}")
    check(0 < args.polyak <= 1, f"--polyak must be in (0, 1], not {args.polyak}: at 0 the targets would never move")
    message = f"--batch-size {args.batch_size} episodes do not fit into --buffer-size {args.buffer_size}"
    check(args.batch_size <= args.buffer_size, f"{message}; lower the one or raise the other")


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_args(args)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)
    envs, eval_envs = make_envs(args, 1), make_envs(args, args.num_eval_ep)
    if args.individual_critics is None:
        individual_critics = not have_shared_reward(eval_envs, args.seed)
        args = dataclasses.replace(args, individual_critics=individual_critics)  # for the run folder

    agent, critic = Agent(envs, args).to(device), Critic(envs, args).to(device)
    target_agent, target_critic = copy.deepcopy(agent), copy.deepcopy(critic)
    optimizer_class = getattr(torch.optim, args.optimizer)
    actor_optimizer = optimizer_class(agent.parameters(), lr=args.learning_rate_actor, fused=True)
    critic_optimizer = optimizer_class(critic.parameters(), lr=args.learning_rate_critic, fused=True)
    targets, optimizers = (target_agent, target_critic), (actor_optimizer, critic_optimizer)
    buffer = Buffer(envs, args)

    modules = {"agent": agent, "critic": critic, "target_agent": target_agent, "target_critic": target_critic}
    modules |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    modules |= {"buffer": buffer} if args.save_buffer else {}
    with Run(args, __file__, **modules) as run:
        now, metrics = (*envs.reset(seed=args.seed + run.step), first_state(agent, 1)), {}
        while run.step < args.total_timesteps:
            now = collect(agent, envs, now, buffer, run)
            if buffer.size >= args.batch_size and run.num_episodes % args.train_freq == 0:
                batch = buffer.sample(args.batch_size, device)
                metrics = update(agent, critic, targets, optimizers, batch, args)
                if critic.num_updates % args.target_network_update_freq == 0:
                    soft_update(target_agent, agent, args.polyak)
                    soft_update(target_critic, critic, args.polyak)
            if run.num_episodes % args.eval_steps == 0:
                seed = args.seed + EVAL_SEED + run.num_episodes
                run.write(evaluate(eval_envs, make_policy(agent), args.num_eval_ep, seed))
            run.log(metrics, run.num_episodes % args.log_every == 0 or run.step >= args.total_timesteps)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_eval_ep)
    envs.close()
    eval_envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
