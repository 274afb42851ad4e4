"""Guards check for wrong values and trip; limiters bound values in normal operation."""
