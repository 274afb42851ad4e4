"""Episodes to look at: films, and a page to turn them about in."""
