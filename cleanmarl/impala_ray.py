"""IMPALA as in impala.py, but its actors are Ray actors, on any number of machines, and learners may be several:

    ray start --head                                                  # on one machine
    ray start --address HOST:6379                                     # on others
    python cleanmarl/impala_ray.py --address auto --num-actors 64     # on any of them
    torchrun --nproc-per-node 4 cleanmarl/impala_ray.py --address auto --device cuda    # --num-actors for each

Each actor plays N environments for T steps with the parameters that come with the call, which it finds in the object
store of its machine, and returns the unrolls. The learner takes them as they come. Its parameters are newer than those
that acted, so V-trace weighs every step by the ratio of the two policies, clipped. An actor that dies, or whose machine
does, is replaced. Every learner has actors of its own; all step along the mean of their gradients, through NCCL on GPUs
and Gloo on CPUs, and so stay the same. The first one, alone, logs the episodes of its actors, saves and evaluates.

Paper: Espeholt et al. 2018 (arXiv:1802.01561). Needs the package ray; every machine needs this one too.
"""

import importlib
import os
import signal
import socket
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from cleanmarl.envs import make_gymnasium
from cleanmarl.run import Run, UsageError, check, check_positive, find_device, launch, seed_everything

CALLS_PER_ACTOR = 2  # one under way while the other waits, so that an actor need not wait for the learner
ADAM_EPS = 1e-2  # not 1e-8: what is solved has gradients of noise alone, and Adam would take full steps along them
MOST_DEATHS = 10  # of actors in a row, without an unroll between: then it is no accident


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the policy's samples and the environments"""
    device: str = "cpu"
    """torch device of the learner: cpu, or cuda for one GPU per learner; actors use the CPU"""
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

    address: str | None = None
    """of a Ray cluster: auto, or HOST:PORT; without one, Ray is started on this machine"""
    num_actors: int = 2
    """actors of each learner; each takes a CPU of the cluster"""
    deterministic: bool = False
    """take unrolls in the order in which they were asked for"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    num_envs: int = 16
    """N, environments of each actor; N unrolls are the batch of a learner"""
    unroll_length: int = 20
    """T, steps of each environment in one unroll"""
    updates_per_collect: int = 4
    """gradient steps for each batch that is collected"""
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
        message = f"impala_ray.py needs Discrete actions and {args.env_id} has {action_space}"
        check(isinstance(action_space, gym.spaces.Discrete), f"{message}; try impala_continuous_action.py")
        message = f"impala_ray.py needs actions counted from 0 and {args.env_id} has {action_space}"
        check(action_space.start == 0, message)
        message = f"impala_ray.py needs Box or Discrete observations and {args.env_id} has {obs_space}"
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
    ]
    return np.dtype(fields, align=True)


def slot_dtype(envs: gym.vector.VectorEnv, args: Args) -> np.dtype:
    """What an actor hands over at once: N unrolls, the version of their policy, and the episodes that ended."""
    T, N = args.unroll_length, args.num_envs
    fields = [("unrolls", unroll_dtype(envs, args), (N,)), ("version", np.int64)]
    fields += [("ep_return", np.float64, (T, N)), ("ep_length", np.int64, (T, N))]  # length 0: no end here
    return np.dtype(fields, align=True)


class Player:
    """N environments of their own seeds, played one unroll after another: a Ray actor."""

    def __init__(self, args: Args, seed: list[int]):
        torch.set_num_threads(1)
        self.args, self.rng = args, np.random.default_rng(seed)
        self.envs = make_envs(args, args.num_envs)
        self.agent, self.slot = Agent(self.envs, args), np.zeros(1, slot_dtype(self.envs, args))
        self.obs, _ = self.envs.reset(seed=int(self.rng.integers(2**31)))

    def play(self, parameters: tuple[int, np.ndarray]) -> np.ndarray:
        """The next T steps by these parameters, a version and a flat array; returns a slot_dtype (1,)."""
        agent, slot = self.agent, self.slot[0]
        slot["version"], flat = parameters
        nn.utils.vector_to_parameters(torch.from_numpy(flat.copy()), agent.parameters())
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
        unrolls["obs"][T] = self.obs
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        unrolls["log_prob"][:] = np.take_along_axis(log_probs, unrolls["action"][..., None], -1)[..., 0]
        return self.slot


class Actors:
    """Ray actors, the calls they have to answer, and the newest parameters in Ray's object store."""

    def __init__(self, ray, args: Args, agent: Agent, rank: int, step: int):
        self.ray, self.args, self.agent = ray, args, agent
        self.seed, self.num_deaths, self.deaths_in_a_row, self.waited = [args.seed, step, rank], 0, 0, 0.0
        self.remote, self.calls = ray.remote(num_cpus=1)(Player), {}  # call -> the actor that answers it
        self.publish(version=0)
        for index in range(args.num_actors):
            self.add(index)

    def add(self, index: int) -> None:
        """A new actor; every index gives it other seeds."""
        player = self.remote.remote(self.args, [*self.seed, index])
        for _ in range(CALLS_PER_ACTOR):
            self.calls[player.play.remote(self.parameters)] = player

    def take(self) -> np.void:
        """The unrolls of the next call that is answered, or, if deterministic, of the oldest; replaces dead actors."""
        start = time.perf_counter()
        while True:
            calls = list(self.calls)
            (call,), _ = self.ray.wait(calls[:1] if self.args.deterministic else calls)
            player = self.calls.pop(call)
            try:
                slot = self.ray.get(call)[0]
            except self.ray.exceptions.RayTaskError:
                raise  # it lives and says what is wrong
            except self.ray.exceptions.RayError as error:  # it died, or its machine, or the way there
                if getattr(error, "actor_init_failed", False):
                    raise  # no other one would begin, and it says why
                self.replace(player, error)
                continue
            self.calls[player.play.remote(self.parameters)] = player
            self.waited, self.deaths_in_a_row = self.waited + time.perf_counter() - start, 0
            return slot

    def replace(self, player, error: Exception) -> None:
        self.deaths_in_a_row += 1
        if self.deaths_in_a_row >= MOST_DEATHS:
            raise RuntimeError(f"{MOST_DEATHS} actors in a row died before they played") from error
        self.calls = {call: other for call, other in self.calls.items() if other is not player}
        self.ray.kill(player)  # if it is only out of reach, it shall not come back
        self.add(self.args.num_actors + self.num_deaths)
        self.num_deaths += 1

    def publish(self, version: int) -> None:
        flat = nn.utils.parameters_to_vector(self.agent.parameters()).detach().cpu().numpy()
        self.parameters = self.ray.put((version, flat))  # what the next calls get

    def close(self) -> None:
        self.ray.shutdown()  # which ends the actors


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


def impala_loss(agent: Agent, unrolls: np.ndarray, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch, and its diagnostics: policy_loss, value_loss, entropy, approx_kl, clipfrac,
    explained_variance. unrolls: records (B,)."""
    names, device = unrolls.dtype.names, next(agent.parameters()).device
    batch = {x: torch.from_numpy(unrolls[x].swapaxes(0, 1).copy()).to(device) for x in names}  # (T, B, ...)
    done = batch["termination"] | batch["truncation"]

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

    policy_loss = -(log_prob * advantage).mean()
    value_loss = 0.5 * (value[:-1] - return_).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    with torch.no_grad():
        approx_kl = (log_rho.exp() - 1 - log_rho).mean()
        clipfrac = (log_rho.exp() > args.rho_clip).float().mean()
        explained_variance = (1 - (return_ - value[:-1]).var() / return_.var()).nan_to_num(0, neginf=0)
        stats = torch.stack([policy_loss, value_loss, entropy, approx_kl, clipfrac, explained_variance])
    return loss, stats


def average(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all learners."""
    if dist.is_initialized():
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for x, mean in zip(tensors, flat.split([x.numel() for x in tensors])):
            x.copy_(mean.view_as(x))


def update(agent: Agent, optimizer: torch.optim.Optimizer, unrolls: np.ndarray, args: Args) -> dict:
    """--updates-per-collect gradient steps for N new unrolls; returns the mean diagnostics."""
    all_stats = []
    for _ in range(args.updates_per_collect):
        loss, stats = impala_loss(agent, unrolls, args)
        optimizer.zero_grad()
        loss.backward()
        average([p.grad for p in agent.parameters()] + [stats])
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        all_stats.append(stats)
    names = ["policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance"]
    return {f"train/{name}": x for name, x in zip(names, torch.stack(all_stats).mean(0).tolist())}


def connect(args: Args, world_size: int):
    """The package ray, connected to the cluster; UsageError if ray, the cluster or CPUs for all actors are missing."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("impala_ray.py needs the package ray: python bootstrap.py ray, or pip install ray") from error
    try:
        if args.address not in (None, "auto"):
            host, _, port = args.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        ray.init(address=args.address or "local", include_dashboard=False if args.address is None else None)
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no Ray cluster at --address {args.address}; begin one: ray start --head") from error
    num_cpus = int(ray.cluster_resources().get("CPU", 0))
    learners = world_size if args.address else 1
    message = (
        f"--num-actors {args.num_actors} of each of {learners} learners are more than the cluster's {num_cpus} CPUs"
    )
    if args.num_actors * learners > num_cpus:
        ray.shutdown()
        raise UsageError(message)
    return ray


class Follower:
    """Where the first learner has a Run, the others have this: it counts steps, and does nothing else."""

    step, folder, start_time = 0, None, 0.0

    def __enter__(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)  # the first learner decides when to stop
        return self

    def __exit__(self, *error):
        pass

    log_episodes = log = evaluate = lambda self, *args, **kwargs: None


def main(args: Args) -> Path | None:
    """Train as `args` says; returns the run folder, in the first learner."""
    check_positive(
        args, "num_actors", "num_envs", "unroll_length", "updates_per_collect", "learning_rate", "torch_threads"
    )
    check_positive(args, "checkpoint_interval", "max_grad_norm", "rho_clip", "c_clip", "pg_rho_clip")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    check(0 <= args.gamma <= 1 and 0 <= args.vtrace_lambda <= 1, "--gamma and --vtrace-lambda must be in [0, 1]")
    message = f"--rho-clip {args.rho_clip} must be at least --c-clip {args.c_clip}"
    check(args.rho_clip >= args.c_clip, message)
    slot_steps = args.num_envs * args.unroll_length * world_size
    message = f"--total-timesteps {args.total_timesteps} is less than the {slot_steps} steps of one batch"
    check(args.total_timesteps >= slot_steps, message)
    device = find_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if args.device == "cuda" else args.device)
    seed_everything(args.seed, args.torch_threads)

    envs = make_envs(args, 1)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=ADAM_EPS, fused=True)
    ray = connect(args, world_size)
    num_updates = 0

    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with Run(args, __file__, agent=agent, optimizer=optimizer) if rank == 0 else Follower() as run:
        if world_size > 1:  # what the first learner has resumed
            states = [run.step, agent.state_dict(), optimizer.state_dict()]
            dist.broadcast_object_list(states, device=device)
            run.step = states[0]
            agent.load_state_dict(states[1])
            optimizer.load_state_dict(states[2])
        with closing(Actors(ray, args, agent, rank, run.step)) as actors:
            while run.step + slot_steps <= args.total_timesteps:
                slot = actors.take()
                remaining = 1 - run.step / args.total_timesteps
                optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1)
                run.step += slot_steps
                ended = slot["ep_length"] > 0
                if ended.any():
                    run.log_episodes({"_episode": ended, "episode": {"r": slot["ep_return"], "l": slot["ep_length"]}})
                metrics = {"train/policy_lag": num_updates - slot["version"]}
                metrics |= update(agent, optimizer, slot["unrolls"], args)
                num_updates += args.updates_per_collect
                actors.publish(num_updates)
                metrics["train/learning_rate"] = optimizer.param_groups[0]["lr"]
                metrics["time/learner_wait"] = actors.waited / (time.perf_counter() - run.start_time)
                metrics["time/replaced_actors"] = actors.num_deaths
                code = torch.zeros(1, dtype=torch.int32, device=device)
                try:
                    run.log(metrics)
                except SystemExit as stopped:  # a signal came, and the state is saved: the others are to end as well
                    code += stopped.code
                if world_size > 1:
                    dist.broadcast(code, 0)
                if code.item():
                    sys.exit(code.item())

        run.evaluate(make_envs, make_policy(agent), num_envs=args.num_envs)
    if world_size > 1:
        dist.destroy_process_group()
    envs.close()
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
