"""enjoy.py on real run folders: numbers, greedy and sampled actions, films, and what it says of other folders."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cleanmarl
from cleanmarl import enjoy, ippo, ippo_per_agent, ppo, ppo_atari_envpool
from cleanmarl.envs import EnvError, lbf
from cleanmarl.evaluate import Film, FilmError, Window, evaluate
from cleanmarl.run import EVAL_SEED, UsageError, load_checkpoint, write_checkpoint

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from optional import need, needs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MOVIEPY = needs("moviepy")


class Lever(gym.Env):
    """Ten pulls an episode; action 1 is worth 1, action 0 nothing."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.t, self.render_mode = 0, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), float(action), False, self.t == 10, {}


gym.register("Lever-v0", Lever)


@pytest.fixture(scope="module")
def ppo_run(tmp_path_factory) -> Path:
    runs_dir = str(tmp_path_factory.mktemp("ppo"))
    return ppo.main(ppo.Args(total_timesteps=256, num_envs=1, num_steps=128, eval_episodes=3, runs_dir=runs_dir))


@pytest.fixture(scope="module")
def ippo_run(tmp_path_factory) -> Path:
    """With the normalisers, whose statistics play a part in what the policies do."""
    return ippo_per_agent.main(
        ippo_per_agent.Args(
            total_timesteps=1000,
            num_envs=1,
            num_steps=100,
            eval_episodes=3,
            normalize_obs=True,
            runs_dir=str(tmp_path_factory.mktemp("ippo")),
        )
    )


@pytest.fixture
def run_folder(request) -> Path:
    return request.getfixturevalue(request.param)


def last_values(folder: Path) -> dict[str, float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


def test_a_run_on_a_gpu_is_played_on_the_cpu(tmp_path):
    """--bf16 auto asks what the device can do, and this machine need not have the run's."""
    need("envpool")
    small = {"total_timesteps": 16, "num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 1}
    folder = ppo_atari_envpool.main(ppo_atari_envpool.Args(**small, eval_episodes=0, runs_dir=str(tmp_path)))
    meta = json.loads((folder / "args.json").read_text())
    meta["args"] |= {"device": "cuda:99", "bf16": "auto"}
    (folder / "args.json").write_text(json.dumps(meta))
    policy = cleanmarl.load(folder, num_envs=2)
    obs, info = policy.envs.reset(seed=1)
    assert policy(obs, info, np.ones(2, bool)).shape == (2,) and policy.args.device == "cuda:99"
    policy.envs.close()
    assert enjoy.main(enjoy.Args(folder, episodes=1))["eval/ep_length"] > 0


@pytest.mark.parametrize("run_folder", ["ppo_run", "ippo_run"], indirect=True)
def test_greedy_play_equals_the_evaluation_of_the_run(run_folder, capsys):
    metrics = enjoy.main(enjoy.Args(run_folder, episodes=3, greedy=True, seed=1 + EVAL_SEED))
    of_run = {tag: value for tag, value in last_values(run_folder).items() if tag.startswith("eval/")}
    assert metrics == {tag: pytest.approx(value, rel=1e-6) for tag, value in of_run.items()}

    lines = capsys.readouterr().out.splitlines()
    mean, std, length = (metrics[f"eval/{name}"] for name in ("ep_reward", "std_ep_reward", "ep_length"))
    step = load_checkpoint(run_folder)["step"]
    env_id, name = ("mpe/simple_spread_v3", "ippo_per_agent") if len(metrics) > 3 else ("CartPole-v1", "ppo")
    assert lines[0] == f"{env_id}, {name} at step {step:,}, 3 episodes"
    assert lines[1] == f"return {mean:.2f} ± {std:.2f}, length {length:.1f}"
    agents = [f"  {key.removeprefix('eval/')} {value:.2f}" for key, value in metrics.items() if "_agent_" in key]
    assert lines[2:] == agents and len(agents) == (3 if name == "ippo_per_agent" else 0)


def test_greedy_and_sampled(tmp_path, capsys):
    """A policy that pulls the lever three times out of four."""
    folder = ppo.main(ppo.Args(env_id="Lever-v0", total_timesteps=512, eval_episodes=0, runs_dir=str(tmp_path)))
    checkpoint = load_checkpoint(folder)
    actor = {key: x for key, x in checkpoint["modules"]["agent"].items() if key.startswith("actor.4")}
    actor["actor.4.weight"].zero_()
    actor["actor.4.bias"][:] = torch.tensor([0.25, 0.75]).log()
    write_checkpoint(checkpoint, folder / "checkpoint.pt")

    enjoy.main(enjoy.Args(folder, episodes=5, greedy=True))
    assert "return 10.00 ± 0.00, length 10.0\n" in capsys.readouterr().out
    metrics = enjoy.main(enjoy.Args(folder, episodes=100))
    assert 7 < metrics["eval/ep_reward"] < 8 and 1 < metrics["eval/std_ep_reward"] < 1.8  # 7.5 and 1.37
    assert enjoy.main(enjoy.Args(folder, episodes=100)) == metrics  # by seed
    assert enjoy.main(enjoy.Args(folder, episodes=100, seed=2)) != metrics


@MOVIEPY
@pytest.mark.parametrize(
    "run_folder, suffix", [("ppo_run", ".gif"), ("ppo_run", ".mp4"), ("ippo_run", ".gif")], indirect=["run_folder"]
)
def test_film(run_folder, suffix, tmp_path, capsys):
    from moviepy import VideoFileClip

    path = tmp_path / "new" / f"film{suffix}"
    metrics = enjoy.main(enjoy.Args(run_folder, episodes=1, video=path))
    assert f"video: {path}" in capsys.readouterr().out
    assert path.read_bytes()[: 6 if suffix == ".gif" else 8][-4:] in (b"F89a", b"ftyp")
    with VideoFileClip(str(path)) as clip:
        frames = [frame.copy() for frame in clip.iter_frames()]
        fps = 50 if run_folder.name.startswith("CartPole") else 10  # as the environments say
        assert suffix == ".gif" or clip.fps == fps
    assert frames[0].ndim == 3 and frames[0].std() > 0
    ends = len(frames) - metrics["eval/ep_length"]  # half a second; a GIF may have one picture for them
    assert abs(ends - fps // 2) <= 2 or (suffix == ".gif" and -2 <= ends <= fps // 2)
    assert any(not np.array_equal(frames[0], frame) for frame in frames[1:])  # something moves


@MOVIEPY
def test_film_at_the_end_of_training(tmp_path):
    args = ppo.Args(total_timesteps=512, eval_episodes=0, capture_video=True, runs_dir=str(tmp_path))
    folder = ppo.main(args)
    assert (folder / "videos" / "step-512.mp4").stat().st_size > 1000


@MOVIEPY
def test_a_copy_outside_the_package_trains_resumes_and_is_played_as_it_was(tmp_path):
    """With another network, and a module of its own beside it."""
    source = Path(ppo.__file__).read_text()
    (tmp_path / "my_layers.py").write_text("from torch.nn import GELU as Activation\n")
    copy = tmp_path / "my-ppo.v2.py"
    edited = source.replace("nn.Tanh()", "Activation()")
    copy.write_text(
        edited.replace("import torch.nn as nn\n", "import torch.nn as nn\nfrom my_layers import Activation\n")
    )

    def run(*command: str, cwd: Path = tmp_path) -> str:
        result = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout

    small = ["--num-envs", "1", "--num-steps", "64", "--eval-episodes", "2"]
    out = run("my-ppo.v2.py", *small, "--total-timesteps", "128")
    folder = tmp_path / re.search(r"run folder: (\S+)", out)[1]
    assert (folder / "my-ppo.v2.py").read_text() == copy.read_text()
    assert "resumed at step 128" in run("my-ppo.v2.py", "--resume", str(folder), "--total-timesteps", "192")
    evaluation = re.search(r"return .*?, length", run("-m", "cleanmarl.enjoy", str(folder), "--greedy"))[0]

    copy.write_text(source)  # who goes on editing changes nothing for the run that is there
    film = tmp_path / "film.gif"
    again = run("-m", "cleanmarl.enjoy", str(folder), "--greedy", "--video", str(film), cwd=Path("/"))
    assert evaluation in again and "my-ppo.v2 at step" in again and film.stat().st_size > 1000
    other = tmp_path / "other" / "my_layers.py"
    other.parent.mkdir()
    other.write_text("from torch.nn import Tanh as Activation\n")
    code = f"import my_layers, cleanmarl; cleanmarl.load({str(folder)!r})"  # of another project: never without a word
    result = subprocess.run([sys.executable, "-c", code], cwd=other.parent, capture_output=True, text=True, timeout=120)
    assert f"of {tmp_path / 'my_layers.py'}, and this process has imported {other}" in result.stderr.splitlines()[-1]
    (tmp_path / "my_layers.py").unlink()
    command = [sys.executable, "-m", "cleanmarl.enjoy", str(folder)]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "my-ppo.v2.py cannot be imported: ModuleNotFoundError: No module named 'my_layers'" in result.stderr
    assert "(the run was begun in /" in result.stderr


class Plain(gym.Env):
    """An environment that shows nothing and takes no options."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self):
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 1.0, self.time == 5, False, {}


gym.register("Plain-v0", Plain)


def test_a_copy_may_give_its_policy_another_argument(tmp_path):
    """Whether it is greedy is said by name: in the place of an argument before it, it would be something else."""
    source, count = re.subn(
        r"(def make_policy\(agent: Agent), ", r"\1, scale: float = 1.0, ", Path(ppo.__file__).read_text()
    )
    assert count == 1
    (tmp_path / "scaled_ppo.py").write_text(source)
    command = [sys.executable, "scaled_ppo.py", "--total-timesteps", "512", "--eval-episodes", "0"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (run,) = (tmp_path / "runs").iterdir()
    for greedy in (True, False):  # of a policy that knows little yet
        actions = cleanmarl.load(run, greedy=greedy)(np.zeros((200, 4), np.float32), {}, np.ones(200, bool))
        assert len({*actions.tolist()}) == (1 if greedy else 2)


def test_a_file_that_an_agent_reads_is_looked_for_beside_the_kept_copy(tmp_path):
    source = Path(ppo.__file__).read_text()
    begin = "        super().__init__()\n"
    assert begin in source
    read = """        torch.load(Path(__file__).with_name("trunk.pt"), weights_only=True)\n"""
    (tmp_path / "trunk_ppo.py").write_text(source.replace(begin, begin + read, 1))
    torch.save({}, tmp_path / "trunk.pt")
    command = [sys.executable, "trunk_ppo.py", "--total-timesteps", "512", "--eval-episodes", "0"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (run,) = (tmp_path / "runs").iterdir()
    line = f"Agent of {run}/trunk_ppo.py reads {run}/trunk.pt, which is not there: give its whole path, in a flag"
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        cleanmarl.load(run)


@MOVIEPY
def test_an_environment_without_pictures_trains_and_can_be_played(tmp_path, capsys):
    args = ppo.Args(env_id="Plain-v0", total_timesteps=512, eval_episodes=2, runs_dir=str(tmp_path), capture_video=True)
    folder = ppo.main(args)
    assert "no video: Plain-v0 cannot be built with {'render_mode': 'rgb_array'}" in capsys.readouterr().out
    assert (folder / "done.json").exists() and not list(folder.rglob("*.mp4"))
    assert enjoy.main(enjoy.Args(folder, episodes=2))["eval/ep_reward"] == 5
    with pytest.raises(EnvError, match="cannot be built"):
        enjoy.main(enjoy.Args(folder, episodes=2, video=tmp_path / "a.gif"))
    with pytest.raises(UsageError, match="one of the two"):
        enjoy.main(enjoy.Args(folder, video=tmp_path / "a.gif", render=True))


@pytest.mark.parametrize("run_folder", ["ppo_run", "ippo_run"], indirect=True)
def test_render_in_a_window(run_folder, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a window that nobody sees
    start = time.monotonic()
    length = enjoy.main(enjoy.Args(run_folder, episodes=1, render=True, fps=100))["eval/ep_length"]
    assert time.monotonic() - start >= length / 100


def test_who_closes_the_window_stops(monkeypatch):
    import pygame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    window = Window("title")
    frame = np.random.default_rng(1).integers(256, size=(20, 30, 3), dtype=np.uint8)
    window.append(frame)
    np.testing.assert_array_equal(pygame.surfarray.array3d(pygame.display.get_surface()).swapaxes(0, 1), frame)
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    with pytest.raises(KeyboardInterrupt):
        window.append(frame)
    pygame.display.quit()


def test_render_without_a_display_names_the_other_way(ippo_run):
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")}
    line = [sys.executable, "-m", "cleanmarl.enjoy", str(ippo_run), "--render"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 2 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("enjoy:")]  # SDL may say a word of its own
    assert len(said) == 1 and said[0].startswith("enjoy: --render finds no display")
    assert said[0].endswith("--video FILM.gif films the episodes instead")


@MOVIEPY
@pytest.mark.parametrize("env_id", ["lbf/Foraging-8x8-2p-2f-coop-v3", "rware/rware-tiny-2ag-v2?max_steps=20"])
def test_films_that_their_packages_make_on_a_display_only(env_id, tmp_path, monkeypatch, capsys):
    need(*(["lbforaging"] if env_id.startswith("lbf") else ["rware"]))
    monkeypatch.delenv("DISPLAY", raising=False)
    args = {"num_envs": 2, "num_steps": 20, "num_minibatches": 1, "total_timesteps": 40, "eval_episodes": 0}
    folder = ippo.main(ippo.Args(env_id=env_id, capture_video=True, runs_dir=str(tmp_path), **args))
    assert "no video" not in capsys.readouterr().out
    assert (folder / "videos" / "step-40.mp4").stat().st_size > 1000 and (folder / "done.json").exists()


def test_pictures_of_foraging_show_what_is_where():
    need("lbforaging")
    envs = lbf.make("Foraging-5x5-2p-1f-v3", 2, render_mode="rgb_array")
    envs.reset(seed=1)
    envs.food[0], envs.position[0] = (1, 3), ((4, 0), (2, 2))
    frame = envs.render().astype(int)
    assert frame.shape == (200, 200, 3)
    places = [(1, 3), (4, 0), (2, 2), (0, 0)]
    green, first, second, nothing = (frame[row * 40 + 11, column * 40 + 11] for row, column in places)
    assert green[1] > green[0] + 50 and green[1] > green[2] + 50
    assert (nothing > 240).all() and (first < 240).any() and (second < 240).any() and (first != second).any()


class Blind(Plain):
    """One whose package lacks a picture, as envpool lacks that of Jumanji's foraging."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        raise FileNotFoundError("Failed to load image: agent.png\nin some folder")


class Canvas(Blind):
    """One that draws into the same canvas each time, with a fourth channel, as Matplotlib has it."""

    canvas = np.zeros((48, 64, 4), np.uint8)

    def render(self):
        self.canvas += 1
        return self.canvas


class Grey(Blind):
    def render(self):
        return np.zeros((48, 64), np.uint8)


gym.register("Blind-v0", Blind)
gym.register("Canvas-v0", Canvas)
gym.register("Grey-v0", Grey)


def test_pictures_are_copies_without_a_fourth_channel():
    envs = ppo.make_envs(ppo.Args(env_id="Canvas-v0"), 1, render_mode="rgb_array")
    frames = []
    evaluate(envs, lambda obs, info, done: np.zeros(1, np.int64), 1, frames=frames)
    shown = [frame[0, 0, 0] for frame in frames]
    assert all(frame.shape == (48, 64, 3) for frame in frames) and len(set(shown)) > 5


@MOVIEPY
def test_a_picture_of_another_form_costs_no_run(tmp_path, capsys):
    args = ppo.Args(env_id="Grey-v0", total_timesteps=512, eval_episodes=2, runs_dir=str(tmp_path), capture_video=True)
    folder = ppo.main(args)
    line = "no video: no picture of the environment: it draws uint8 of shape (48, 64), and not uint8 of shape (height,"
    assert line in capsys.readouterr().out and (folder / "done.json").exists()


@MOVIEPY
def test_a_film_that_fails_costs_no_run(tmp_path, capsys):
    args = ppo.Args(env_id="Blind-v0", total_timesteps=512, eval_episodes=2, runs_dir=str(tmp_path), capture_video=True)
    folder = ppo.main(args)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "video" in line] == ["no video: no picture of the environment: in some folder"]
    assert (folder / "done.json").exists() and not list(folder.rglob("*.mp4"))
    with pytest.raises(FilmError, match="no picture of the environment: in some folder"):
        enjoy.main(enjoy.Args(folder, episodes=1, video=tmp_path / "a.gif"))


@MOVIEPY
def test_films_during_training_change_nothing(tmp_path):
    def train(**flags) -> tuple[Path, dict]:
        folder = ppo.main(ppo.Args(total_timesteps=1536, eval_episodes=0, runs_dir=str(tmp_path), **flags))
        return folder, load_checkpoint(folder)["modules"]["agent"]

    folder, agent = train(capture_video=True, video_interval=512)
    _, plain = train()
    assert sorted(path.name for path in (folder / "videos").iterdir()) == [f"step-{n}.mp4" for n in (1024, 1536, 512)]
    assert all(torch.equal(agent[key], plain[key]) for key in plain)


def test_command(ppo_run, tmp_path):
    def command(*flags):
        line = [sys.executable, "-m", "cleanmarl.enjoy", *map(str, flags)]
        return subprocess.run(line, capture_output=True, text=True, timeout=120)

    done = command(ppo_run, "--episodes", 2, "--greedy")
    assert done.returncode == 0 and not done.stderr
    assert re.search(r"^return \d+\.\d\d ± \d+\.\d\d, length \d+\.\d$", done.stdout, re.MULTILINE)
    done = command(tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"enjoy: {tmp_path} is not a run folder: it has no readable args.json\n"


def test_a_checkpoint_may_be_named_by_its_path(ppo_run):
    """As --resume takes it."""
    enjoy.main(enjoy.Args(ppo_run / "checkpoint.pt", episodes=1))
    with pytest.raises(UsageError, match=r"has no other\.pt"):
        enjoy.main(enjoy.Args(ppo_run / "other.pt", episodes=1))


def test_the_command_that_a_run_ends_with_can_be_pasted(tmp_path, capsys):
    runs = str(tmp_path / "my runs")
    ppo.main(ppo.Args(total_timesteps=64, num_envs=1, num_steps=64, eval_episodes=0, runs_dir=runs))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  play:   python ")]
    done = subprocess.run(f"{sys.executable} {line.partition('python ')[2]} --episodes 1", shell=True)
    assert done.returncode == 0


def test_what_cannot_be_played(ppo_run, tmp_path):
    def refused(**changes) -> str:
        with pytest.raises(UsageError) as error:
            enjoy.main(enjoy.Args(**{"run_dir": folder} | changes))
        assert "\n" not in str(error.value)
        return str(error.value)

    meta = json.loads((ppo_run / "args.json").read_text())
    folder = tmp_path
    assert "not a run folder" in refused(run_dir=tmp_path / "nowhere")
    assert "not a run folder" in refused(run_dir=ppo_run / "args.json")
    (folder / "args.json").write_text("{")
    assert f"{folder}/args.json is damaged (" in refused()
    for text in ("[1, 2]", '{"script": "ppo"}', '"ppo"'):
        (folder / "args.json").write_text(text)
        assert "not a run folder" in refused(), text
    (folder / "args.json").write_text(json.dumps(meta | {"args": [1]}))
    assert "not a run folder" in refused()
    (folder / "args.json").write_text(json.dumps(meta | {"script": "run"}))
    assert "is no script that can be played" in refused()
    (folder / "args.json").write_text(json.dumps(meta))
    assert "has no checkpoint.pt" in refused()
    (folder / "checkpoint.pt").write_text("not what torch saves")
    assert "is damaged" in refused()
    (folder / "checkpoint.pt").write_bytes((ppo_run / "checkpoint.pt").read_bytes()[:1000])
    assert "checkpoint.pt" in refused()  # damaged
    (folder / "args.json").write_text(json.dumps(meta | {"script": "no_such_script"}))
    assert "no_such_script" in refused()
    (folder / "args.json").write_text(json.dumps(meta | {"args": meta["args"] | {"no_such_flag": 1}}))
    assert "no_such_flag" in refused()
    folder = ppo_run
    assert "--episodes" in refused(episodes=0)
    assert "--seed must be in [0, 4294967296), not -1" in refused(seed=-1)
    assert "--seed must be in [0, 4294967296), not " in refused(seed=2**64)
    assert ".mp4 or .gif" in refused(video=Path("film.avi"))


def test_film_without_moviepy(ppo_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)  # Python's own way to say that a package is not there
    with pytest.raises(UsageError, match="needs the package moviepy: pip install moviepy"):
        enjoy.main(enjoy.Args(ppo_run, episodes=1, video=tmp_path / "film.gif"))
    assert not list(tmp_path.iterdir())


def test_a_film_is_a_list_of_pictures_that_takes_little_memory():
    rng = np.random.default_rng(0)
    pictures = [np.kron(rng.integers(256, size=(4, 6, 3), dtype=np.uint8), np.ones((100, 100, 1), np.uint8))]
    pictures += [np.ascontiguousarray(pictures[0][::-1])]
    film = Film()
    for picture in pictures:
        film.append(picture[:, ::-1])  # a view
    assert len(film) == 2 and all(np.array_equal(x, y[:, ::-1]) for x, y in zip(film, pictures, strict=True))
    assert np.array_equal(film[-1], pictures[1][:, ::-1])
    assert sum(len(data) for _, data in list.__iter__(film)) < sum(picture.nbytes for picture in pictures) / 20


def test_an_evaluation_of_no_episode_is_refused():
    with pytest.raises(UsageError, match="1 episode or more, not 0"):
        evaluate(None, None, 0)


def test_a_checkpoint_that_is_dropped_meanwhile_is_no_matter(tmp_path):
    """A name without a file is what a run leaves that drops an older checkpoint just now."""
    args = ppo.Args(total_timesteps=64, num_envs=2, num_steps=32, eval_episodes=0, runs_dir=str(tmp_path))
    folder = ppo.main(args)
    (folder / "checkpoint-5.pt").symlink_to("nowhere.pt")
    assert load_checkpoint(folder)["step"] == 64
    (folder / "checkpoint.pt").write_bytes(b"cut off")
    with pytest.raises(UsageError, match=r"checkpoint.pt is damaged(?!.*checkpoint-5)"):
        load_checkpoint(folder)


def test_a_copy_that_has_the_name_of_a_script_of_the_package_is_played_as_it_was(ppo_run, tmp_path):
    """As of who edits ppo.py in its place, and updates the package later."""
    edited = tmp_path / "edited"
    shutil.copytree(ppo_run, edited)
    (edited / "ppo.py").write_text((ppo_run / "ppo.py").read_text().replace("nn.Tanh()", "nn.ReLU()"))
    assert ["ReLU" in str(cleanmarl.load(run).agent) for run in (ppo_run, edited)] == [False, True]
