"""Code that the commands share: options, and composition with Hydra."""
