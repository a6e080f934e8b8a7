"""The commands of the simulator, one file each: options, work, printed tables, and the object for stdout."""
