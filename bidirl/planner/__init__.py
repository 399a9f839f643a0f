"""Plan, scheduler, policies and the partition search."""
