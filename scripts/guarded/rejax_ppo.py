"""PPO of rejax on gymnax's CartPole, with a fault in the simulation: as it is, and with the guards of rlstable.

Runs in the environment of scripts/rivals/requirements-rejax.txt, which has no rlstable: the guards need jax and optax.

.rivals/rejax/bin/python scripts/guarded/rejax_ppo.py           # a minute or two; a JSON line per side
"""

import json
import sys
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from rejax import PPO

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from rlstable.guards import EnvParts, Quarantine, guarded, quarantined

FAULTY = 1e-3  # share of the steps in which a velocity becomes NaN
SEEDS, STEPS = 4, 262_144


class Faulty(type(gymnax.make("CartPole-v1")[0])):
    """CartPole whose pole explodes now and then; `faulty` is off in evaluations."""

    faulty = True

    def step_env(self, key, state, action, params):
        _, state, reward, done, info = super().step_env(key, state, action, params)
        bad = (jax.random.uniform(jax.random.fold_in(key, 1)) < FAULTY) & self.faulty
        theta_dot = jnp.where(bad, jnp.nan, state.theta_dot)
        state = state.replace(theta_dot=theta_dot)
        return self.get_obs(state), state, jnp.where(bad, jnp.nan, reward), done, info


class Guarded(PPO):
    """rejax's PPO with two guards: of the simulation, and of the update."""

    @property
    def vmap_step(self):
        def guarded_step(keys, state, action, params):
            step = lambda state, action: super(Guarded, self).vmap_step(keys, state[1], action, params)  # noqa: E731
            parts = lambda s: EnvParts(physics=s[1], obs=s[0], reward=s[2], done=s[3].astype(float))  # noqa: E731
            zeros = jnp.zeros(len(keys))

            def reset(keys):  # a bad step ends the episode, and pays nothing
                obs, fresh = self.vmap_reset(keys, params)
                return obs, fresh, zeros, zeros == 0, {"discount": zeros}

            quarantine = Quarantine()
            wrapped = quarantined(step, reset, guard=quarantine, parts=parts)
            return wrapped((None, state), action, keys[0], quarantine.init())[0]

        return guarded_step

    def init_state(self, rng):
        ts = super().init_state(rng)
        own = {name: getattr(ts, name) for name in ("actor_ts", "critic_ts")}
        return ts.replace(
            **{name: TrainState.create(apply_fn=(), params=x.params, tx=guarded(x.tx)) for name, x in own.items()}
        )


def returns(kind, faulty):
    """The last mean return of each seed, evaluated without the fault."""
    env, params = Faulty(), gymnax.make("CartPole-v1")[1]
    env.faulty = faulty
    algorithm = kind.create(
        env=env, env_params=params, num_envs=64, num_steps=32, num_epochs=4, num_minibatches=4, learning_rate=5e-4,
        max_grad_norm=0.5, total_timesteps=STEPS, eval_freq=STEPS, gae_lambda=0.95, gamma=0.99, ent_coef=0.0,
        agent_kwargs={"activation": "tanh"}, skip_initial_evaluation=True,
    )  # fmt: skip

    def evaluated(algo, ts, rng):
        clean, own = gymnax.make("CartPole-v1")[0], algo.make_act(ts)
        from rejax.evaluate import evaluate

        return evaluate(own, rng, clean, params, 64, params.max_steps_in_episode)[1].mean()

    algorithm = algorithm.replace(eval_callback=evaluated)
    keys = jax.random.split(jax.random.PRNGKey(0), SEEDS)
    ts, evaluations = jax.jit(jax.vmap(algorithm.train))(keys)
    lost = jax.vmap(lambda p: jnp.stack([jnp.isnan(x).any() for x in jax.tree.leaves(p)]).any())(ts.actor_ts.params)
    last = evaluations.reshape(SEEDS, -1)[:, -1]
    return [None if bad else round(float(x), 1) for bad, x in zip(lost.tolist(), last.tolist(), strict=True)]


if __name__ == "__main__":
    for side, kind, faulty in (
        ("rejax, no fault", PPO, False),
        ("rejax", PPO, True),
        ("rejax, guarded", Guarded, True),
    ):
        print(json.dumps({"side": side, "returns": returns(kind, faulty)}), flush=True)
