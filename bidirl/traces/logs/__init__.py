"""Read the logs of RL training frameworks into one normalised table per run.

A framework is a table, not code: see ``bidirl.traces.logs.table`` for how to add one.
"""

from bidirl.traces.logs.parser import FORMATS, LogParser, read_logs

__all__ = ["FORMATS", "LogParser", "read_logs"]
