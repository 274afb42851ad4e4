"""The trace cache: a second start traces nothing; a stale, foreign, damaged or unpicklable entry is not used."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from quick_compile import environment as quick_environment
from saved import rows
from toys import mesh, tiny_config

from rlstable.compilation import ffi, sources, trace_cache
from rlstable.compilation.compiler import Compiler
from rlstable.compilation.trace_cache import TraceCache, compiler_of
from rlstable.config import Config, ConfigError
from rlstable.device.precision import SINGLE, level
from rlstable.envs.load import load_env
from rlstable.policy import evaluator as evaluation
from rlstable.policy.evaluator import make_evaluator, snapshot_of
from rlstable.ppo.guards import env_guards
from rlstable.ppo.iteration import PPO
from rlstable.runner import setup as assemblies
from rlstable.runner.host_state import HostState
from rlstable.runner.programs import Programs
from rlstable.runner.setup import TrainingSetup

ROOT = Path(__file__).resolve().parents[2]
BRAX = {"source": "brax", "name": "fast"}

pytestmark = pytest.mark.usefixtures("quick_compile")
KEYS = jax.random.PRNGKey(0), jax.random.PRNGKey(1)


def doubled(x: jax.Array, y: dict[str, jax.Array]) -> dict[str, Any]:
    return {"twice": 2 * x, "both": (x + y["other"], y["other"])}


def arguments() -> tuple[Any, ...]:
    return jnp.arange(3.0), {"other": jnp.ones(3)}


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is traced")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traced"


@pytest.fixture
def kept(folder: Path) -> TraceCache:
    return TraceCache(folder, "origin", mesh(1), SINGLE)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def test_cached_program_is_not_traced_again_and_computes_the_same(kept: TraceCache, folder: Path) -> None:
    assert kept.outputs("doubled") is None
    found = [kept.build("doubled", jax.jit(doubled), of).result()(*arguments()) for of in (arguments, refuse)]
    plain = jax.jit(doubled)(*arguments())
    for one in found:
        assert jax.tree.structure(one) == jax.tree.structure(plain)
        jax.tree.map(np.testing.assert_array_equal, one, plain)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain)
    assert kept.outputs("doubled") == like
    assert len(files(folder)) == 1


def test_donated_arguments_of_a_cached_program_are_deleted(kept: TraceCache) -> None:
    for _ in range(2):  # traced, then read from the cache
        program = kept.build("plus", jax.jit(lambda x: x + 1), lambda: (jnp.ones(1000),), donates=True).result()
        x = jnp.ones(1000)
        np.testing.assert_array_equal(program(x), 2.0)
        assert x.is_deleted()


@pytest.mark.parametrize("damage", ["torn", "of another kind", "of another jax"])
def test_damaged_trace_is_traced_again_and_replaced(kept: TraceCache, folder: Path, damage: str) -> None:
    kept.build("doubled", jax.jit(doubled), arguments).result()
    (place,) = folder.iterdir()
    whole = place.read_bytes()
    others = {
        "of another kind": pickle.dumps(("something", "else")),
        "of another jax": pickle.dumps((bytearray(b"nonsense"), *pickle.loads(whole)[1:])),
    }
    place.write_bytes(others.get(damage, whole[:-100]))
    assert kept.outputs("doubled") is None
    for of in (arguments, refuse):
        program = kept.build("doubled", jax.jit(doubled), of).result()
        np.testing.assert_array_equal(program(*arguments())["twice"], [0.0, 2.0, 4.0])


@pytest.mark.parametrize("where", ["folder", "file"])
def test_program_is_built_without_a_writable_cache(kept: TraceCache, folder: Path, where: str) -> None:
    if where == "folder":
        folder.write_text("no folder")
    else:
        kept._path("doubled").mkdir(parents=True)
    program = kept.build("doubled", jax.jit(doubled), arguments).result()
    np.testing.assert_array_equal(program(*arguments())["twice"], [0.0, 2.0, 4.0])
    assert where == "folder" or list(folder.iterdir()) == [kept._path("doubled")]  # no unfinished file


def test_trace_that_another_user_owns_or_could_write_is_not_read(
    kept: TraceCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.build("doubled", jax.jit(doubled), arguments).result()
    assert folder.stat().st_mode & 0o777 == 0o700 and kept.outputs("doubled") is not None
    folder.chmod(0o770)
    assert kept.outputs("doubled") is None
    folder.chmod(0o700)
    assert kept.outputs("doubled") is not None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert kept.outputs("doubled") is None


def called(x: jax.Array, _: Any) -> jax.Array:
    return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("why", ["not exportable", "arguments not picklable"])
def test_program_that_cannot_be_cached_is_built(kept: TraceCache, folder: Path, why: str) -> None:
    class Local:
        pass

    jax.tree_util.register_pytree_node(Local, lambda _: ((), None), lambda *_: Local())
    function = called if why == "not exportable" else lambda x, _: 2 * x
    given = jnp.ones(2), Local() if why == "arguments not picklable" else None
    program = kept.build("program", jax.jit(function), lambda: given).result()
    assert program(*given).tolist() == [2.0, 2.0]
    assert files(folder) == {}


def test_cached_program_needs_its_external_computations_registered(
    kept: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose external computation is not registered in this process would end the run."""

    def tripled(x: jax.Array) -> jax.Array:
        def compute(given: ffi.Arrays, results: ffi.Arrays) -> None:
            results["y"][...] = 3 * given["x"]

        like = {"y": jax.ShapeDtypeStruct((), jnp.float32)}
        return jax.vmap(lambda x: ffi.call("tripled", compute, {"x": x}, like)["y"])(x)

    def build(of: Callable[[], tuple[Any, ...]]) -> Any:
        return kept.build("tripled", jax.jit(tripled), of).result()(jnp.ones(2)).tolist()

    monkeypatch.setattr(ffi, "_calls", {})
    assert build(lambda: (jnp.ones(2),)) == [3.0, 3.0]
    assert build(refuse) == [3.0, 3.0]
    ffi._calls.clear()
    jax.clear_caches()  # as another process, which has traced nothing
    with pytest.raises(AssertionError, match="it is traced"):
        build(refuse)
    assert build(lambda: (jnp.ones(2),)) == [3.0, 3.0]


def test_trace_cache_deletes_the_least_recently_used_first(
    kept: TraceCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {}
    for name, age in (("first", 200), ("second", 100)):
        kept.build(name, jax.jit(doubled), arguments).result()
        (places[name],) = {*folder.iterdir()} - {*places.values()}
        now = places[name].stat().st_mtime
        os.utime(places[name], (now - age, now - age))
    kept.build("first", jax.jit(doubled), refuse).result()  # the latest use
    monkeypatch.setattr(trace_cache, "_MOST_FILES", 2)
    kept.build("third", jax.jit(doubled), arguments).result()
    assert len(files(folder)) == 2 and places["first"].exists() and not places["second"].exists()


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that runs the sources on disk, and the folder of its traced programs."""
    monkeypatch.setattr(sources, "fingerprint", lambda *_: "as on disk" if sources._unmodified else None)
    sources.mark_process_unmodified()
    monkeypatch.setattr(trace_cache, "program_cache_folder", lambda: tmp_path / "programs")
    (tmp_path / "programs").mkdir()
    yield tmp_path / "programs" / f"traced-{os.getuid()}"


@pytest.mark.parametrize(
    "sections",
    [
        {"env": {}},
        {"env": {**BRAX, "kwargs": {"scene": "mine.xml"}}},
        {"env": BRAX, "eval": {"env_kwargs": {"scene": ["mine.xml"]}}},
        {"env": BRAX, "compile_cache": None},
        {"env": {**BRAX, "randomization_fn": "ball:each_its_own"}},
        {"env": BRAX, "precision": {"matmul": "x64"}},
    ],
    ids=str,
)
def test_only_programs_of_braxs_environments_are_cached(trusted: Path, sections: dict[str, Any]) -> None:
    programs = compiler_of(tiny_config(env={**BRAX, "kwargs": {"pipeline_mode": 2, "backend": "mjx"}}), mesh(1))
    assert isinstance(programs, TraceCache)
    programs.build("doubled", jax.jit(doubled), arguments).result()
    assert len(files(trusted)) == 1
    assert type(compiler_of(tiny_config(**sections), mesh(1))) is Compiler


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [(jax, "process_count", 2), (trace_cache, "program_cache_folder", None), (sources, "fingerprint", None)],
)
def test_programs_without_a_certain_key_are_not_cached(
    trusted: Path, owner: Any, name: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: found)
    assert type(compiler_of(tiny_config(env=BRAX), mesh(1))) is Compiler


def test_programs_with_guards_of_the_user_are_not_cached(trusted: Path) -> None:
    config, guard = tiny_config(env=BRAX), env_guards(tiny_config(guards={}).guards)
    assert type(TrainingSetup(config, mesh(1))._compiler) is TraceCache
    assert type(TrainingSetup(config, mesh(1), {"env": guard})._compiler) is Compiler


@pytest.mark.parametrize(("impl", "cached"), [("jax", True), ("warp", False)])
def test_programs_with_kernels_of_warp_are_not_cached(trusted: Path, impl: str, cached: bool) -> None:
    """Also if env.impl=auto chose Warp."""
    task = SimpleNamespace(
        mj_model=mujoco.MjModel.from_xml_string("<mujoco/>"),
        mjx_model=SimpleNamespace(impl=SimpleNamespace(value=impl)),
    )
    config = tiny_config(env={"source": "playground", "name": "CartpoleBalance"})
    assert (type(compiler_of(config, mesh(1), task)) is TraceCache) is cached


OUTSIDE_THE_KEY: dict[str, Any] = {
    "total_steps": 5_000,
    "seed": 7,
    "recipe_for": "cpu",
    "compile_cache": "elsewhere",
    "quick_compile_iterations": 7,
    "resume": "auto",
    "distributed": {"enabled": "false"},
    "logging": {"console": "off", "log_every": 3},
    "checkpoint": {"every": 3},
    "render": {"every": 1},
    "ppo": {"learning_rate": 1e-3, "num_resets_per_eval": 1},
    "eval": {"num_evals": 3, "at_start": True, "target_return": 7.0},
    "supervise": {"recovery": {"enabled": False}, "incident": {"enabled": False}, "max_wall_time": 700.0},
}
LINEAR = {"ppo": {"learning_rate_schedule": "linear"}}
OTHER_PROGRAMS: tuple[dict[str, Any], ...] = (
    LINEAR, {"ppo": {"discounting": 0.5}}, {"ppo": {"learning_rate_warmup": 0.1}},
    {"eval": {"num_envs": 3}}, {"deterministic": True}, {"env": {"episode_length": 14}},
    {"network": {"activation": "relu"}}, {"guards": {}}, {"seeds": 2}, {"precision": {"matmul": "highest"}},
    {"supervise": {}}, {"fault": {"site": "reward"}}, {"devices": 1},
    # JSON would write some of these alike.
    *({"env": {"kwargs": {"limit": value}}} for value in (None, 1, float("inf"), float("-inf"), float("nan"))),
)  # fmt: skip


def is_cached(**sections: Any) -> bool:
    """Whether the cache of a configuration has a program; afterwards it has."""
    programs = compiler_of(tiny_config(**sections | {"env": BRAX | sections.get("env", {})}), mesh(1))
    assert type(programs) is TraceCache
    found = programs.outputs("doubled") is not None
    programs.build("doubled", jax.jit(doubled), arguments)
    return found


def test_configurations_with_different_programs_share_no_cached_program(
    trusted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every section of the configuration is either part of the key of a cached program or cannot change a program."""
    assert not is_cached()
    for key, value in OUTSIDE_THE_KEY.items():
        assert is_cached(**{key: value}), key
    for sections in OTHER_PROGRAMS:
        assert not is_cached(**sections), sections
    tried = {*OUTSIDE_THE_KEY, *(key for sections in OTHER_PROGRAMS for key in sections)}
    assert tried == set(Config.model_fields) - {"trust"}
    monkeypatch.setattr(sources, "fingerprint", lambda: "other files")
    assert not is_cached()


def test_programs_do_not_depend_on_settings_outside_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    built: dict[str, Future[Any]] = {}

    class Recording(Compiler):
        def build(self, name: str, function: Any, arguments: Any, *_: bool, **__: bool) -> Any:
            lowered = function.lower(*arguments())
            texts.append(text := lowered.as_text())
            # The programs of first states are run; the iteration is not.
            if text not in built:
                built[text] = Future() if name.startswith("training") else self._compiled(lowered, True)
            return built[text]

    def lowered(config: Config) -> str:
        texts.clear()
        setup = TrainingSetup(config, mesh(1))
        state = setup.first_state(*KEYS, config.fault, ahead=True)
        evaluator = make_evaluator(config, setup.ppo.networks, lambda _: contextlib.nullcontext(), print)
        evaluator.prepare([snapshot_of(state, KEYS[0])])
        return "".join(sorted(texts))

    for module in (assemblies, evaluation):
        monkeypatch.setattr(module, "compiler_of", lambda *_, **__: Recording())
    plain, linear = lowered(tiny_config()), lowered(tiny_config(**LINEAR))
    assert len(texts) == 4 and len(plain) > 10_000 and plain != linear
    assert lowered(tiny_config(**OUTSIDE_THE_KEY)) == plain
    assert lowered(tiny_config(**OUTSIDE_THE_KEY | {"ppo": OUTSIDE_THE_KEY["ppo"] | LINEAR["ppo"]})) == linear


def test_cached_program_depends_on_flags_and_versions(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_cached()
    for flag, value, same in (("jax_numpy_rank_promotion", "warn", False), ("jax_compilation_cache_max_size", 5, True)):
        before = getattr(jax.config, flag)
        jax.config.update(flag, value)
        try:
            assert is_cached() is same, flag
        finally:
            jax.config.update(flag, before)
    monkeypatch.setattr(trace_cache, "versions", lambda: {"brax": "0"})
    assert not is_cached()


def begun(config: Config, steps: int = 2) -> tuple[Any, Any]:
    """The state after some iterations of a new run, and evaluation episodes of its policy."""
    found = TrainingSetup(config, mesh(1))
    state = found.first_state(*KEYS, config.fault, ahead=True)
    program = found.compiled(state)
    for _ in range(steps):
        state, metrics = program(state)
    evaluator = make_evaluator(config, found.ppo.networks, lambda _: contextlib.nullcontext(), print, found.single)
    (episodes,) = evaluator.play([snapshot_of(state, jax.random.PRNGKey(2))])
    return jax.device_get((state, metrics)), episodes


def test_second_run_traces_nothing_and_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program of a run, in float64: first state, iteration and evaluation."""
    config = tiny_config(
        guards={}, supervise={}, eval={"num_envs": 3}, precision={"matmul": "x64"},
        env={"reset": "pool"}, ppo={"normalize_values": True},
    )  # fmt: skip
    usual = begun(config)

    def programs(config: Config, devices: Any, env: Any, cached: bool = True) -> TraceCache:
        return TraceCache(tmp_path, "origin", devices, level(config.precision))

    for module in (assemblies, evaluation):
        monkeypatch.setattr(module, "compiler_of", programs)
    first = begun(config)
    assert len(list(tmp_path.iterdir())) == 4

    for owner, name in ((PPO, "iteration"), (assemblies.VectorEnv, "reset"), (evaluation, "run_episodes")):
        monkeypatch.setattr(owner, name, refuse)
    second = begun(config)
    for other in (first, second):
        jax.tree.map(np.testing.assert_array_equal, usual, other)


def train(folder: Path, cache: Path, *words: str) -> None:
    environment = os.environ | quick_environment() | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-m", "rlstable.train", "eval.num_envs=4", *words, f"hydra.run.dir={folder}"]
    subprocess.run(command, env=environment, check=True, timeout=400)


NATIVE = ("env=inverted_pendulum", "recipe_for=cpu", "total_steps=4096", "eval.num_evals=1", "logging=quiet")


@pytest.mark.slow
def test_command_caches_its_programs_with_native_physics(tmp_path: Path) -> None:
    """The second process reads only the files of the first."""
    written = []
    for name in ("first", "second"):
        train(tmp_path / name, tmp_path, *NATIVE)
        written.append({path.name: path.read_bytes() for path in tmp_path.rglob("traced-*/*")})
    assert len(written[0]) == 4 and written[0] == written[1]
    assert rows(tmp_path / "first") == rows(tmp_path / "second") != []


def test_process_that_ran_user_code_caches_nothing(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's modules and notebooks may replace functions of Brax."""
    config = tiny_config(env=BRAX)
    assert type(compiler_of(config, mesh(1))) is TraceCache
    with contextlib.suppress(ConfigError):
        load_env(tiny_config(env={"source": "import", "name": "no_such_module:Environment"}).env)
    assert type(compiler_of(config, mesh(1))) is Compiler
    monkeypatch.undo()  # as `fit` in a notebook
    assert sources.fingerprint() is None
    assert type(compiler_of(config, mesh(1))) is Compiler


def test_training_and_evaluation_share_braxs_environments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's environment may own a simulator, which training and evaluation would both disturb."""
    for sections, shared in (({}, False), ({"env": BRAX}, True), ({"env": BRAX, "eval": {"env_kwargs": {}}}, True)):
        given: list[Any] = []

        def evaluator(*args: Any, given: list[Any] = given) -> Any:
            given.append(args[-1])

        monkeypatch.setattr("rlstable.runner.programs.make_evaluator", evaluator)
        programs = Programs(tiny_config(**sections), mesh(1), {}, lambda _: contextlib.nullcontext())
        assert programs.evaluator(HostState()) is None
        assert (given[0] is programs.setup(HostState()).single) is shared


def test_fingerprint_of_sources_follows_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kept_programs_test_package"
    (package / "inner").mkdir(parents=True)
    files = {"__init__.py": "", "inner/one.py": "x = 1\n", "scene.xml": "<mujoco/>", "notes.md": "nothing"}
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "_PACKAGES", (package.name, "not_installed_at_all"))
    now = max(path.stat().st_mtime for path in package.rglob("*"))
    started = [now + 100]
    monkeypatch.setattr(sources.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: started[0]))
    sources.mark_process_unmodified()

    plain = sources.fingerprint()
    assert plain is not None and sources.fingerprint() == plain
    (package / "notes.md").write_text("something")
    assert sources.fingerprint() == plain
    for name, text in (("inner/one.py", "x = 2\n"), ("scene.xml", "<mujoco></mujoco>")):
        (package / name).write_text(text)
        assert sources.fingerprint() not in (plain, None)
        (package / name).write_text(files[name])
    with monkeypatch.context() as patch:
        patch.setenv("BRAX_SOMETHING", "1")
        assert sources.fingerprint() not in (plain, None)
    (tmp_path / "solver-2.0.dist-info").mkdir()
    assert sources.fingerprint() not in (plain, None)
    # An editor's lock, which leads nowhere; and what this process may have imported before it was changed.
    (package / ".#one.py").symlink_to("nowhere")
    assert sources.fingerprint() is None
    (package / ".#one.py").unlink()
    assert sources.fingerprint() is not None
    started[0] = now - 1
    for path in (package / "inner" / "one.py", package / "scene.xml"):
        os.utime(path, (now - 100, now - 100))
    assert sources.fingerprint() is None
