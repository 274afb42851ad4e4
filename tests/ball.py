"""A stick on a plane with one motor, contacts, a joint limit and a sensor. MJX compiles it in seconds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from brax.envs.base import PipelineEnv, State
from brax.io import mjcf

MODEL = """
<mujoco>
  <option timestep="0.005" iterations="30" ls_iterations="20"/>
  <default><geom condim="3" friction="0.8"/></default>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="stick" pos="0 0 0.5">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <joint name="turn" type="hinge" axis="0 1 0"/>
      <geom type="capsule" size="0.05 0.2"/>
      <body name="arm" pos="0 0 0.2">
        <joint name="bend" type="hinge" axis="0 1 0" range="-40 40" limited="true"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.3" size="0.04"/>
        <site name="tip" pos="0 0 0.3"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="bend" gear="{gear}" ctrllimited="true" ctrlrange="-1 1"/></actuator>
  <sensor><jointvel joint="bend"/><framepos objtype="site" objname="tip"/></sensor>
</mujoco>
"""


class Stick(PipelineEnv):
    """A stick with small random first positions and velocities; the reward is the height of its tip.

    The observation also has the fields `reads` of the physics state.
    """

    def __init__(self, gear: float = 3.0, reads: tuple[str, ...] = (), backend: str = "mjx", n_frames: int = 4):
        super().__init__(sys=mjcf.loads(MODEL.format(gear=gear)), backend=backend, n_frames=n_frames)
        self.reads, self.velocities = reads, 3.0  # a name of rlstable's robots may be a user's

    def reset(self, rng: jax.Array) -> State:
        draw = jax.random.uniform(rng, (self.sys.q_size() + self.sys.qd_size(),), minval=-0.3, maxval=0.3)
        physics = self.pipeline_init(draw[: self.sys.q_size()], draw[self.sys.q_size() :])
        zero = jnp.zeros(())
        return State(physics, self._observation(physics), zero, zero, {"speed": zero})

    def step(self, state: State, action: jax.Array) -> State:
        physics = self.pipeline_step(state.pipeline_state, action)
        speed = (physics.x.pos[0, 0] - state.pipeline_state.x.pos[0, 0]) / self.dt
        height = physics.x.pos[1, 2]
        return state.replace(
            pipeline_state=physics,
            obs=self._observation(physics),
            reward=height - 0.1 * jnp.square(speed),
            done=jnp.where(height < -1.0, 1.0, 0.0),
            metrics={"speed": speed},
        )

    def _observation(self, physics: Any) -> jax.Array:
        parts = [physics.q, physics.qd, physics.xd.vel, *(getattr(physics, name) for name in self.reads)]
        return jnp.concatenate([jnp.ravel(part) for part in parts])


RANDOMIZED = (
    "body_mass", "body_inertia", "geom_friction", "dof_damping", "dof_armature", "actuator_gear", "jnt_range",
)  # fmt: skip


def each_its_own(model: Any, rng: jax.Array) -> tuple[Any, Any]:
    """Domain randomisation: half to double of every array in `RANDOMIZED`, plus a damping of up to 1."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(RANDOMIZED))
        scaled = {
            name: getattr(model, name) * jax.random.uniform(key, getattr(model, name).shape, minval=0.5, maxval=2.0)
            for name, key in zip(RANDOMIZED, keys, strict=True)
        }
        return scaled | {"dof_damping": jax.random.uniform(key, model.dof_damping.shape)}

    axes = jax.tree.map(lambda _: None, model).tree_replace({name: 0 for name in RANDOMIZED})
    return model.tree_replace(jax.vmap(draw)(rng)), axes


def other_sizes(model: Any, rng: jax.Array) -> tuple[Any, Any]:
    """Domain randomisation of an array from which MuJoCo derives others."""
    sizes = jax.vmap(lambda key: model.geom_size * jax.random.uniform(key, minval=0.5, maxval=2.0))(rng)
    return model.tree_replace({"geom_size": sizes}), jax.tree.map(lambda _: None, model).tree_replace({"geom_size": 0})
