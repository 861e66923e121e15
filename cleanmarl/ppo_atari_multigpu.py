"""PPO as in ppo_atari_envpool.py, but several processes share the work, each with its own environments and device:

    torchrun --nproc-per-node 2 -m cleanmarl.ppo_atari_multigpu --device cuda

Every process computes the gradient of its own minibatches, all of them step along the mean of these gradients, and so
their networks stay the same. They talk through NCCL on GPUs and Gloo on CPUs. The first process, alone, logs the
episodes of its own environments, saves and evaluates. Without torchrun it is one process and ppo_atari_envpool.py.

PPO collects a rollout of T steps from N environments with the current policy, estimates advantages with GAE, and takes
several epochs of minibatch steps on a surrogate objective whose probability ratio is clipped, so that the policy stays
near the one that collected the data. Policy and value function share the convolutional network of Mnih et al. 2015.
It learns from lives and the signs of rewards; the returns it reports are the scores of whole games.

ale-py's AtariVectorEnv is about a tenth faster than envpool, a fiftieth of the whole run, but there a lost life either
restarts its game or goes without FIRE; envpool plays on and fires. envpool spends a step on each reset: `EnvPool` makes
that step at once, so that the rollout holds no step that the agent did not choose.

Papers: Schulman et al. 2017 (arXiv:1707.06347); Huang et al. 2022, the 37 implementation details of PPO (ICLR blog).
Tags such as `detail core-5` name the details; docs/details.md lists them with the tests that prove them.
"""

import io
import os
import signal
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from cleanmarl.cli import NonNegativeFloat, OnPolicyArgs, PositiveFloat, PositiveInt, UnitFloat, check, launch, set_up
from cleanmarl.envs.pool import EnvPool, envpool_spec
from cleanmarl.layers import Bf16, compilable, use_bf16
from cleanmarl.run import Run, check_rollout_size

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass
class Args(OnPolicyArgs):
    device: str = "cpu"
    """torch device: cpu, or cuda for one GPU per process"""

    env_id: str = "Breakout-v5"
    """any Atari game of envpool"""
    total_timesteps: PositiveInt = 10_000_000
    """environment steps of the whole run, all environments together; one is 4 frames"""

    learning_rate: PositiveFloat = 2.5e-4
    """learning rate of Adam"""
    num_envs: PositiveInt = 8
    """environments stepped side by side, all processes together; N is the share of one"""
    num_steps: PositiveInt = 128
    """T, steps of each environment in one rollout"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: UnitFloat = 0.99
    """discount factor"""
    gae_lambda: UnitFloat = 0.95
    """lambda of GAE"""
    num_minibatches: PositiveInt = 4
    """minibatches of one epoch; must divide num_envs * num_steps of one process"""
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
    bf16: Bf16 = "off"
    """convolutions in bfloat16: "auto" where the machine is made for it, a GPU or a CPU with AVX512-BF16 or AMX"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with four grey frames (4, 84, 84) as observations; UsageError for other games."""
    message = f"this script needs an Atari game, such as Breakout-v5, and {args.env_id} is none"
    check("episodic_life" in envpool_spec(args.env_id).config._fields, message)
    wrappers = {
        "noop_max": 30,  # detail atari-1: random no-ops first, at most 30
        "frame_skip": 4,  # detail atari-2: 4 frames per step, seen as the maximum of the last two
        "episodic_life": True,  # detail atari-3: a lost life ends the episode
        "use_fire_reset": True,  # detail atari-4: FIRE starts the game
        "gray_scale": True,  # detail atari-5: luminance first, then 84 x 84
        "img_height": 84,
        "img_width": 84,
        "reward_clip": True,  # detail atari-6: rewards are -1, 0 or 1
        "stack_num": 4,  # detail atari-7: the last 4 frames show what moves
    }
    return EnvPool(args.env_id, num_envs, **wrappers, **options)


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    # detail core-2: orthogonal weights, constant biases
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy logits (B, K) and state value (B,), for observations (B, 4, 84, 84) uint8."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        num_frames, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
        # detail atari-8: one convolutional network for policy and value
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(num_frames, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)  # small: actions about equally likely at first
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        self.to(memory_format=torch.channels_last)  # makes convolutions faster
        self.bf16 = use_bf16(args)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # detail atari-9: pixels are scaled to [0, 1]
        # bfloat16 may be rounded otherwise for N rows than for a minibatch: then the first ratio is 1 to two digits
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(obs.to(torch.float32, memory_format=torch.channels_last).div_(255))
        hidden = hidden.float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


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

    obs: np.ndarray  # (T, N, 4, 84, 84) uint8
    action: np.ndarray  # (T, N) int64
    log_prob: np.ndarray  # (T, N) float32, of the policy that acted
    reward: np.ndarray  # (T, N) float32
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
        obs, rollout.reward[t], termination, truncation, info = envs.step(rollout.action[t])
        rollout.done[t] = termination | truncation
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

    obs: torch.Tensor  # (B, 4, 84, 84) uint8
    action: torch.Tensor  # (B,)
    log_prob: torch.Tensor  # (B,) of the policy that acted
    advantage: torch.Tensor  # (B,)
    return_: torch.Tensor  # (B,) targets of the value function
    value: torch.Tensor  # (B,) what it said before the update


@torch.no_grad()
def estimate(agent: Agent, rollout: Rollout, next_obs: np.ndarray, args: Args) -> Batch:
    """Advantages and returns of a rollout; next_obs (N, 4, 84, 84) is the observation that follows it."""
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


def average(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all processes."""
    if dist.is_initialized():
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for x, mean in zip(tensors, flat.split([x.numel() for x in tensors])):
            x.copy_(mean.view_as(x))


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
            # detail aux-2: parallelized gradient update
            gradients = [p.grad for p in agent.parameters() if p.grad is not None]
            average(gradients + list(stats.values()))
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


class Follower:
    """Where the first process has a Run, the others have this: it counts steps, and does nothing else."""

    step, folder, evaluation_due = 0, None, False

    def __enter__(self):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the first process decides when to stop
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends those that are left

    check_rollout = log_episodes = log = evaluate = lambda self, *args, **kwargs: None


def main(args: Args) -> Path | None:
    """Train as `args` says; returns the run folder, in the first process."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    message = f"--num-envs {args.num_envs} is not divisible by the number of processes, {world_size}"
    check(args.num_envs % world_size == 0, message)
    batch_size = args.num_envs * args.num_steps
    share = batch_size // world_size
    message = f"{share} steps of a process must be a multiple (2+) of --num-minibatches {args.num_minibatches}"
    check(share % args.num_minibatches == 0 and share > args.num_minibatches, message)
    message = f"--total-timesteps {args.total_timesteps} is less than one rollout of {batch_size} steps"
    check(args.total_timesteps >= batch_size, message)
    local = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if args.device == "cuda" else args.device
    device = set_up(replace(args, device=local))

    envs = make_envs(args, args.num_envs // world_size)  # detail core-1: vectorized architecture
    agent = Agent(envs, args).to(device)
    # detail core-3: Adam's epsilon is 1e-5, not the library's 1e-8
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    T, N = args.num_steps, envs.num_envs
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
    if world_size > 1:
        patience = timedelta(days=1)  # while the first one evaluates, or waits for its actors, the others wait for it
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    kept = {"agent": agent, "optimizer": optimizer}  # in checkpoints, and the same in all processes after a resume
    with Run(args, __file__, **kept) if rank == 0 else Follower() as run:
        if world_size > 1:  # what the first process has resumed
            file = io.BytesIO()
            torch.save([run.step, *(x.state_dict() for x in kept.values())], file)
            sent = [file.getvalue()]
            dist.broadcast_object_list(sent, device=device)
            # by way of the CPU: unpickled as they are, all would lie on the first GPU
            run.step, *states = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)
            for x, state in zip(kept.values(), states):
                x.load_state_dict(state)
        seed = args.seed + run.step + rank * 2**32  # no other run, of whatever seed, has it
        if rank > 0:
            torch.manual_seed(seed)  # other actions and minibatches than the first process
        obs, _ = envs.reset(seed=seed)  # a resumed run begins new episodes
        for iteration in range(run.step // batch_size, num_updates):
            # detail core-4, detail aux-1: learning rate and clip range fall linearly to 0
            remaining = 1 - iteration / num_updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
            clip_coef = args.clip_coef * (remaining if args.anneal_clip_coef else 1)

            obs = collect(agent, envs, obs, rollout, args, run)
            run.step += batch_size
            batch = estimate(agent, rollout, obs, args)
            metrics = update(agent, optimizer, batch, clip_coef, args)
            code = torch.zeros(1, dtype=torch.int32, device=device)
            try:
                run.log(metrics | {"train/learning_rate": optimizer.param_groups[0]["lr"]})
                if run.evaluation_due:
                    run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
            except SystemExit as stopped:  # a signal came, and the state is saved: the others are to end as well
                code += stopped.code
            if world_size > 1:
                dist.broadcast(code, 0)
            if code.item():
                sys.exit(code.item())

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    if world_size > 1:
        dist.destroy_process_group()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
