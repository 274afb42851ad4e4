"""C MuJoCo in NumPy: many simulations of one model, stepped at once on threads. Nothing here knows jax."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]

# What a step starts from, mjSTATE_INTEGRATION, by the names of MjData: what a step moves, and what is put in.
STATE_ARRAYS = ("time", "qpos", "qvel", "act", "qacc_warmstart")
INPUT_ARRAYS = ("ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata")
# Of a link, which is Brax's name for a body but the world: its place and motion in the world's frame.
LINK_ARRAYS = ("x_pos", "x_rot", "xd_ang", "xd_vel")
# What else every step computes, and an environment may read. The rest of MjData is not computed, or not in all models.
DERIVED_ARRAYS = frozenset(
    (
        "qacc", "act_dot", "actuator_force", "actuator_length", "actuator_velocity", "cam_xmat", "cam_xpos", "cdof",
        "cdof_dot", "cinert", "crb", "cvel", "geom_xmat", "geom_xpos", "qacc_smooth", "qfrc_actuator", "qfrc_bias",
        "qfrc_constraint", "qfrc_passive", "qfrc_smooth", "sensordata", "site_xmat", "site_xpos", "subtree_com",
        "ten_length", "ten_velocity", "xanchor", "xaxis", "ximat", "xipos", "xmat", "xpos", "xquat",
    )
)  # fmt: skip
# Those that MuJoCo itself judges.
_CHECKED_BY_MUJOCO = ("qpos", "qvel", "qacc_warmstart")


class Unsupported(Exception):
    """A model that has parts of which the state would be lost from step to step."""


class Simulations:
    """Steps as many simulations of a model as an array has rows; the simulations keep no state.

    What a row becomes depends on nothing but the row: not on its place, nor on how many threads there are. Several
    threads may call at once; each call has a `mujoco.batch.Batch` to itself.

    One that explodes does so in the open: MuJoCo would put the model's first state in its place, which is switched off.
    Where MuJoCo mends something else and only warns of it (zeros in the place of bad controls, constraints dropped for
    lack of memory), or gives up, all numbers of the simulation come back as NaN.

    Attributes:
        shapes: Of every array of one simulation, by name.
        derived: What is computed of `DERIVED_ARRAYS`.
        fingerprint: Of the model and of `derived`: where it is the same, results are.
        threads: On which one call computes.

    Args:
        model: A `mujoco.MjModel`; it is not changed.
        threads: On which one call computes.
        derived: Names out of `DERIVED_ARRAYS`.

    Raises:
        Unsupported: Plugins, delays or plastic deformation: their state is none of `STATE_ARRAYS`.
    """

    def __init__(self, model: Any, threads: int, derived: tuple[str, ...] = ()):
        import mujoco

        for what, size in (("plugins", "npluginstate"), ("delays", "nhistory"), ("plasticity", "nplastic")):
            if getattr(model, size, 0):
                raise Unsupported(f"its model has {what}")
        self._model = copy.copy(model)
        self._model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.threads = threads
        binary = np.empty(mujoco.mj_sizeModel(self._model), np.uint8)
        mujoco.mj_saveModel(self._model, None, binary)
        self.fingerprint = hashlib.blake2s(binary.tobytes() + repr(derived).encode()).hexdigest()
        self._free: dict[int, list[_BatchBuffers]] = {}
        self._lock = threading.Lock()
        self._roots = model.body_rootid[1:]
        kinds = zip(model.jnt_type, model.jnt_qposadr, strict=True)
        before = {int(mujoco.mjtJoint.mjJNT_FREE): 3, int(mujoco.mjtJoint.mjJNT_BALL): 0}
        self._quaternions = [start + before[int(kind)] for kind, start in kinds if int(kind) in before]
        self.derived = derived
        data, links = mujoco.MjData(self._model), model.nbody - 1
        self.shapes: dict[str, tuple[int, ...]] = {
            name: np.shape(getattr(data, name)) for name in (*STATE_ARRAYS, *INPUT_ARRAYS)
        }
        self.shapes |= {name: (links, 4 if name == "x_rot" else 3) for name in LINK_ARRAYS}
        self.shapes |= {name: _shape(name, np.shape(getattr(data, name))) for name in derived}

    def step(self, given: Arrays, results: Arrays, frames: int) -> None:
        """Steps every simulation.

        Args:
            given: The state to start from and the controls, `[..., *shape]` each; all of `STATE_ARRAYS` and
                any elements.
            results: Arrays to write into: what `STATE_ARRAYS`, `LINK_ARRAYS` and `derived` name, as far as they are there.
            frames: Physics steps, with the same controls.
        """
        self._compute(given, results, lambda batch: batch.step(nstep=frames))

    def start(self, given: Arrays, results: Arrays) -> None:
        """Computes what follows from a first state, without a step. Quaternions come back normalised, as from MJX.

        Args:
            given: Any of `STATE_ARRAYS` and `INPUT_ARRAYS`, `[..., *shape]` each; the model's own values stand for the rest.
            results: As for `step`, and what `INPUT_ARRAYS` names.
        """
        self._compute(given, results, lambda batch: batch.forward(), afresh=True)

    def _compute(self, given: Arrays, results: Arrays, call: Any, afresh: bool = False) -> None:
        from mujoco.batch import SimulationError

        with self._borrow_buffers(math.prod(given["qpos"].shape[:-1])) as place, np.errstate(all="ignore"):
            batch = place.batch
            if afresh:
                batch.reset(stage=0)
            for name, array in given.items():
                view = place.views[name]
                view[...] = array.reshape(view.shape)
            # MuJoCo writes its first warning of every kind into a file in the working folder. Not that of a count of 1.
            place.warnings[...] = 1
            # The batch remembers which ones failed; the others ran to the end.
            with contextlib.suppress(SimulationError):
                call(batch)
            if afresh:
                self._normalise(place.views["qpos"])
            found = self._outputs(place, results)
            for name, result in results.items():
                result[...] = found[name].reshape(result.shape)
            complained = (place.warnings > 1).any(axis=1) | (batch.status != 0)
            if complained.any():
                self._fill_with_nan(self._repaired_by_mujoco(place, complained), results)

    def _normalise(self, qpos: np.ndarray) -> None:
        """The quaternions among positions `[rows, nq]`; NaN where there is no direction."""
        for start in self._quaternions:
            part = qpos[:, start : start + 4]
            part /= np.linalg.norm(part, axis=1, keepdims=True)

    def _repaired_by_mujoco(self, place: _BatchBuffers, warned: np.ndarray) -> np.ndarray:
        """Which of the simulations that MuJoCo complains of show nothing that it would complain of."""
        import mujoco

        for name in _CHECKED_BY_MUJOCO:
            warned = warned & (np.abs(place.views[name]) <= mujoco.mjMAXVAL).all(axis=1)
        return warned

    def _fill_with_nan(self, lost: np.ndarray, results: Arrays) -> None:
        """NaN for all numbers of some simulations."""
        for name, result in results.items():
            if np.issubdtype(result.dtype, np.floating):
                result.reshape(lost.size, *self.shapes[name])[lost] = np.nan

    def _outputs(self, place: _BatchBuffers, wanted: Arrays) -> Mapping[str, np.ndarray]:
        """Computed arrays by name. Positions and motions of links are as in Brax, computed in float64."""
        if not wanted.keys() & set(LINK_ARRAYS):
            return place.views
        # MuJoCo has velocities at the centre of mass of the tree that a body is part of.
        arm = place.xpos - place.subtree_com[:, self._roots]
        found = {"x_pos": place.xpos, "x_rot": place.xquat, "xd_ang": place.turn}
        return place.views | found | {"xd_vel": place.slide - _cross(arm, place.turn)}

    @contextlib.contextmanager
    def _borrow_buffers(self, count: int) -> Iterator[_BatchBuffers]:
        """A free batch of this size; there are as many as concurrent callers, one per device."""
        with self._lock:
            free = self._free.setdefault(count, [])
            place = free.pop() if free else None
        if place is None:
            place = _BatchBuffers(self._model, count, min(self.threads, count), self.derived)
        try:
            yield place
        finally:
            with self._lock:
                free.append(place)


class _BatchBuffers:
    """A batch of simulations and views of its memory, which take as long to make as a step.

    Attributes:
        batch: The `mujoco.batch.Batch`.
        views: `[rows, *shape]`, of `STATE_ARRAYS`, `INPUT_ARRAYS` and what is computed of `DERIVED_ARRAYS`, by name.
        warnings: `[rows, kinds]`, how often MuJoCo has complained.
        xpos: `[rows, links, 3]`, where links are; the next three likewise.
        xquat: How they are turned.
        turn: Their angular velocity.
        slide: Their velocity, at the centre of mass of their tree.
        subtree_com: `[rows, nbody, 3]`, where that is.
    """

    def __init__(self, model: Any, count: int, threads: int, derived: tuple[str, ...]):
        from mujoco.batch import Batch

        self.batch = Batch(model, count, threads)
        self.views = {name: self.batch.bind(name) for name in (*STATE_ARRAYS, *INPUT_ARRAYS, *derived)}
        self.warnings = self.batch.warning[:, :, 1]
        self.xpos, self.xquat = (self.batch.bind(name)[:, 1:] for name in ("xpos", "xquat"))
        cvel = self.batch.bind("cvel")[:, 1:]
        self.turn, self.slide = cvel[..., :3], cvel[..., 3:]
        self.subtree_com = self.batch.bind("subtree_com")


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The cross product of `[..., 3]`; `np.cross` spends more on its arguments than on few of them."""
    result = np.empty(a.shape)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        result[..., i] = a[..., j] * b[..., k] - a[..., k] * b[..., j]
    return result


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """MuJoCo has matrices as rows of 9, MJX as 3 x 3."""
    return (*shape[:-1], 3, 3) if name.endswith("mat") else shape
