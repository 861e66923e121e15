"""PPO as in ppo_atari_envpool.py, but it learns a game of two players by playing against itself.

PPO collects a rollout of T steps from N environments with the current policy, estimates advantages with GAE, and takes
several epochs of minibatch steps on a surrogate objective whose probability ratio is clipped, so that the policy stays
near the one that collected the data. One convolutional network plays both sides: it sees the board and the legal moves
as the player to move does, and values the position for that player. The games are zero-sum with perfect information, so
that GAE runs over all moves of a game, of both players, with values and rewards as player 0 sees them, and is turned
back for player 1: this is negamax.

A step of an environment is one move of one player. In most environments both sides learn; in the others player 1 is a
past self, which moves but does not learn: who only plays against its present self can forget how to beat others (OpenAI
Five, Berner et al. 2019, arXiv:1912.06680, played 20% of its games so). A past self is drawn from the pool for each
rollout, so that one network at a time plays all these games. Strength is measured in matches with the uniformly random
player, whose Elo is 0, and with each past self of the pool, whose Elo stays what it was when it joined.

Papers: Schulman et al. 2017 (arXiv:1707.06347); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Tags such as `detail core-5` name the details; docs/details.md lists them with the tests that prove them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, PositiveFloat, PositiveInt, RunArgs, UnitFloat, check, launch, set_up
from cleanmarl.envs.pool import GAMES, Against, Games, envpool_spec
from cleanmarl.layers import Bf16, use_bf16
from cleanmarl.run import EVAL_SEED, Run, check_rollout_size

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn


@dataclass
class Args(RunArgs):
    eval_episodes: int = 200
    """games of the evaluation at the end, most probable moves against random ones; 0 for none"""

    env_id: str = "ConnectFour-v1"
    """a zero-sum two-player game of perfect information in envpool: ConnectFour-v1, TicTacToe-v1, Othello-v1, ..."""
    total_timesteps: PositiveInt = 500_000
    """environment steps (moves of either player) of the whole run, all environments together"""

    learning_rate: PositiveFloat = 1e-3
    """learning rate of Adam"""
    num_envs: PositiveInt = 64
    """N, environments stepped side by side"""
    num_steps: PositiveInt = 64
    """T, steps of each environment in one rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 4
    """minibatches of one epoch"""
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
    ent_coef: NonNegativeFloat = 0.05
    """weight of the entropy bonus"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss"""
    max_grad_norm: PositiveFloat = 0.5
    """largest norm of the gradient of all parameters together"""
    target_kl: PositiveFloat | None = None
    """stop the epochs of an update once the approximate KL divergence exceeds this"""
    past_share: UnitFloat = 0.2
    """share of the environments in which player 1 is a past self"""
    pool_size: PositiveInt = 20
    """most past selves kept; the oldest leaves first"""
    pool_interval: PositiveInt = 10
    """updates between two matches, after which the agent joins its past selves; there is always one at the end"""
    match_games: PositiveInt = 100
    """games against each opponent in a match, with sampled moves"""
    bf16: Bf16 = "off"
    """convolutions in bfloat16: "auto" where the machine is made for it, a GPU or a CPU with AVX512-BF16 or AMX"""


def random_policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
    """Legal moves, all equally likely."""
    mask = info["action_mask"]
    return (torch.rand(mask.shape).numpy() + mask).argmax(-1)


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """Games for player 0 against random moves, as they are evaluated and shown; UsageError for what is no such game."""
    own = args.env_id.removeprefix("pgx/")  # as ippo.py calls them
    check(own == args.env_id or own not in GAMES, f"this script knows {args.env_id} as --env-id {own}")
    envpool_spec(args.env_id)  # its error names near ids
    message = f"this script needs a zero-sum two-player game of perfect information, and {args.env_id} is none of them"
    check(args.env_id in GAMES, f"{message}: {', '.join(GAMES)}")
    return Against(Games(args.env_id, num_envs, **options), random_policy)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    # detail core-2: orthogonal weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy logits (B, K), illegal moves at -1e8, and value (B,) for the player to move; observations are (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.board_shape, self.num_actions = envs.unwrapped.board_shape, int(envs.single_action_space.n)
        height, width, num_planes = self.board_shape
        # as detail atari-8: one convolutional network for policy and value; here for a small board
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(num_planes, 32, 3, padding=1)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 32, 3, padding=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(32 * height * width, 128)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(128, self.num_actions), std=0.01)  # small: all moves about as likely at first
        self.critic = layer_init(nn.Linear(128, 1), std=1.0)
        self.to(memory_format=torch.channels_last)  # makes convolutions faster
        self.bf16 = use_bf16(args)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        board, mask = obs[:, : -self.num_actions], obs[:, -self.num_actions :].bool()
        # bfloat16 may be rounded otherwise for N rows than for a minibatch: then the first ratio is 1 to two digits
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(board.unflatten(1, self.board_shape).permute(0, 3, 1, 2))
        hidden = hidden.float()
        # detail aux-4: an illegal move has a logit of -1e8, and so no probability and no gradient
        return self.actor(hidden).masked_fill(~mask, -1e8), self.critic(hidden).squeeze(-1)


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


class PastSelves:
    """The pool: frozen copies of the agent and their Elo, the oldest first. A checkpoint holds it."""

    def __init__(self):
        self.agents: list[dict[str, torch.Tensor]] = []
        self.elo: list[float] = []

    def add(self, agent: Agent, elo: float, args: Args) -> None:
        """Keep a copy of the agent; beyond --pool-size the oldest leaves."""
        self.agents.append({name: x.detach().cpu().clone() for name, x in agent.state_dict().items()})
        self.elo.append(elo)
        del self.agents[: -args.pool_size], self.elo[: -args.pool_size]

    def state_dict(self) -> dict:
        return {"agents": self.agents, "elo": self.elo}

    def load_state_dict(self, state: dict) -> None:
        self.agents, self.elo = state["agents"], state["elo"]


def elo_of(score: np.ndarray, elo: np.ndarray, num_games: int) -> float:
    """The Elo that explains a match: it makes the expected score, summed over the opponents, the one that was reached.

    score (M,): share of the points taken from each of M opponents in num_games games, a draw being half a point; elo
    (M,): the opponents'. With those fixed this is the maximum of the likelihood. One more draw with each of them is
    counted in, so that winning (or losing) all games gives a number.
    """
    score = (num_games * score + 0.5) / (num_games + 1)
    low, high = elo.min() - 4000, elo.max() + 4000
    for _ in range(60):  # bisection: the expected score grows with one's Elo
        middle = (low + high) / 2
        expected = 1 / (1 + 10 ** ((elo - middle) / 400))
        low, high = (middle, high) if expected.sum() < score.sum() else (low, middle)
    return float((low + high) / 2)


def match(agent: Agent, past: Agent, pool: PastSelves, seed: int, args: Args, run: Run) -> dict[str, float]:
    """Play --match-games games with random and with each past self; `past` is a network that is overwritten."""
    policy, score = make_policy(agent, greedy=False), []
    for i, weights in enumerate([None, *pool.agents]):
        if weights is not None:
            past.load_state_dict(weights)
        opponent = random_policy if weights is None else make_policy(past, greedy=False)
        envs = Against(Games(args.env_id, args.match_games), opponent)
        score.append((1 + run.play(envs, policy, args.match_games, seed + i)["eval/ep_reward"]) / 2)
        envs.close()
    elo = elo_of(np.array(score), np.array([0.0, *pool.elo]), args.match_games)
    metrics = {"eval/win_rate_random": score[0], "eval/elo": elo}
    return metrics | ({"eval/win_rate_past": float(np.mean(score[1:]))} if pool.agents else {})


class Rollout(NamedTuple):
    """What one rollout leaves behind: T steps of N environments, arrays filled in place."""

    obs: np.ndarray  # (T, N, D) float32
    action: np.ndarray  # (T, N) int64
    log_prob: np.ndarray  # (T, N) float32, of the policy that acted
    reward: np.ndarray  # (T, N) float32, player 0's
    done: np.ndarray  # (T, N) bool, the game ended with this step
    player: np.ndarray  # (T, N) int64, who moved: 0, 1, or -1 where the step only began a game
    learns: np.ndarray  # (T, N) bool, the agent moved: no past self, and no step that only began a game
    value: np.ndarray  # (T, N) float32, the agent's, for the player to move


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
def collect(agent: Agent, past: Agent, envs: Games, seen: tuple, rollout: Rollout, args: Args, run: Run):
    """Step the games for one rollout, starting from `seen`, an (obs, info); returns what is seen after it.

    Values come along with the actions, since both share a network.
    """
    device = next(agent.parameters()).device
    obs, info = seen
    num_past = math.ceil(round(args.past_share * args.num_envs, 6))  # the first environments are those with a past self
    noise = gumbel_noise(*rollout.action.shape, agent.num_actions)
    logits = np.empty_like(noise)  # (T, N, K)
    for t in range(args.num_steps):  # detail core-1: as many steps as ever, whichever games end
        rollout.obs[t], rollout.player[t] = obs, info["player"]
        batch = torch.from_numpy(rollout.obs[t]).to(device)
        logits[t], rollout.value[t] = (x.cpu().numpy() for x in agent(batch))
        is_past = rollout.player[t] == 1
        is_past[num_past:] = False
        rollout.learns[t] = (rollout.player[t] >= 0) & ~is_past
        if is_past.any():
            logits[t, is_past] = past(batch[torch.from_numpy(is_past).to(device)])[0].cpu().numpy()
        rollout.action[t] = (logits[t] + noise[t]).argmax(-1)
        obs, rollout.reward[t], termination, truncation, info = envs.step(rollout.action[t])
        rollout.done[t] = termination | truncation
        ended = rollout.done[t] & (np.arange(args.num_envs) < num_past)
        if ended.any():  # results against past selves; those against oneself say nothing
            run.log_episodes(info | {"_episode": ended})
    run.check_rollout(rollout, obs)
    log_prob = torch.from_numpy(logits).log_softmax(-1).gather(-1, torch.from_numpy(rollout.action)[..., None])
    rollout.log_prob[:] = log_prob.squeeze(-1)
    return obs, info


class Batch(NamedTuple):
    """A rollout as the networks learn from it, tensors (B, ...); B = moves of the agent, or a minibatch of them."""

    obs: torch.Tensor  # (B, D)
    action: torch.Tensor  # (B,)
    log_prob: torch.Tensor  # (B,) of the policy that acted
    advantage: torch.Tensor  # (B,)
    return_: torch.Tensor  # (B,) targets of the value function
    value: torch.Tensor  # (B,) what it said before the update


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, seen: tuple, args: Args) -> Batch:
    """Advantages and returns of the agent's moves; `seen` (obs, info) is what follows them."""
    device = next(agent.parameters()).device
    next_obs, info = seen
    _, next_value = agent(torch.as_tensor(next_obs, device=device))
    # What is good for one player is as bad for the other: as player 0 sees it, a game is an episode like any other.
    sign = np.where(rollout.player == 1, -1, 1).astype(np.float32)
    next_sign = np.where(info["player"] == 1, -1, 1).astype(np.float32)
    values, next_values = sign * rollout.value, next_sign * next_value.cpu().numpy()
    advantage = sign * gae(rollout.reward, values, next_values, rollout.done, args.gamma, args.gae_lambda)
    arrays = rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage
    obs, action, log_prob, value, advantage = (torch.from_numpy(x[rollout.learns]).to(device) for x in arrays)
    return_ = advantage + value  # detail core-5: TD(lambda) returns
    return Batch(obs, action, log_prob, advantage, return_, value)


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
    all_stats = []
    for _ in range(args.update_epochs):
        # detail core-6: every sample is used once per epoch, in random minibatches
        order = torch.randperm(len(batch.obs), device=batch.obs.device)
        shuffled = [x[order].tensor_split(args.num_minibatches) for x in batch]
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
    # Of T steps beside a past self at least (T - 1) // 3 are the agent's moves: past, begin, past may come first, then
    # again and again agent, begin, past if games end after two moves. A spread takes two.
    message = f"--num-steps {args.num_steps} of --num-envs {args.num_envs} may leave less than two moves of the agent"
    message += f" for each of --num-minibatches {args.num_minibatches}"
    check(args.num_envs * ((args.num_steps - 1) // 3) >= 2 * args.num_minibatches, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {batch_size} steps"
    check(args.total_timesteps >= batch_size, message)
    device = set_up(args)

    envs = make_envs(args, args.num_envs).env  # detail core-1: vectorized architecture
    agent, past, pool = Agent(envs, args).to(device), Agent(envs, args).to(device).eval(), PastSelves()
    # detail core-3: Adam's epsilon is 1e-5, not the library's 1e-8
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    T, N = args.num_steps, args.num_envs
    rollout = Rollout(
        obs=np.zeros((T, N, *envs.single_observation_space.shape), np.float32),
        action=np.zeros((T, N), np.int64),
        log_prob=np.zeros((T, N), np.float32),
        reward=np.zeros((T, N), np.float32),
        done=np.zeros((T, N), bool),
        player=np.zeros((T, N), np.int64),
        learns=np.zeros((T, N), bool),
        value=np.zeros((T, N), np.float32),
    )
    check_rollout_size(rollout)

    num_updates = args.total_timesteps // batch_size
    with Run(args, __file__, agent=agent, optimizer=optimizer, pool=pool) as run:
        if not pool.agents:  # the first past self has learned nothing
            run.write(metrics := match(agent, past, pool, args.seed + EVAL_SEED, args, run))
            pool.add(agent, metrics["eval/elo"], args)
        seen = run.start(envs)
        for iteration in range(run.step // batch_size, num_updates):
            # detail core-4, detail aux-1: learning rate and clip range fall linearly to 0
            remaining = 1 - iteration / num_updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
            clip_coef = args.clip_coef * (remaining if args.anneal_clip_coef else 1)

            past.load_state_dict(pool.agents[torch.randint(len(pool.agents), ())])
            seen = collect(agent, past, envs, seen, rollout, args, run)
            run.step += batch_size
            batch = estimate(agent, rollout, seen, args)
            metrics = update(agent, optimizer, batch, clip_coef, args)
            if (iteration + 1) % args.pool_interval == 0 or iteration + 1 == num_updates:
                run.write(result := match(agent, past, pool, args.seed + EVAL_SEED + run.step, args, run))
                pool.add(agent, result["eval/elo"], args)
            run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})
            if run.evaluation_due:
                run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
