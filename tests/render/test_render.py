"""Rendered episodes: choice of the episodes, poses of MuJoCo, page, films, and errors."""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
from browser import PHONE, needs_opengl, opened
from commands import SIZES, exit_code
from short_runs import trained
from toys import GUARDS_OFF

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.envs.episodes import Episodes
from rlstable.policy.playback import evaluate_run
from rlstable.policy.saved_run import open_run
from rlstable.render import film
from rlstable.render.__main__ import main
from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.render.framing import VIEW_ANGLE, Framing, frame_episode
from rlstable.render.page import page
from rlstable.render.recording import best_median_worst, record, record_random
from rlstable.render.scene import followed_body, make_scene, poses

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
SHAPES = """
<mujoco>
  <asset>
    <mesh name="pyramid" vertex="0 0 0  1 0 0  0 1 0  0 0 1"/>
    <hfield name="hills" nrow="3" ncol="4" size="2 1 0.5 0.1"/>
    <material name="red" rgba="1 0 0 1"/>
  </asset>
  <worldbody>
    <geom type="plane" size="0 0 1" pos="0 0 -0.5"/>
    <geom type="hfield" hfield="hills" pos="5 0 0"/>
    <body pos="0 0 1">
      <freejoint/>
      <geom type="box" size="0.1 0.2 0.3" material="red"/>
      <geom type="sphere" size="0.1" pos="1 0 0"/>
      <geom type="ellipsoid" size="0.1 0.2 0.3"/>
      <geom type="cylinder" size="0.1 0.2"/>
      <geom type="capsule" size="0.1 0.2" quat="0.7071068 0.7071068 0 0"/>
      <geom type="mesh" mesh="pyramid"/>
      <geom type="box" size="9 9 9" group="3"/>
      <geom type="box" size="9 9 9" rgba="0 0 0 0"/>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    env = {"name": "ball:Stick", "backend": "native", "episode_length": 40}
    trained(folder, total_steps=64, env=env, guards=GUARDS_OFF)
    return folder


@pytest.fixture(scope="module")
def recorded(run_dir: Path) -> RecordedEpisodes:
    return record(open_run(run_dir), 5)


@pytest.fixture
def aborted(recorded: RecordedEpisodes) -> RecordedEpisodes:
    """The same, but the last episode was aborted and the title contains HTML."""
    worst = recorded.recordings[-1]
    recordings = (*recorded.recordings[:-1], Recording(worst.name, worst.positions[:11], worst.rewards[:10], True))
    return RecordedEpisodes("</script><b>evil", recorded.model, recorded.seconds, recordings)


run = functools.partial(exit_code, main)


def episodes(returns: list[float], aborted: list[float]) -> Episodes:
    return Episodes({"reward": np.array(returns)}, np.ones(len(returns)), np.array(aborted))


def test_best_median_and_worst_episode_are_chosen() -> None:
    three = {"best": 1, "median": 2, "worst": 0}
    assert best_median_worst(episodes([3.0], [0])) == {"episode": 0}
    assert best_median_worst(episodes([1.0, 3.0], [0, 0])) == {"best": 1, "worst": 0}
    assert best_median_worst(episodes([1.0, 5.0, 3.0, 2.0, 4.0], [0] * 5)) == three
    assert best_median_worst(episodes([9.0, 5.0, 3.0], [1, 0, 0])) == three  # aborted is worse than any return
    assert best_median_worst(episodes([float("nan"), 5.0, 3.0], [0, 0, 0])) == three


def test_recordings_equal_the_evaluated_episodes(run_dir: Path, recorded: RecordedEpisodes) -> None:
    worth = evaluate_run(open_run(run_dir), 5)
    returns = sorted(worth.episodes.metrics["reward"], reverse=True)
    assert [one.name for one in recorded.recordings] == ["best", "median", "worst"]
    for recording, expected in zip(recorded.recordings, (returns[0], returns[2], returns[4]), strict=True):
        assert recording.total == pytest.approx(expected, rel=1e-4)
        assert recording.positions.shape == (41, recorded.model.nq)
        assert len(recording.rewards) == 40
    assert recorded.seconds == pytest.approx(0.02)
    assert recorded.title == "ball:Stick, native, step 64"


def test_poses_equal_those_of_mujoco(recorded: RecordedEpisodes) -> None:
    recording = recorded.recordings[0]
    found = poses(recorded.model, recording.positions)
    data = mujoco.MjData(recorded.model)
    data.qpos[:] = recording.positions[17]
    mujoco.mj_forward(recorded.model, data)
    np.testing.assert_allclose(found[17, :, :3], data.xpos, atol=1e-6)
    np.testing.assert_allclose(found[17, :, 3:], data.xquat, atol=1e-6)


def test_every_geom_becomes_triangles_of_the_right_size() -> None:
    model = mujoco.MjModel.from_xml_string(SHAPES)
    meshes, parts = make_scene(model, np.zeros((1, 3)))
    assert (followed_body(model), len(parts)) == (1, 1 + 1 + 1 + 1 + 1 + 3 + 1)  # the floor is no part
    for mesh in meshes:
        assert mesh.indices.max() < len(mesh.vertices) == len(mesh.normals)
        corners = mesh.vertices[mesh.indices].reshape(-1, 3, 3)
        faces = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        # Every triangle is seen from the side that its normals point to.
        shown = np.einsum("ij,ij->i", faces, mesh.normals[mesh.indices].reshape(-1, 3, 3).mean(axis=1))
        assert (shown >= -1e-6).all()
    boxes = [part for part in parts if part.body == 1 and np.allclose(part.scale, [0.1, 0.2, 0.3])]
    assert any(np.allclose(part.colour, [1, 0, 0, 1]) for part in boxes)
    capsule = parts[-4:-1]
    assert sorted(round(float(part.position[1]), 3) for part in capsule) == [-0.2, 0.0, 0.2]  # lies along y
    points = meshes[parts[0].mesh].vertices  # of the hills
    np.testing.assert_allclose([points[:, 0].min(), points[:, 0].max(), points[:, 1].max()], [-2, 2, 1])


def test_page_of_episodes_is_self_contained_and_escapes_html(aborted: RecordedEpisodes) -> None:
    text = page(aborted)
    assert "</script><b>" not in text and "&lt;/script&gt;&lt;b&gt;evil" in text
    assert not re.search(r"""(src|href)=["']|url\(|@import|https?://""", text)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert [episode["name"] for episode in data["episodes"]] == ["best", "median", "worst"]
    assert [episode["aborted"] for episode in data["episodes"]] == [False, False, True]
    assert data["floor"]["cell"] in (0.2, 0.5, 1.0) and data["title"] == "</script><b>evil"


def test_browser_draws_the_page_of_episodes(aborted: RecordedEpisodes, tmp_path: Path) -> None:
    path = tmp_path / "episodes.html"
    path.write_text(page(aborted))
    with opened(path, PHONE) as found:
        found.page.locator("#numbers", has_text="return").wait_for()
        assert found.page.locator("h1").inner_text() == "</script><b>evil"
        assert found.overflow == 0
        colours = """() => {
            const gl = document.getElementById("view").getContext("webgl2"), at = new Uint8Array(4), seen = new Set();
            for (let x = 0; x < gl.drawingBufferWidth; x += 7) for (let y = 0; y < gl.drawingBufferHeight; y += 7) {
                gl.readPixels(x, y, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, at); seen.add(at.join());
            }
            return seen.size;
        }"""
        assert found.page.evaluate(colours) > 20  # not one colour: the model, its shadow, the floor
        found.page.get_by_role("button", name="worst").click()
        plot = found.page.locator("#plot").bounding_box()
        found.page.mouse.click(plot["x"] + plot["width"] - 1, plot["y"] + 5)
        found.page.locator("#numbers", has_text="a guard tripped").wait_for()
        assert "step 10 of 10" in found.page.locator("#numbers").inner_text()
        found.page.screenshot(path=str(tmp_path / "page.png"))
        # Drawing in software may be told as slow; nothing else may be.
        assert found.requests == []
        assert [text for text in found.complaints if "GPU stall" not in text and "software" not in text.lower()] == []


@pytest.mark.slow
@needs_opengl
def test_film_has_the_right_length_and_shows_the_model(run_dir: Path, tmp_path: Path) -> None:
    import imageio_ffmpeg

    words = ("episodes=3", "format=both", "films=all", "width=320", "height=240", "--json")
    assert run(f"run={run_dir}", f"out={tmp_path}", *words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.mp4", "episodes.html", "median.mp4", "worst.mp4"]
    frames = imageio_ffmpeg.read_frames(str(tmp_path / "best.mp4"))
    facts = next(frames)
    assert facts["size"] == (320, 240) and facts["fps"] == 30
    pictures = [np.frombuffer(frame, np.uint8).reshape(240, 320, 3) for frame in frames]
    assert len(pictures) == pytest.approx(0.8 * 30 + 1 + 1 + 30, abs=1)  # 40 steps of 0.02 s, and the last one held
    assert 0.02 < np.mean(pictures[0].max(axis=2) < 140) < 0.3  # the robot and the letters; all else is light
    sky, floor = pictures[0][4, -4:].mean(axis=0), pictures[0][205, 4:8].mean(axis=0)
    assert sky.min() > 200 and floor.min() > 200
    assert np.abs(pictures[0].astype(int) - pictures[20]).mean() > 0.5  # something moves


@needs_opengl
def test_next_opengl_backend_is_tried_if_one_fails(
    recorded: RecordedEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(film, "_OPENGL_BACKENDS", ("nonsense", "osmesa"))
    film.write_film(recorded, recorded.recordings[0], tmp_path / "one.mp4", 64, 64)
    assert (tmp_path / "one.mp4").stat().st_size > 1000


def test_film_that_no_backend_draws_is_one_line_and_writes_no_file(
    recorded: RecordedEpisodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    with pytest.raises(ConfigError, match=r"^format: no film was drawn \(nonsense: .*format=html") as error:
        film.write_film(recorded, recorded.recordings[0], tmp_path / "one.mp4", 64, 64)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_missing_ffmpeg_is_reported_before_episodes_are_played(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(film.importlib.util, "find_spec", lambda name: None)
    assert run(f"run={run_dir}", "format=mp4") == 2
    said = capsys.readouterr().err
    assert install("render") in said and "playing" not in said


PUSHER = """
<mujoco>
  <worldbody>
    <body name="ball"><joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 1 0"/><geom size="0.1"/></body>
    <body name="arm">
      <joint name="turn" type="hinge" axis="0 0 1"/>
      <geom type="capsule" fromto="0 0 0 1 0 0" size="0.1"/>
    </body>
  </worldbody>
  <actuator><motor joint="turn"/></actuator>
</mujoco>
"""
RUNNER = PUSHER.replace('<motor joint="turn"', '<motor joint="slide"').replace(
    "<joint type", '<joint name="slide" type', 1
)


def compiled(text: str) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(text)


def in_picture(model: mujoco.MjModel, framing: Framing, moved: np.ndarray, aspect: float) -> np.ndarray:
    """Places of all bodies in the picture, `[T, nbody, 2]`; the edges are -1 and 1."""
    turn, tilt = math.radians(framing.azimuth), math.radians(framing.elevation)
    ahead = np.array([math.cos(tilt) * math.cos(turn), math.cos(tilt) * math.sin(turn), math.sin(tilt)])
    right = np.array([math.sin(turn), -math.cos(turn), 0.0])
    eyes = framing.targets - framing.distance(aspect) * ahead
    seen = moved[:, :, :3] - eyes[:, None]
    lens = math.tan(math.radians(VIEW_ANGLE / 2)) * (seen @ ahead)
    return np.stack([seen @ right / lens / aspect, seen @ np.cross(right, ahead) / lens], axis=-1)


def test_camera_follows_a_robot_but_not_an_object_that_a_robot_pushes() -> None:
    assert followed_body(compiled(PUSHER)) is None
    assert followed_body(compiled(RUNNER)) == 1
    assert followed_body(compiled(SHAPES)) == 1  # without motors, whatever travels is followed


@pytest.mark.parametrize("aspect", [4 / 3, 16 / 9, 0.5])
@pytest.mark.parametrize("text", [RUNNER, PUSHER])
def test_robot_stays_in_the_picture_and_fills_it(text: str, aspect: float) -> None:
    model = compiled(text)
    time = np.arange(200) * 0.05
    positions = np.stack([np.sin(time), *[0.4 * np.sin(3 * time)] * (model.nq - 1)], axis=1)
    if text is RUNNER:
        positions[:, 0] = 5 * time
    moved = poses(model, positions)
    framing = frame_episode(model, moved, 0.05)
    places = in_picture(model, framing, moved[:, 1:2] if text is RUNNER else moved[:, 1:], aspect)
    assert np.abs(places).max() < 0.9
    if text is RUNNER:
        steps = np.diff(framing.targets[:, 0])
        assert steps[50:150] == pytest.approx(0.25, abs=1e-6)  # as fast as the robot, without jerks
    else:
        assert np.ptp(framing.targets, axis=0).max() == 0.0  # the camera stands still
        assert np.ptp(places, axis=(0, 1)).max() > 0.3


# --- an environment with random actions


ARM = Path(__file__).parents[1] / "robot" / "models" / "arm.xml"
WORDS = ["env=robot_reach", f"env.xml={ARM}", *SIZES]


def test_robot_is_drawn_with_random_actions_before_any_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--json", "episodes=3", *WORDS) == 0
    (page,) = json.loads(capsys.readouterr().out)
    assert page["file"] == "runs/random/robot_reach/episodes.html"
    assert [one["episode"] for one in page["episodes"]] == ["best", "median", "worst"]
    assert "robot_reach, native, random actions" in (here / page["file"]).read_text()


def test_velocity_task_is_recorded_with_commands_and_velocities_on_its_course() -> None:
    words = ["env=robot_velocity", f"env.xml={ARM.with_name('quadruped.xml')}", *SIZES]
    _, recorded = record_random(words, 2)
    for one in recorded.recordings:
        assert one.motion is not None and one.motion.shape == (2, len(one.positions), 3)
        assert not one.motion[0].any() and one.motion[1, 1:].any()  # two seconds of standing come first
        assert one.start(0.1, recorded.seconds).motion.shape == (2, 6, 3)
    (episode, _) = json.loads(re.search(r'id="data">(.*?)</script>', page(recorded), re.S)[1])["episodes"]
    read = np.frombuffer(base64.b64decode(episode["motion"]), np.float32).reshape(2, -1, 3)
    np.testing.assert_array_equal(read, recorded.recordings[0].motion)


def test_seed_decides_the_random_actions() -> None:
    first, same, other = (record_random(WORDS, 1, seed)[1].recordings[0].positions for seed in (1, 1, 2))
    assert (first == same).all()
    assert not (first == other).all()


def test_page_has_of_large_uneven_ground_what_is_near_the_robot() -> None:
    spec = mujoco.MjSpec()
    spec.add_hfield(name="hills", size=[50, 50, 1, 1], nrow=501, ncol=501, userdata=np.arange(501.0**2) % 7)
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="hills", pos=[10, 0, 0])
    (mesh,), _ = make_scene(spec.compile(), np.array([[20.0, 30.0, 0.0], [20.1, 30.2, 0.0]]))
    centers = mesh.vertices.reshape(-1, 3, 3).mean(axis=1)[:, :2]
    assert len(centers) == 2 * 30 * 30  # two triangles for each sample within 3 m of the place, in the ground's frame
    np.testing.assert_allclose(centers.mean(axis=0), [10.0, 30.0], atol=0.2)
