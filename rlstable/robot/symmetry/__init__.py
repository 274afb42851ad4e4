"""Left-right symmetry of a robot: pairs of its parts, mirror rules of its terms, and the mirror for `ppo.symmetry`."""
