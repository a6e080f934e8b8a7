"""The commands of the simulator, one file each: its options, what it does and prints, and the object for stdout."""
