"""Any task of rlstable as a Gymnasium environment, single or vectorised."""
