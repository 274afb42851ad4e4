"""What watches over a run from the host: what the device really computes, memory, the physics of the model."""
