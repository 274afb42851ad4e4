"""Guards judge that something is wrong and trip; limiters bound numbers in the ordinary course of work."""
