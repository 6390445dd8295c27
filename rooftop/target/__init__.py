"""JAX programs run on devices that are described, not present: arrays are stand-ins, large jits are compiled."""
