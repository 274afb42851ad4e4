"""Shows episodes of a policy: mp4 films, and an interactive 3D page."""
