"""Advice on a running job: what limits it, what to change, what that would gain, how sure that is."""

__all__: list[str] = []
