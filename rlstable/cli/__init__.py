"""Code that the commands share: options, composition with Hydra, and sweeps."""
