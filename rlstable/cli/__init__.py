"""Options, composition with Hydra and sweeps: shared by the commands."""
