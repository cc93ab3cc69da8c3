"""The fewest possible instructions for a workload, in C: no correct client can be faster."""
