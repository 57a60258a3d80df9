"""Many processes, all faults, for a long time: nothing lost, nothing wrong, nothing that grows."""
