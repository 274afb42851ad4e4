"""What the commands share: options, composition with Hydra, sweeps."""
