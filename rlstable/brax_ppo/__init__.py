"""Drop-in for `brax.training.agents.ppo.train`: change the import to `from rlstable import brax_ppo as ppo`."""

from brax.training.agents.ppo import checkpoint as checkpoint

from rlstable.brax_ppo.training import train as train
