"""Exported policies: they act like the policy, need no rlstable, and contain their metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
import pytest
from commands import exit_code
from short_runs import trained
from toys import GUARDS_OFF

from rlstable.config import ConfigError
from rlstable.export import formats
from rlstable.export.__main__ import main
from rlstable.export.function import policy_function
from rlstable.policy.policy import load_policy
from rlstable.policy.saved_run import open_run

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
GAUSSIAN = {"distribution_type": "normal", "noise_std_type": "log", "mean_clip_scale": 2.0}
NAMED = {"env": {"name": "toys:NamedPointMass"}, "network": {"value_obs_key": "privileged_state"}}
NETWORKS = [
    pytest.param({"network": GAUSSIAN | {"activation": "elu"}}, id="normal elu", marks=pytest.mark.slow),
    pytest.param(NAMED | {"ppo": {"normalize_observations": False}}, id="named, not normalised"),
    pytest.param(
        {
            "network": GAUSSIAN | {"policy_layer_norm": True, "state_dependent_std": True},
            "precision": {"network": "bfloat16"},
        },
        id="layer norm, bfloat16",
    ),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run")).run_dir


run = functools.partial(exit_code, main)


def onnx_actions(path: Path, observations: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(path).run(["action"], {"observation": observations})[0])


def test_exported_files_act_like_the_policy(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"run={run_dir}", f"out={tmp_path}", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert [Path(one["file"]).name for one in written] == ["policy.stablehlo", "policy.onnx"]
    observations = np.random.default_rng(3).normal(size=(1000, 4)).astype(np.float32) * 5
    expected = np.asarray(load_policy(run_dir).act(observations))
    np.testing.assert_allclose(onnx_actions(tmp_path / "policy.onnx", observations), expected, atol=1e-5)
    loaded = jax.export.deserialize(bytearray((tmp_path / "policy.stablehlo").read_bytes()))
    np.testing.assert_allclose(loaded.call(observations), expected, atol=1e-5)
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    for one in written:
        assert one["difference"] <= 1e-5 and one["bytes"] == Path(one["file"]).stat().st_size


@pytest.mark.parametrize("sections", NETWORKS)
def test_every_kind_of_network_is_exported(sections: dict[str, Any], tmp_path: Path) -> None:
    function = policy_function(open_run(trained(tmp_path / "run", guards=GUARDS_OFF, **sections).run_dir))
    onnx, stablehlo = tmp_path / "policy.onnx", tmp_path / "policy.stablehlo"
    assert formats.write_onnx(function, onnx).difference <= 1e-5
    assert formats.write_stablehlo(function, stablehlo).difference <= 1e-5
    assert onnx_actions(onnx, function.samples[:7]).shape == (7, 2)
    trained_in = sections.get("precision", {}).get("network", "float32")
    assert function.metadata["precision"] == {"computes_in": "float32", "trained_in": trained_in}
    own = np.asarray(
        load_policy(tmp_path / "run").act({"state": function.samples} if "env" in sections else function.samples)
    )
    close = 1e-5 if trained_in == "float32" else 0.1  # bfloat16 has three digits, and some samples are large
    np.testing.assert_allclose(onnx_actions(onnx, function.samples), own, atol=close)


def test_recurrent_policy_is_exported_with_its_state_as_input_and_output(tmp_path: Path) -> None:
    trained(tmp_path / "run", guards=GUARDS_OFF, network={"recurrent": "gru", "recurrent_size": 6})
    assert run(f"run={tmp_path / 'run'}", f"out={tmp_path}") == 0
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    loaded = jax.export.deserialize(bytearray((tmp_path / "policy.stablehlo").read_bytes()))
    policy = load_policy(tmp_path / "run")
    carry, memory = policy.start((3,)), np.zeros((3, 6), np.float32)
    for observations in np.random.default_rng(3).normal(size=(5, 3, 4)).astype(np.float32):
        expected, carry = policy.step(carry, observations)
        again = loaded.call(observations, memory)
        action, memory = session.run(["action", "new_memory"], {"observation": observations, "memory": memory})
        for ours, one, other in zip((expected, carry.memory), (action, memory), again, strict=True):
            np.testing.assert_allclose(one, ours, atol=1e-5)
            np.testing.assert_allclose(other, ours, atol=1e-5)
    assert np.abs(memory).max() > 0.01
    described = json.loads((tmp_path / "policy.json").read_text())["memory"]
    assert described == {"input": "memory", "output": "new_memory", "size": 6, "at_reset": 0.0}
    with pytest.raises(ValueError, match="act: this policy is recurrent"):
        policy.act(observations)
    bad, after = policy.step(carry, np.full((3, 4), np.nan, np.float32))
    assert np.isfinite(bad).all() and np.array_equal(after.memory, carry.memory)


def test_onnx_file_contains_its_metadata(run_dir: Path, tmp_path: Path) -> None:
    import onnx

    assert run(f"run={run_dir}", f"out={tmp_path}") == 0
    model = onnx.load(tmp_path / "policy.onnx")
    texts = {entry.key: entry.value for entry in model.metadata_props}
    beside = json.loads((tmp_path / "policy.json").read_text())
    assert texts["env"] == beside["env"] == "toys:PointMass"
    assert json.loads(texts["action"]) == beside["action"] == {"output": "action", "size": 2, "range": [-1.0, 1.0]}
    observation = json.loads(texts["observation"])
    assert (observation["input"], observation["size"], observation["key"]) == ("observation", 4, None)
    assert len(observation["mean"]) == len(observation["std"]) == 4
    assert json.loads(texts["config"])["ppo"]["num_envs"] == 8
    assert "rlstable" in json.loads(texts["versions"])
    shape = model.graph.input[0].type.tensor_type.shape.dim
    assert shape[0].dim_param and shape[1].dim_value == 4
    text = (tmp_path / "policy.onnx").read_bytes()
    assert str(Path(__file__).parent).encode() not in text  # no path of this machine


def test_file_that_differs_from_the_policy_is_not_written(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "TOLERANCE", -1.0)
    function = policy_function(open_run(run_dir))
    for write in (formats.write_onnx, formats.write_stablehlo):
        with pytest.raises(ConfigError, match=r"differs from the policy by .*; it was not written"):
            write(function, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_policy_with_steep_outputs_is_exported(run_dir: Path, tmp_path: Path) -> None:
    """Rounding changes its actions by more than 1e-5, in the policy as in the file."""
    saved = open_run(run_dir)
    layers = saved.policy.params["policy"]["params"]
    last = max(layers)
    steep = {**layers, last: jax.tree.map(lambda x: 30.0 * x, layers[last])}
    params = {"policy": {**saved.policy.params["policy"], "params": steep}}
    function = policy_function(dataclasses.replace(saved, policy=dataclasses.replace(saved.policy, params=params)))
    assert formats.write_onnx(function, tmp_path / "policy.onnx").path.exists()


def test_missing_onnx_package_is_an_error_with_the_command_to_install_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx needs onnx, .* pip install -e .*\[export\].* format=stablehlo"):
        formats.write_onnx(policy_function(open_run(run_dir)), tmp_path / "policy.onnx")
