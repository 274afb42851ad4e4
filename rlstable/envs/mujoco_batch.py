"""C MuJoCo in NumPy, without JAX: steps many simulations of one model on threads."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlstable.envs.mujoco_model import set_number, without_warnings

if TYPE_CHECKING:
    import mujoco
    from mujoco.batch import Batch

Arrays = Mapping[str, np.ndarray]

# MuJoCo's integration state (mjSTATE_INTEGRATION) by the names in MjData: arrays that a step changes, and inputs.
STATE_ARRAYS = ("time", "qpos", "qvel", "act", "qacc_warmstart")
INPUT_ARRAYS = ("ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata")
# Poses and velocities of links in the world frame. Brax calls every body except the world a link.
LINK_ARRAYS = ("x_pos", "x_rot", "xd_ang", "xd_vel")
# Other arrays that every step computes and an environment may read. MuJoCo computes the rest of MjData not at all, or
# not in all models.
DERIVED_ARRAYS = frozenset(
    (
        "qacc", "act_dot", "actuator_force", "actuator_length", "actuator_velocity", "cam_xmat", "cam_xpos", "cdof",
        "cdof_dot", "cinert", "crb", "cvel", "geom_xmat", "geom_xpos", "qacc_smooth", "qfrc_actuator", "qfrc_bias",
        "qfrc_constraint", "qfrc_passive", "qfrc_smooth", "sensordata", "site_xmat", "site_xpos", "subtree_com",
        "ten_length", "ten_velocity", "xanchor", "xaxis", "ximat", "xipos", "xmat", "xpos", "xquat",
    )
)  # fmt: skip
# Contact forces and torques of bodies, which MuJoCo's step computes for sensors only: computed here after the step.
FORCES = "cfrc_ext"
# Arrays of the model that simulations may have of their own: a step reads them. Masses of subtrees, the only constant
# that MuJoCo's dynamics derive, are summed here. Constants of constraints stay those of the model, as in MJX.
MODEL_ARRAYS = frozenset(
    (
        "actuator_biasprm", "actuator_ctrlrange", "actuator_dynprm", "actuator_forcerange", "actuator_gainprm",
        "actuator_gear", "body_inertia", "body_ipos", "body_mass", "dof_armature", "dof_damping", "dof_frictionloss",
        "dof_solimp", "dof_solref", "geom_friction", "geom_solimp", "geom_solref", "jnt_range", "jnt_solimp",
        "jnt_solref", "jnt_stiffness", "opt.density", "opt.gravity", "opt.viscosity", "opt.wind", "pair_friction",
        "qpos0", "qpos_spring", "tendon_damping", "tendon_frictionloss", "tendon_stiffness",
    )
)  # fmt: skip
# For a body with a diagonal mass matrix that never changes, MuJoCo reads the matrix from the model instead.
_IN_MASS_MATRIX = frozenset(("body_mass", "body_inertia", "body_ipos", "dof_armature"))
# Arrays that MuJoCo itself checks for bad numbers.
_CHECKED_BY_MUJOCO = ("qpos", "qvel", "qacc_warmstart")


class Unsupported(Exception):
    """The model has parts whose state cannot be kept from step to step."""


class Simulations:
    """Steps one simulation of a model per row of the input arrays, without state between calls.

    - The result of a row depends only on this row, not on its position or on the number of threads.
    - Several threads may call at the same time; each call uses a `mujoco.batch.Batch` exclusively.
    - MuJoCo's automatic reset is disabled, so a simulation that explodes returns its bad numbers.
    - If MuJoCo repairs something else with only a warning (zeros for bad controls, dropped constraints), or gives up,
      all numbers of the simulation are NaN.

    `derived` are names in `DERIVED_ARRAYS`, or `FORCES`; `randomized` are names in `MODEL_ARRAYS`. Equal fingerprints
    give equal results.

    Raises Unsupported for a model with plugins, delays or plastic deformation, whose state is not in `STATE_ARRAYS`, or
    if an array cannot be randomised.
    """

    def __init__(
        self, model: mujoco.MjModel, threads: int, derived: tuple[str, ...] = (), randomized: tuple[str, ...] = ()
    ):
        import mujoco

        for what, size in (("plugins", "npluginstate"), ("delays", "nhistory"), ("plasticity", "nplastic")):
            if getattr(model, size, 0):
                raise Unsupported(f"its model has {what}")
        self._model = copy.copy(model)
        self._model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        for name in randomized:
            if name not in MODEL_ARRAYS:
                raise Unsupported(f"it cannot randomise {name}")
            if name in _IN_MASS_MATRIX and model.body_simple[model.body_dofnum > 0].any():
                raise Unsupported(f"it cannot randomise {name} of a free body or a slider without further bodies")
        if "body_ipos" in randomized:
            _separate_frames(self._model)
        self.threads, self.derived, self.randomized, self.first_positions = threads, derived, randomized, model.qpos0
        binary = np.empty(mujoco.mj_sizeModel(self._model), np.uint8)
        mujoco.mj_saveModel(self._model, None, binary)
        self.fingerprint = hashlib.blake2s(binary.tobytes() + repr((derived, randomized)).encode()).hexdigest()
        self._free: dict[int, list[_BatchBuffers]] = {}
        self._lock = threading.Lock()
        kinds = zip(model.jnt_type, model.jnt_qposadr, strict=True)
        before = {int(mujoco.mjtJoint.mjJNT_FREE): 3, int(mujoco.mjtJoint.mjJNT_BALL): 0}
        self._quaternions = [start + before[int(kind)] for kind, start in kinds if int(kind) in before]
        data, links = mujoco.MjData(self._model), model.nbody - 1
        # Shape of every array of one simulation. MuJoCo stores matrices as rows of 9, MJX as 3 x 3.
        shapes = {name: np.shape(getattr(data, name)) for name in (*STATE_ARRAYS, *INPUT_ARRAYS, *derived)}
        shapes |= {name: (*shapes[name][:-1], 3, 3) for name in derived if name.endswith("mat")}
        shapes |= {name: (links, 4 if name == "x_rot" else 3) for name in LINK_ARRAYS}
        self.shapes = shapes | {name: np.shape(operator.attrgetter(name)(model)) for name in randomized}

    def step(self, inputs: Arrays, results: Arrays, frames: int) -> None:
        """Takes `frames` physics steps of every simulation with the same controls.

        `inputs` are all non-empty `STATE_ARRAYS` and `INPUT_ARRAYS`, and `randomized`, `[..., *shape]` each. Writes
        into the arrays of `results`, with names from `STATE_ARRAYS`, `LINK_ARRAYS` and `derived`.
        """
        self._compute(inputs, results, lambda batch: batch.step(nstep=frames))

    def start(self, inputs: Arrays, results: Arrays) -> None:
        """Computes the arrays of a first state, without a step. Quaternions are normalised, as in MJX.

        Arguments as for `step`; arrays that `inputs` lack have the model's values, and `INPUT_ARRAYS` are results, too.
        """
        self._compute(inputs, results, lambda batch: batch.forward(), reset=True)

    def _compute(self, inputs: Arrays, results: Arrays, call: Callable[[Batch], None], reset: bool = False) -> None:
        from mujoco.batch import SimulationError

        with self._borrow_buffers(math.prod(inputs["qpos"].shape[:-1])) as buffers, np.errstate(all="ignore"):
            batch = buffers.batch
            if reset:
                batch.reset(stage=0)
            for name, array in inputs.items():
                view = buffers.views[name]
                view[...] = array.reshape(view.shape)
            if "body_mass" in self.randomized:
                _sum_masses(self._model, buffers.views["body_mass"], buffers.views["body_subtreemass"])
            buffers.warnings[...] = 0
            # `batch.status` holds the failed simulations; all others have run to the end.
            with contextlib.suppress(SimulationError), without_warnings():
                call(batch)
            if FORCES in self.derived:
                buffers.compute_forces()
            for start in self._quaternions if reset else ():
                part = buffers.views["qpos"][:, start : start + 4]
                part /= np.linalg.norm(part, axis=1, keepdims=True)  # a zero quaternion becomes NaN
            if "xd_vel" in results:
                buffers.compute_velocities()
            for name, result in results.items():
                result[...] = buffers.views[name].reshape(result.shape)
            if buffers.warnings.any() or batch.status.any():
                self._replace_repaired(buffers, (buffers.warnings > 0).any(axis=1) | (batch.status != 0), results)

    def _replace_repaired(self, buffers: _BatchBuffers, warned: np.ndarray, results: Arrays) -> None:
        """Writes NaN where a simulation with a warning looks good, because MuJoCo has repaired its numbers."""
        import mujoco

        for name in _CHECKED_BY_MUJOCO:
            warned = warned & (np.abs(buffers.views[name]) <= mujoco.mjMAXVAL).all(axis=1)
        for name, result in results.items():
            if np.issubdtype(result.dtype, np.floating):
                result.reshape(warned.size, *self.shapes[name])[warned] = np.nan

    @contextlib.contextmanager
    def _borrow_buffers(self, count: int) -> Iterator[_BatchBuffers]:
        """Free buffers of this size; there are as many as concurrent callers, one per device."""
        with self._lock:
            free = self._free.setdefault(count, [])
            buffers = free.pop() if free else None
        if buffers is None:
            threads = min(self.threads, count)
            buffers = _BatchBuffers(self._model, count, threads, self.derived, self.randomized)
        try:
            yield buffers
        finally:
            with self._lock:
                free.append(buffers)


def set_arrays(model: mujoco.MjModel, arrays: Mapping[str, np.ndarray]) -> None:
    """Gives a `mujoco.MjModel` the randomised arrays of one simulation, such as `body_mass` or `opt.gravity`."""
    for name, array in arrays.items():
        owner, field = model.opt if name.startswith("opt.") else model, name.removeprefix("opt.")
        if np.size(getattr(owner, field, ())) == array.size:
            set_number(owner, field, array)
    if "body_mass" in arrays:
        _sum_masses(model, model.body_mass, model.body_subtreemass)
    if "body_ipos" in arrays:
        _separate_frames(model)


def _sum_masses(model: mujoco.MjModel, mass: np.ndarray, subtree_mass: np.ndarray) -> None:
    """Writes the masses of subtrees, `[..., nbody]`, from those of the bodies, `[..., nbody]`."""
    subtree_mass[...] = mass
    for body in range(model.nbody - 1, 0, -1):
        subtree_mass[..., model.body_parentid[body]] += subtree_mass[..., body]


def _separate_frames(model: mujoco.MjModel) -> None:
    """Makes MuJoCo compute all frames, also those that equal another frame in the original model."""
    import mujoco

    for kind in ("body", "geom", "site"):
        getattr(model, f"{kind}_sameframe")[:] = int(mujoco.mjtSameFrame.mjSAMEFRAME_NONE)


class _BatchBuffers:
    """A batch of simulations and views of its memory; making the views takes as long as a step, so they are reused.

    `views` are by name, `[rows, *shape]`; `warnings` are counts, `[rows, kinds]`; the world is no link.
    """

    def __init__(
        self, model: mujoco.MjModel, count: int, threads: int, derived: tuple[str, ...], randomized: tuple[str, ...]
    ):
        import mujoco
        from mujoco.batch import Batch

        # Only a persistent batch keeps the contacts of every simulation, from which `compute_forces` starts.
        self.batch = Batch(model, count, threads, persistent=FORCES in derived)
        bound = (*STATE_ARRAYS, *INPUT_ARRAYS, *(name for name in derived if name != FORCES))
        self.views = {name: self.batch.bind(name) for name in bound}
        if FORCES in derived:
            self.views[FORCES] = np.zeros((count, model.nbody, 6))
            self._model, self._data = model, mujoco.MjData(model)
        own = (*randomized, *(("body_subtreemass",) if "body_mass" in randomized else ()))
        self.views |= {name: self.batch.expand(name) for name in own}
        self.warnings = self.batch.warning[:, :, 1]
        # Poses and velocities of links are as in Brax, computed in float64.
        cvel, links = self.batch.bind("cvel")[:, 1:], (count, model.nbody - 1)
        self._arm, self._angular = np.empty((2, 5, *links))  # x y z x y: a slice is a rotation of the axes
        self._products, self._roots = np.empty((2, 3, *links)), model.body_rootid[1:]
        self.views |= {"x_pos": self.batch.bind("xpos")[:, 1:], "x_rot": self.batch.bind("xquat")[:, 1:]}
        self.views |= {"xd_ang": cvel[..., :3], "xd_vel": np.moveaxis(self._products[0], 0, -1)}
        # By component, because NumPy takes long for many short rows.
        arrays = (self.views["x_pos"], self.batch.bind("subtree_com"), *np.split(cvel, 2, -1))
        self._by_component = [np.moveaxis(x, -1, 0) for x in arrays]

    def compute_velocities(self) -> None:
        """Computes the velocities of links: MuJoCo gives those at the centre of mass of the kinematic tree."""
        arm, angular, (first, second) = self._arm, self._angular, self._products
        position, center, turning, linear = self._by_component
        np.subtract(position, center.take(self._roots, -1), arm[:3])
        angular[:3] = turning
        for vector in (arm, angular):
            vector[3:] = vector[:2]
        np.multiply(arm[1:4], angular[2:], first)
        np.multiply(arm[2:], angular[1:4], second)
        np.subtract(first, second, first)
        np.subtract(linear, first, first)

    def compute_forces(self) -> None:
        """Computes `cfrc_ext` of every simulation from its last physics step, as Gymnasium does after a step."""
        import mujoco

        for row in range(self.batch.nsim):
            self.batch.get_data(row, self._data)
            mujoco.mj_rnePostConstraint(self._model, self._data)
            self.views[FORCES][row] = self._data.cfrc_ext
