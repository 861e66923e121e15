"""IMPALA: actors that only act, a learner that only learns, V-trace to make up for the time between; discrete actions.

Each actor process plays N environments with its own copy of the policy and fills slots of shared memory with unrolls of
T steps; only the numbers of slots travel between the processes. The learner takes them as they come. Its parameters are
newer than those that acted, so V-trace weighs every step by the ratio of the two policies, clipped. With --num-actors 0
one process does both in turn, and the run repeats exactly; with --deterministic a run with actors does so too.

Paper: Espeholt et al. 2018 (arXiv:1802.01561); replay, --remainder and lambda as in DI-engine's implementation.
If an actor dies, the run saves and ends; if the learner dies, the actors find their pipes closed and end.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from cleanmarl.envs import make_gymnasium
from cleanmarl.run import Run, check, check_positive, find_device, launch, seed_everything

SLOTS_PER_ACTOR = 2  # one to fill while the other waits for the learner
ADAM_EPS = 1e-2  # not 1e-8: what is solved has gradients of noise alone, and Adam would take full steps along them
PRIORITY_ALPHA, PRIORITY_BETA = 0.6, 0.4  # Schaul et al. 2016, table 3, proportional variant


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policy's samples, the replay and the environments"""
    device: str = "cpu"
    """torch device of the learner: cpu, cuda, cuda:1, mps; small networks are fastest on the CPU"""
    torch_threads: int = 1
    """threads of torch on the CPU, in the learner"""
    runs_dir: str = "runs"
    """where run folders are made"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; there is always one at the end"""
    resume: Path | None = None
    """run folder to continue; --total-timesteps may be raised"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, with the most probable action; 0 for none"""
    capture_video: bool = False
    """record an episode at the end into the run folder"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanmarl"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    env_id: str = "CartPole-v1"
    """any Gymnasium id with Box or Discrete observations and Discrete actions"""
    total_timesteps: int = 500_000
    """environment steps that are learned from, all environments together"""

    num_actors: int = 2
    """actor processes; 0: collect and learn in turn in one process"""
    deterministic: bool = False
    """take one unroll from each actor in turn, and give all of them new parameters at the same time"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    num_envs: int = 16
    """N, environments of each actor; N unrolls are a batch"""
    unroll_length: int = 20
    """T, steps of each environment in one unroll"""
    remainder: Literal["keep", "drop", "last", "null_padding"] = "keep"
    """keep: unrolls go on across the ends of episodes; the others begin an unroll with each episode, and what is left
    at its end is dropped, filled up with its last steps before (last), or with empty steps (null_padding)"""
    updates_per_collect: int = 4
    """gradient steps for each batch that is collected"""
    replay_size: int = 0
    """unrolls (T steps of one environment) kept, from which batches are drawn; 0: learn from each batch as it comes"""
    priority: bool = False
    """draw unrolls from the replay by the size of their value errors"""
    priority_is_weight: bool = False
    """weigh the losses against the bias of --priority"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0 over the run"""
    gamma: float = 0.99
    """discount factor, in [0, 1]"""
    vtrace_lambda: float = 0.95
    """lambda of V-trace, in [0, 1]"""
    rho_clip: float = 1.0
    """largest importance weight of a value error: where the value function converges to; at least c_clip"""
    c_clip: float = 1.0
    """largest importance weight in the trace: how fast it gets there"""
    pg_rho_clip: float = 1.0
    """largest importance weight of the policy gradient"""
    ent_coef: float = 0.001
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 5.0
    """largest norm of the gradient of all parameters together"""


def make_envs(args: Args, num_envs: int, **options) -> gym.vector.VectorEnv:
    """The environments of a run, with vectors as observations (Discrete ones one-hot); UsageError for other spaces."""

    def flatten(env: gym.Env) -> gym.Env:
        obs_space, action_space = env.observation_space, env.action_space
        message = f"impala.py needs Discrete actions and {args.env_id} has {action_space}"
        check(isinstance(action_space, gym.spaces.Discrete), f"{message}; try impala_continuous_action.py")
        message = f"impala.py needs actions counted from 0 and {args.env_id} has {action_space}"
        check(action_space.start == 0, message)
        message = f"impala.py needs Box or Discrete observations and {args.env_id} has {obs_space}"
        check(isinstance(obs_space, gym.spaces.Box | gym.spaces.Discrete), message)
        is_vector = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
        return env if is_vector else gym.wrappers.FlattenObservation(env)

    return make_gymnasium(args.env_id, num_envs, wrappers=[flatten], **options)


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy logits `actor(obs)` (B, K) and state value `critic(obs)` (B, 1), for observations (B, D)."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_size, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), std=0.01),  # small: every action is about as likely at first
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_size, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )


def numpy_actor(agent: Agent):
    """The actor of now in NumPy, a quarter of torch's time for few rows; who changes the network changes it here."""
    w1, b1, w2, b2, w3, b3 = (p.detach().cpu().numpy() for p in agent.actor.parameters())
    return lambda obs: np.tanh(np.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3


def make_policy(agent: Agent, greedy: bool = True):
    """The agent as a function of (obs, info, done) for `evaluate`: the most probable action, or a sample."""
    device = next(agent.parameters()).device

    def policy(obs: np.ndarray, info: dict, done: np.ndarray) -> np.ndarray:
        logits = agent.actor(torch.as_tensor(obs, dtype=torch.float32, device=device))
        action = logits.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits).sample()
        return action.cpu().numpy()

    return policy


def unroll_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """An unroll, T steps of one environment, as a record."""
    T, D = args.unroll_length, envs.single_observation_space.shape[0]
    fields = [
        ("obs", np.float32, (T + 1, D)),  # the last one follows the last step
        ("action", np.int64, (T,)),
        ("log_prob", np.float32, (T,)),  # of the action, by the policy that acted
        ("reward", np.float32, (T,)),
        ("termination", np.bool_, (T,)),
        ("truncation", np.bool_, (T,)),  # and no termination
        ("final_obs", np.float32, (T, D)),  # of truncated episodes; anything elsewhere
        ("mask", np.bool_, (T,)),  # False: an empty step
    ]
    return np.dtype(fields, align=True)


def slot_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """What an actor hands over at once: N unrolls, the version of their policy, and the episodes that ended."""
    T, N = args.unroll_length, args.num_envs
    fields = [("unrolls", unroll_dtype(envs, args), (N,)), ("version", np.int64)]
    fields += [("ep_return", np.float64, (T, N)), ("ep_length", np.int64, (T, N))]  # length 0: no end here
    return np.dtype(fields, align=True)


class Player:
    """N environments of their own seeds, played one unroll after another."""

    def __init__(self, args: Args, index: int, step: int):
        self.args = args
        self.rng = np.random.default_rng([args.seed, step, index])  # a resumed run begins new episodes
        self.envs = make_envs(args, args.num_envs)
        self.obs, _ = self.envs.reset(seed=int(self.rng.integers(2**31)))

    def play(self, agent: Agent, slot: np.ndarray) -> None:
        """Fill `slot`, a record of slot_dtype, with the next T steps by `agent`."""
        T, N, K = self.args.unroll_length, self.args.num_envs, self.envs.single_action_space.n
        actor = numpy_actor(agent)
        # The argmax of logits + Gumbel noise is a sample of the softmax; -log(exponential) is Gumbel noise.
        noise = -np.log(self.rng.standard_exponential((T, N, K), np.float32))
        logits = np.empty((T, N, K), np.float32)
        unrolls = {name: slot["unrolls"][name].swapaxes(0, 1) for name in slot["unrolls"].dtype.names}  # (T, N, ...)
        slot["ep_length"][:] = 0
        for t in range(T):
            unrolls["obs"][t] = self.obs
            logits[t] = actor(self.obs)
            action = (logits[t] + noise[t]).argmax(-1)
            self.obs, reward, termination, truncation, info = self.envs.step(action)
            unrolls["action"][t], unrolls["reward"][t] = action, reward
            unrolls["termination"][t], unrolls["truncation"][t] = termination, truncation & ~termination
            if "_episode" in info:
                slot["ep_return"][t], slot["ep_length"][t] = info["episode"]["r"], info["episode"]["l"]
                for n in np.flatnonzero(truncation):
                    unrolls["final_obs"][t, n] = info["final_obs"][n]
        unrolls["obs"][T], unrolls["mask"][:] = self.obs, True
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        unrolls["log_prob"][:] = np.take_along_axis(log_probs, unrolls["action"][..., None], -1)[..., 0]


class Parameters:
    """The newest parameters of an agent and their version, flat in shared memory: one process writes, others read."""

    def __init__(self, memory):
        self.version, self.flat = np.frombuffer(memory, np.int64, 1), np.frombuffer(memory, np.float32, offset=8)

    def write(self, agent: Agent, version: int) -> None:
        flat = nn.utils.parameters_to_vector(agent.parameters()).detach().cpu().numpy()
        self.version[0] = -1  # no version: they are being written
        self.flat[:] = flat
        self.version[0] = version

    def read(self, agent: Agent) -> int:
        """Load the newest parameters into agent, and return their version; versions must differ."""
        while True:  # again, if they were written meanwhile
            version, flat = self.version[0], self.flat.copy()
            if version >= 0 and version == self.version[0]:
                nn.utils.vector_to_parameters(torch.from_numpy(flat), agent.parameters())
                return int(version)
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                raise SystemExit  # the learner was killed while it wrote


def send(connection, message: int | str) -> None:
    with suppress(OSError):  # the other side is gone, which receive notices
        connection.send(message)


def receive(connection) -> int | str | None:
    """The next message, None if the other side is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def act(index: int, args: Args, step: int, connection, parameters_memory, slots_memory) -> None:
    """The life of an actor process: fill the slots whose numbers come, and send the numbers back."""
    try:
        torch.set_num_threads(1)
        player = Player(args, index, step)
        agent, parameters = Agent(player.envs, args), Parameters(parameters_memory)
        slots = np.frombuffer(slots_memory, slot_dtype(player.envs, args))
        gc.freeze()
        while (message := receive(connection)) is not None:
            slots[message]["version"] = parameters.read(agent)
            player.play(agent, slots[message])
            send(connection, message)
    except Exception:
        send(connection, traceback.format_exc())


class Actors:
    """Actor processes and what they share with the learner, memory without a name that nobody can leave behind.

    Every actor has slots and a pipe of its own: its end tells each side that the other one died, whatever the cause.
    """

    def __init__(self, args: Args, agent: Agent, envs: gym.vector.VectorEnv, step: int):
        self.args, self.agent, dtype = args, agent, slot_dtype(envs, args)
        self.waited, self.ready, self.connections, self.processes = 0.0, deque(), [], []
        if args.num_actors == 0:
            self.player, self.slots = Player(args, 0, step), np.zeros(1, dtype)
            return
        context = multiprocessing.get_context("spawn")
        parameters_memory = context.RawArray("b", 8 + 4 * sum(p.numel() for p in agent.parameters()))
        slots_memory = context.RawArray("b", args.num_actors * SLOTS_PER_ACTOR * dtype.itemsize)
        self.parameters, self.slots = Parameters(parameters_memory), np.frombuffer(slots_memory, dtype)
        self.publish(version=0)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # actors share the cores already
        resource_tracker.ensure_running()  # which unblocks signals
        signals = {signal.SIGINT, signal.SIGTERM}  # are for the learner: actors keep what is blocked when they start
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            for i in range(args.num_actors):
                connection, theirs = context.Pipe()
                self.connections.append(connection)
                arguments = (i, args, step, theirs, parameters_memory, slots_memory)
                process = context.Process(target=act, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)
                theirs.close()  # so that the pipe ends with the process
                for k in range(1 if args.deterministic else SLOTS_PER_ACTOR):
                    send(connection, i * SLOTS_PER_ACTOR + k)
        except BaseException:  # too many processes or files
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def receive(self, i: int) -> int:
        """The number of a slot that actor i has filled; RuntimeError if it failed or died."""
        message, process = receive(self.connections[i]), self.processes[i]
        if message is None:
            process.join(5)
            raise RuntimeError(f"actor {i} (pid {process.pid}) died (exit code {process.exitcode})")
        if isinstance(message, str):
            raise RuntimeError(f"actor {i} failed:\n{message}")
        return message

    def take(self, version: int) -> list[tuple[int, np.ndarray]]:
        """(actor, slot) of the next full slot; if deterministic, of one from each actor. `version`: the agent's."""
        if self.args.num_actors == 0:
            self.slots["version"] = version
            self.player.play(self.agent, self.slots[0])
            return [(0, self.slots[0])]
        start = time.perf_counter()
        if self.args.deterministic:
            full = [self.receive(i) for i in range(self.args.num_actors)]
            self.publish(version)  # now that nobody reads
        else:
            if not self.ready:
                self.ready.extend(multiprocessing.connection.wait(self.connections))
            full = [self.receive(self.connections.index(self.ready.popleft()))]
        self.waited += time.perf_counter() - start
        copies = [(slot // SLOTS_PER_ACTOR, self.slots[slot].copy()) for slot in full]
        for (actor, _), slot in zip(copies, full):
            send(self.connections[actor], slot)  # so that it goes on while we learn
        return copies

    def publish(self, version: int) -> None:
        self.parameters.write(self.agent, version)

    def close(self) -> None:
        """End the actors: closed pipes tell them; who is still busy after two seconds is killed."""
        for connection in self.connections:
            connection.close()
        end = time.monotonic() + 2
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()


class Cutter:
    """Turns the unrolls of actors, which episodes cross, into unrolls that begin with each episode (--remainder)."""

    def __init__(self, args: Args):
        self.how, self.complete = args.remainder, []
        self.episodes = {}  # (actor, environment) -> its unroll before, the open one, steps in it

    def cut(self, actor: int, unrolls: np.ndarray) -> list[np.ndarray]:
        """The batches (N,) that are complete with `unrolls` (N,), the latest of an actor."""
        if self.how == "keep":
            return [unrolls]
        complete, (N, T) = self.complete, unrolls["reward"].shape
        for n, unroll in enumerate(unrolls):
            before, now, filled = self.episodes.get((actor, n), (None, np.zeros_like(unroll), 0))
            done, first = unroll["termination"] | unroll["truncation"], 0
            while first < T:
                length = min(T - filled, T - first)
                ends = np.flatnonzero(done[first : first + length])
                length = ends[0] + 1 if len(ends) else length
                copy_steps(now, filled, unroll, first, length)
                filled, first = filled + length, first + length
                if filled == T:
                    complete.append(now)
                    before, now, filled = now, np.zeros_like(unroll), 0
                if len(ends) and filled and self.how != "drop":
                    if self.how == "last" and before is not None:
                        now, rest = before.copy(), now
                        copy_steps(now, 0, before, filled, T - filled)
                        copy_steps(now, T - filled, rest, 0, filled)
                    complete.append(now)
                if len(ends):
                    before, now, filled = None, np.zeros_like(unroll), 0
            self.episodes[actor, n] = before, now, filled
        batches = [np.array(complete[i : i + N]) for i in range(0, len(complete) - N + 1, N)]
        del complete[: len(batches) * N]
        return batches


def copy_steps(target: np.ndarray, at: int, source: np.ndarray, first: int, length: int) -> None:
    """Write `length` steps of an unroll from `first` on into another one, with the observation that follows them."""
    for name in target.dtype.names:
        rows = length + (name == "obs")
        target[name][at : at + rows] = source[name][first : first + rows]


class Replay:
    """The latest unrolls (--replay-size), drawn evenly or by priority (Schaul et al. 2016)."""

    def __init__(self, args: Args, dtype: np.dtype):
        self.args, self.unrolls, self.count = args, np.zeros(args.replay_size, dtype), 0
        self.priority = torch.zeros(args.replay_size)

    def add(self, unrolls: np.ndarray) -> None:
        where = (self.count + np.arange(len(unrolls))) % len(self.unrolls)
        self.unrolls[where] = unrolls
        self.priority[where] = self.priority.max() if self.count else 1.0  # every unroll is likely to be drawn once
        self.count += len(unrolls)

    def sample(self) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """N unrolls, their places, and the weights of their losses."""
        share = self.priority[: self.count] ** (PRIORITY_ALPHA if self.args.priority else 0)
        where = torch.multinomial(share / share.sum(), self.args.num_envs, replacement=True)
        weight = (share[where] / share.sum() * len(share)) ** (-PRIORITY_BETA if self.args.priority_is_weight else 0)
        return self.unrolls[where], where, weight / weight.max()

    def state_dict(self) -> dict:
        bytes_ = torch.from_numpy(self.unrolls.view(np.uint8))
        return {"unrolls": bytes_, "priority": self.priority, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.unrolls.view(np.uint8)[:] = state["unrolls"].numpy()
        self.priority, self.count = state["priority"], state["count"]


def vtrace(log_rho, reward, value, next_value, done, gamma, lambda_, rho_clip, c_clip, pg_rho_clip):
    """Targets of the value function and advantages by V-trace (Espeholt et al. 2018, section 4), cut where done.

    Arrays (T, ...): log_rho, the log of the ratio of the policy that learns to the one that acted; value, of the
    observation before each step; next_value, of the one after it: 0 if the step terminated the episode, and the value
    of its final observation if it truncated it. Returns (T, ...), (T, ...).
    """
    rho, continues = np.exp(log_rho), ~done
    delta = np.minimum(rho, rho_clip) * (reward + gamma * next_value - value)
    decay = gamma * lambda_ * continues * np.minimum(rho, c_clip)
    error = delta  # of the value, v_s - V(x_s)
    for t in reversed(range(len(error) - 1)):
        error[t] += decay[t] * error[t + 1]
    return_ = value + error
    next_return = next_value.copy()
    next_return[:-1][continues[:-1]] = return_[1:][continues[:-1]]
    return return_, np.minimum(rho, pg_rho_clip) * (reward + gamma * next_return - value)


def impala_loss(agent: Agent, unrolls: np.ndarray, weight: torch.Tensor, args: Args):
    """The loss of a batch, its diagnostics (policy_loss, value_loss, entropy, approx_kl, clipfrac, explained_variance),
    and the mean value error of each unroll. unrolls: records (B,); weight: (B,), of each in the losses."""
    names, device = unrolls.dtype.names, next(agent.parameters()).device
    batch = {x: torch.from_numpy(unrolls[x].swapaxes(0, 1).copy()).to(device) for x in names}  # (T, B, ...)
    weight, real, done = weight.to(device), batch["mask"], batch["termination"] | batch["truncation"]

    log_probs = agent.actor(batch["obs"][:-1]).log_softmax(-1)  # (T, B, K)
    log_prob = log_probs.gather(-1, batch["action"][..., None]).squeeze(-1)
    value = agent.critic(batch["obs"]).squeeze(-1)  # (T + 1, B)
    with torch.no_grad():
        log_rho = log_prob - batch["log_prob"]
        next_value = value[1:] * ~batch["termination"]
        next_value[batch["truncation"]] = agent.critic(batch["final_obs"][batch["truncation"]]).squeeze(-1)
        arrays = (x.cpu().numpy() for x in (log_rho, batch["reward"], value[:-1], next_value, done))
        clips = args.rho_clip, args.c_clip, args.pg_rho_clip
        targets = vtrace(*arrays, args.gamma, args.vtrace_lambda, *clips)
        return_, advantage = (torch.from_numpy(x).to(device) for x in targets)

    def mean(x: torch.Tensor) -> torch.Tensor:  # over the steps that are not empty
        return (x * weight * real).sum() / real.sum()

    policy_loss = -mean(log_prob * advantage)
    value_loss = 0.5 * mean((value[:-1] - return_).square())
    entropy = -mean((log_probs.exp() * log_probs).sum(-1))
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    with torch.no_grad():
        error = (return_ - value[:-1]) * real
        approx_kl = (log_rho.exp() - 1 - log_rho)[real].mean()
        clipfrac = (log_rho.exp() > args.rho_clip)[real].float().mean()
        explained_variance = (1 - error[real].var() / return_[real].var()).nan_to_num(0, neginf=0)
        stats = torch.stack([policy_loss, value_loss, entropy, approx_kl, clipfrac, explained_variance])
        priority = error.abs().sum(0) / real.sum(0)
    return loss, stats, priority


def update(agent: Agent, optimizer: torch.optim.Optimizer, replay: Replay, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for N new unrolls; returns the mean diagnostics."""
    weight, all_stats = torch.ones(len(unrolls)), []
    if args.replay_size:
        replay.add(unrolls)
    for _ in range(args.updates_per_collect):
        if args.replay_size:
            unrolls, where, weight = replay.sample()
        loss, stats, priority = impala_loss(agent, unrolls, weight, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        all_stats.append(stats)
        if args.priority:
            replay.priority[where] = priority.cpu() + 1e-6
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
    return {f"train/{name}": x for name, x in zip(names, torch.stack(all_stats).mean(0).tolist())}


def main(args: Args) -> Path:
    """Train as `args` says; returns the run folder."""
    check_positive(args, "num_envs", "unroll_length", "updates_per_collect", "learning_rate", "torch_threads")
    check_positive(args, "checkpoint_interval", "max_grad_norm", "rho_clip", "c_clip", "pg_rho_clip")
    check(args.num_actors >= 0, f"--num-actors must be at least 0, not {args.num_actors}")
    check(0 <= args.gamma <= 1 and 0 <= args.vtrace_lambda <= 1, "--gamma and --vtrace-lambda must be in [0, 1]")
    message = f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}"
    check(args.rho_clip >= args.c_clip, message)
    message = f"--replay-size {args.replay_size} is less than a batch of --num-envs {args.num_envs} unrolls; 0 is none"
    check(args.replay_size == 0 or args.replay_size >= args.num_envs, message)
    check(not args.priority or args.replay_size > 0, "--priority needs a replay: --replay-size")
    check(not args.priority_is_weight or args.priority, "--priority-is-weight needs --priority")
    slot_steps = args.num_envs * args.unroll_length
    message = f"--total-timesteps {args.total_timesteps} is less than the {slot_steps} steps of one batch"
    check(args.total_timesteps >= slot_steps, message)
    device = find_device(args.device)
    seed_everything(args.seed, args.torch_threads)

    envs = make_envs(args, 1)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=ADAM_EPS, fused=True)
    replay, cutter = Replay(args, unroll_dtype(envs, args)), Cutter(args)
    num_updates = 0

    with (
        Run(args, __file__, agent=agent, optimizer=optimizer, replay=replay) as run,
        closing(Actors(args, agent, envs, run.step)) as actors,
    ):
        while run.step + slot_steps <= args.total_timesteps:
            for actor, slot in actors.take(num_updates):
                if run.step + slot_steps > args.total_timesteps:
                    break  # --deterministic takes one from every actor
                remaining = 1 - run.step / args.total_timesteps
                optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
                run.step += slot_steps
                ended = slot["ep_length"] > 0
                if ended.any():
                    run.log_episodes({"_episode": ended, "episode": {"r": slot["ep_return"], "l": slot["ep_length"]}})
                metrics = {"train/policy_lag": num_updates - slot["version"]}
                batches = cutter.cut(actor, slot["unrolls"])
                for unrolls in batches:
                    metrics |= update(agent, optimizer, replay, unrolls, args)
                    num_updates += args.updates_per_collect
                if batches and args.num_actors and not args.deterministic:
                    actors.publish(num_updates)
                metrics["train/learning_rate"] = optimizer.param_groups[0]["lr"]
                metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
                run.log(metrics)

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
