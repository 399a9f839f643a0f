"""Records, readers, writers and generators of workloads and runs."""
