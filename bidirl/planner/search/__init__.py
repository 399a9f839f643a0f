"""The planner's search: which partition, layouts and lending a job should run, and why the others lose."""

__all__: list[str] = []
