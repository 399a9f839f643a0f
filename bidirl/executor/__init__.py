"""Real-clock driver and backends."""
