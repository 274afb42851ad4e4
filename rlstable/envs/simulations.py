"""C MuJoCo in NumPy: many simulations of one model, stepped at once on threads. Nothing here knows jax."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]

# What a step starts from, mjSTATE_INTEGRATION, by the names of MjData: what a step moves, and what is put in.
MOVED = ("time", "qpos", "qvel", "act", "qacc_warmstart")
PUT_IN = ("ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata")
# Of a link, which is Brax's name for a body but the world: its place and motion in the world's frame.
LINKS = ("x_pos", "x_rot", "xd_ang", "xd_vel")
# What else every step computes, and an environment may read. The rest of MjData is not computed, or not in all models.
DERIVED = frozenset(
    (
        "qacc", "act_dot", "actuator_force", "actuator_length", "actuator_velocity", "cam_xmat", "cam_xpos", "cdof",
        "cdof_dot", "cinert", "crb", "cvel", "geom_xmat", "geom_xpos", "qacc_smooth", "qfrc_actuator", "qfrc_bias",
        "qfrc_constraint", "qfrc_passive", "qfrc_smooth", "sensordata", "site_xmat", "site_xpos", "subtree_com",
        "ten_length", "ten_velocity", "xanchor", "xaxis", "ximat", "xipos", "xmat", "xpos", "xquat",
    )
)  # fmt: skip
# Those that MuJoCo itself judges.
_JUDGED = ("qpos", "qvel", "qacc_warmstart")
_LINKS_COME_OF = ("xpos", "xquat", "cvel", "subtree_com")


class Unsupported(Exception):
    """A model that has parts of which the state would be lost from step to step."""


class Simulations:
    """As many simulations of a model as an array has rows, without a state of their own.

    What a row becomes depends on nothing but the row: not on its place, nor on how many threads there are. Several
    threads may call at once; each call has a `mujoco.batch.Batch` to itself.

    One that explodes does so in the open: MuJoCo would put the model's first state in its place, which is switched off.
    Where MuJoCo mends something else and only warns of it (zeros in the place of bad controls, constraints dropped for
    lack of memory), or gives up, all numbers of the simulation come back as NaN.

    Attributes:
        shapes: Of every array of one simulation, by name.
        derived: What is computed of `DERIVED`.
        fingerprint: Of the model and of `derived`: where it is the same, results are.

    Args:
        model: A `mujoco.MjModel`; it is not changed.
        threads: On which one call computes.
        derived: Names out of `DERIVED`.

    Raises:
        Unsupported: Plugins, delays or plastic deformation: their state is none of `MOVED`.
    """

    def __init__(self, model: Any, threads: int, derived: tuple[str, ...] = ()):
        import mujoco

        for what, size in (("plugins", "npluginstate"), ("delays", "nhistory"), ("plasticity", "nplastic")):
            if getattr(model, size, 0):
                raise Unsupported(f"its model has {what}")
        self._model = copy.copy(model)
        self._model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self._threads = threads
        binary = np.empty(mujoco.mj_sizeModel(self._model), np.uint8)
        mujoco.mj_saveModel(self._model, None, binary)
        self.fingerprint = hashlib.blake2s(binary.tobytes() + repr(derived).encode()).hexdigest()
        self._free: dict[int, list[Any]] = {}
        self._lock = threading.Lock()
        self._roots = model.body_rootid[1:]
        kinds = zip(model.jnt_type, model.jnt_qposadr, strict=True)
        before = {int(mujoco.mjtJoint.mjJNT_FREE): 3, int(mujoco.mjtJoint.mjJNT_BALL): 0}
        self._quaternions = [start + before[int(kind)] for kind, start in kinds if int(kind) in before]
        self.derived = derived
        data, links = mujoco.MjData(self._model), model.nbody - 1
        self.shapes: dict[str, tuple[int, ...]] = {name: np.shape(getattr(data, name)) for name in (*MOVED, *PUT_IN)}
        self.shapes |= {name: (links, 4 if name == "x_rot" else 3) for name in LINKS}
        self.shapes |= {name: _shape(name, np.shape(getattr(data, name))) for name in derived}

    def step(self, given: Arrays, results: Arrays, frames: int) -> None:
        """Steps every simulation.

        Args:
            given: The state to start from and the controls, `[..., *shape]` each; all of `MOVED` and `PUT_IN` that has
                any elements.
            results: Arrays to write into: what `MOVED`, `LINKS` and `derived` name, as far as they are there.
            frames: Physics steps, with the same controls.
        """
        self._compute(given, results, lambda batch: batch.step(nstep=frames))

    def start(self, given: Arrays, results: Arrays) -> None:
        """Computes what follows from a first state, without a step. Quaternions come back normalised, as from MJX.

        Args:
            given: Any of `MOVED` and `PUT_IN`, `[..., *shape]` each; the model's own values stand for the rest.
            results: As for `step`, and what `PUT_IN` names.
        """
        self._compute(given, results, lambda batch: batch.forward(), afresh=True)

    def _compute(self, given: Arrays, results: Arrays, call: Any, afresh: bool = False) -> None:
        from mujoco.batch import SimulationError

        count = math.prod(given["qpos"].shape[:-1])
        with self._borrowed(count) as batch, np.errstate(all="ignore"):
            if afresh:
                batch.reset(stage=0)
            for name, array in given.items():
                batch.bind(name)[...] = array.reshape(count, *self.shapes[name])
            # MuJoCo writes its first warning of every kind into a file in the working folder. Not that of a count of 1.
            warnings = batch.warning[:, :, 1]
            warnings[...] = 1
            # The batch remembers which ones failed; the others ran to the end.
            with contextlib.suppress(SimulationError):
                call(batch)
            if afresh:
                self._normalise(batch.bind("qpos"))
            found = self._found(batch, results)
            lost = self._mended(batch, (warnings > 1).any(axis=1) | (batch.status != 0))
            for name, result in results.items():
                rows = result.reshape(count, *self.shapes[name])
                rows[...] = found[name].reshape(rows.shape)
                if np.issubdtype(rows.dtype, np.floating):
                    rows[lost] = np.nan

    def _normalise(self, qpos: np.ndarray) -> None:
        """The quaternions among positions `[rows, nq]`; NaN where there is no direction."""
        for start in self._quaternions:
            part = qpos[:, start : start + 4]
            part /= np.linalg.norm(part, axis=1, keepdims=True)

    def _mended(self, batch: Any, warned: np.ndarray) -> np.ndarray:
        """Which of the simulations that MuJoCo complains of show nothing that it would complain of."""
        import mujoco

        if warned.any():
            for name in _JUDGED:
                warned = warned & (np.abs(batch.bind(name)) <= mujoco.mjMAXVAL).all(axis=1)
        return warned

    def _found(self, batch: Any, wanted: Arrays) -> dict[str, np.ndarray]:
        """What was computed, by name. Places and motions of links as Brax has them, computed in float64."""
        found = {name: batch.bind(name) for name in wanted if name not in LINKS}
        if wanted.keys() & set(LINKS):
            xpos, cvel = batch.bind("xpos")[:, 1:], batch.bind("cvel")[:, 1:]
            # MuJoCo has velocities at the centre of mass of the tree that a body is part of.
            arm = xpos - batch.bind("subtree_com")[:, self._roots]
            turn = cvel[..., :3]
            found |= {
                "x_pos": xpos,
                "x_rot": batch.bind("xquat")[:, 1:],
                "xd_ang": turn,
                "xd_vel": cvel[..., 3:] - np.cross(arm, turn),
            }
        return found

    @contextlib.contextmanager
    def _borrowed(self, count: int) -> Iterator[Any]:
        """A batch of this size that nobody else has; there come to be as many as callers at once, one per device."""
        from mujoco.batch import Batch

        with self._lock:
            free = self._free.setdefault(count, [])
            batch = free.pop() if free else None
        if batch is None:
            batch = Batch(self._model, count, min(self._threads, count))
            for name in (*_LINKS_COME_OF, *self.derived):
                batch.bind(name)
        try:
            yield batch
        finally:
            with self._lock:
                free.append(batch)


def share_of_cores(devices: int) -> int:
    """Threads for each of this process's devices, at least one.

    Args:
        devices: That may call at once.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // devices)


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """MuJoCo has matrices as rows of 9, MJX as 3 x 3."""
    return (*shape[:-1], 3, 3) if name.endswith("mat") else shape
