"""Stage models of a job, fitted to the log of a run of that job."""

__all__: list[str] = []
